"""What `RetrievalStats` shows."""

from hf_refspec.ralm.stats import RetrievalStats


def test_repr_shows_what_one_wants_to_know_first():
    stats = RetrievalStats(
        searches=3, retrievals=8, speculated=6, verified=3, mismatched=1, best_ids=[4] * 500
    )
    assert repr(stats) == (
        "RetrievalStats(steps=500, searches=3, speculated=6, verified=3, gamma=0.75)"
    )
