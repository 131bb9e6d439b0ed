"""Counts and times of a call that retrieves."""

from hf_refspec.ralm.options import RalmSpeculation
from hf_refspec.ralm.run import generate_with_retrieval
from tests.helpers.walks import Slow, Walk, generated


def test_stats_are_cleared_filled_and_printed():
    _, stats = generated(RalmSpeculation(), Slow())
    again = generate_with_retrieval(Walk(2, 0), Slow(), None, 1, stats=stats)
    assert again is stats
    assert (stats.steps, stats.searches, stats.strides) == (2, 2, [])
    assert stats.search_seconds >= 0.04
    assert "2 steps, 2 queries in 2 searches" in str(stats)
    assert stats.to_dict()["retrievals"] == 2
