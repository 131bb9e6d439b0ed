"""The engine: whatever is speculated, the text is that of the baseline."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from walks import ENTRIES, Slow, Vectors, Walk, assert_no_search_goes_on, generated

from hf_refspec.ralm.engine import generate_speculatively
from hf_refspec.ralm.gamma import GammaByLag
from hf_refspec.ralm.options import Speculation

speculations = st.builds(
    Speculation,
    prefetch=st.sampled_from([1, 3, 20]),
    stride=st.one_of(st.just("os3"), st.integers(1, 9)),
    asynchronous=st.booleans(),
    max_gamma=st.sampled_from([None, 0.6]),
    steps_ahead=st.sampled_from([None, 1, 4]),
)


@settings(max_examples=150, deadline=None)
@given(
    speculation=speculations,
    seed=st.integers(0, 2**16),
    jumpiness=st.sampled_from([0.0, 0.5, 3.0]),
    k=st.sampled_from([1, 4]),
    length=st.integers(0, 30),
    nearby=st.booleans(),
    indexed=st.booleans(),
)
def test_no_speculation_changes_the_text(speculation, seed, jumpiness, k, length, nearby, indexed):
    retriever = Vectors(seed)
    args = (length, seed, jumpiness, k)
    plain, plain_stats = generated(None, retriever, *args)
    neighbours = (lambda ids: np.minimum(ids + 1, ENTRIES - 1)) if nearby else None
    candidates = (lambda query, k: np.arange(0, ENTRIES, 3)) if indexed else None
    beside_cache = {"neighbours": neighbours, "candidates": candidates}
    steps, stats = generated(speculation, retriever, *args, **beside_cache)
    assert steps == plain
    assert stats.best_ids == plain_stats.best_ids == [ids[0] for ids in plain]
    assert stats.speculated == stats.verified + stats.mismatched + stats.discarded
    assert sum(stats.speculation_was_right) == stats.verified
    assert sum(stats.strides) + bool(length) == stats.retrievals
    assert len(stats.strides) + bool(length) == stats.searches
    assert plain_stats.retrievals == plain_stats.searches == len(plain)


@pytest.mark.parametrize("letters", ["", "p", "s", "a", "ps", "pa", "sa", "psa"])
def test_every_ablation_gives_the_text_of_the_baseline(letters):
    plain, _ = generated(None, Vectors())
    for speculation in (Speculation.parse(letters), Speculation.published(letters)):
        steps, stats = generated(speculation, Vectors())
        assert steps == plain
        assert stats.searches < len(plain)


def test_while_a_search_runs_speculation_goes_on():
    options = {"stride": 2, "prefetch": ENTRIES}
    plain, _ = generated(None, Vectors())
    waited, waiting = generated(Speculation(asynchronous=False, **options), Slow())
    went_on, stats = generated(Speculation(asynchronous=True, **options), Slow())
    assert waited == went_on == plain
    assert stats.searches < waiting.searches
    assert max(stats.strides) > 2 == max(waiting.strides)


def test_ids_that_change_from_search_to_search_are_taken_as_they_come():
    class Changing(Vectors):
        def search(self, queries, k):
            self.vectors = np.roll(self.vectors, 1, axis=0)
            return super().search(queries, k)

    _, stats = generated(Speculation(), Changing())
    assert stats.mismatched > 0


def test_an_exception_of_the_text_comes_through_and_leaves_no_thread():
    class Broken(Walk):
        def step(self, found):
            if len(self.steps) == 5:
                raise KeyboardInterrupt
            return super().step(found)

    with pytest.raises(KeyboardInterrupt):
        generate_speculatively(Broken(20, 0), Slow(), Speculation(), k=1)
    assert_no_search_goes_on()


def test_stats_are_cleared_filled_and_printed():
    _, stats = generated(Speculation(), Slow())
    again = generate_speculatively(Walk(2, 0), Slow(), None, 1, stats=stats)
    assert again is stats
    assert (stats.steps, stats.searches, stats.strides) == (2, 2, [])
    assert stats.verification_seconds >= 0.04
    assert stats.waiting_seconds > stats.model_seconds
    assert "2 steps, 2 queries in 2 searches" in str(stats)
    assert (
        repr(stats) == "RetrievalStats(steps=2, searches=2, speculated=0, verified=0, gamma=0.00)"
    )
    assert stats.to_dict()["retrievals"] == 2


PSA = Speculation.parse("psa")


def learned_of(retriever):
    """What requests have left to the next one of their kind, the newest last."""
    return [*vars(retriever).get("_learned_by_speculation", {}).values()]


def test_a_request_begins_with_what_the_last_one_of_its_kind_has_seen():
    retriever = Vectors()
    generated(PSA, retriever)
    [first] = learned_of(retriever)
    seen, searches = first.sources[0].scheduler.gamma._seen(), [*first.search_seconds._samples]
    generated(PSA, retriever)
    [second] = learned_of(retriever)
    assert second.sources[0].scheduler.gamma._seen().sum() > seen.sum() > 0
    assert [*second.search_seconds._samples][: len(searches)] == searches
    # The first is as it was, for a request that runs beside the second.
    assert (first.sources[0].scheduler.gamma._seen() == seen).all()
    for other in ("sa", "ps"):  # of another kind
        generated(Speculation.parse(other), retriever)
        [*_, newest] = learned_of(retriever)
        assert newest.search_seconds._samples[0] not in searches
    assert len(learned_of(retriever)) == 3
    assert generated(PSA, retriever)[0] == generated(None, retriever)[0]


def test_as_published_nothing_is_left_to_others_nor_taken_from_them():
    retriever = Vectors()
    generated(Speculation.published("psa"), retriever)
    assert learned_of(retriever) == []
    generated(PSA, retriever)
    before = learned_of(retriever)
    generated(Speculation.published("psa"), retriever)
    assert learned_of(retriever) == before


@pytest.fixture
def told(monkeypatch) -> list[tuple[list[int], int]]:
    """The lags of the steps that were verified, and how many of them were right."""
    told, record = [], GammaByLag.record

    def recorded(self, lags, right):
        told.append((lags, right))
        record(self, lags, right)

    monkeypatch.setattr(GammaByLag, "record", recorded)
    return told


def test_a_lag_counts_the_steps_since_the_last_search_that_the_cache_has(told):
    generated(Speculation(stride=4, asynchronous=False), Vectors())
    assert told and all(lags == list(range(1, len(lags) + 1)) for lags, _ in told)


def test_beside_a_verification_the_lag_counts_the_steps_that_it_is_about(told):
    generated(Speculation(stride=2, steps_ahead=3), Slow(), length=40, jumpiness=1.0)
    (lags, right), outcomes = told[0], set()
    assert lags == [1, 2][: len(lags)]
    for next_lags, next_right in told[1:]:
        all_right = right == len(lags)
        begun = [len(lags) + i for i in (1, 2, 3)] if all_right else [1, 2]
        assert next_lags == begun[: len(next_lags)]
        outcomes.add(all_right)
        lags, right = next_lags, next_right
    assert outcomes == {True, False}


@pytest.mark.parametrize("base", [list, type("Slotted", (), {"__slots__": ()})])
def test_a_retriever_that_can_keep_nothing_is_none_the_worse(base):
    class Bare(base):
        __slots__ = ()

        def search(self, queries, k):
            return Vectors().search(queries, k)

        def score(self, query, ids):
            return Vectors().score(query, ids)

    assert generated(PSA, Bare())[0] == generated(None, Vectors())[0]


def test_more_prefetched_than_a_graph_is_walked_for_is_refused():
    retriever = Vectors()
    retriever.index = "hnsw"
    with pytest.raises(ValueError, match="prefetch must be at most 128"):
        generated(Speculation(prefetch=200), retriever)
    assert generated(Speculation(prefetch=200), retriever, k=200)[1].steps > 0
    retriever.ef_search = 200
    assert generated(Speculation(prefetch=200), retriever)[1].steps > 0
    assert generated(Speculation(prefetch=200), Vectors())[1].steps > 0
