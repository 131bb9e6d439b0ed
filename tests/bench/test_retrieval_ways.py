"""Ways to retrieve, timed in turn; ids that differ are an error where they must not."""

from __future__ import annotations

import pytest

from hf_refspec.bench.measure import IdsDifferError
from hf_refspec.bench.retrieval_ways import (
    BASELINE,
    OURS,
    PUBLISHED,
    RetrievalWay,
    ablations,
    fixed_strides,
    main_ways,
    time_ways,
    with_drafts,
    without_retrieval,
)
from hf_refspec.bench.said import Said
from hf_refspec.bench.ways import PLAIN
from hf_refspec.ralm.options import Speculation


def test_every_way_has_a_name_of_its_own_and_the_baseline_is_first():
    ways = [
        *main_ways(),
        *with_drafts(),
        *without_retrieval(),
        *ablations(),
        *fixed_strides(),
    ]
    assert len({way.name for way in ways}) == len(ways) == 3 + 2 + 2 + 7 + 17
    assert ways[0] == RetrievalWay(BASELINE, None)
    assert [way.name for way in main_ways()] == [BASELINE, PUBLISHED, OURS]


def test_fixed_strides_differ_from_ours_in_the_stride_alone():
    by_name = {way.name: way.speculation for way in fixed_strides()}
    assert by_name["stride 3, asynchronous"] == Speculation(stride=3)
    assert by_name["stride 8"] == Speculation(stride=8, asynchronous=False)
    assert by_name["ours, ps"] == Speculation.parse("ps")


def test_ways_take_turns_in_mixed_order_and_all_is_noted():
    asked = []

    def generate(way, stats):
        asked.append(way.name)
        stats.strides += [2, 3]
        return [1, 2, 3], lambda: Said([1, 2, 3])

    names = [way.name for way in fixed_strides()]
    samples = time_ways("a", fixed_strides(), 2, generate, exact=True)
    turns = [asked[: len(names)], asked[len(names) :]]
    assert all(sorted(turn) == sorted(names) and turn != names for turn in turns)
    assert turns[0] != turns[1]
    assert [(each["way"], each["run"]) for each in samples] == [
        (name, run) for run in range(2) for name in names
    ]
    assert all(each["tokens"] == 3 and each["other_tokens"] == 0 for each in samples)
    assert samples[0]["stats"]["strides"] == [2, 3] and samples[0]["seconds"] > 0


def test_other_ids_are_an_error_in_float32_and_counted_elsewhere():
    def generate(way, stats):
        ids = [1] if way.name == OURS else [2]
        return ids, lambda: Said(ids)

    with pytest.raises(IdsDifferError, match="question a: ours, psa gives other ids than baseline"):
        time_ways("question a", main_ways(), 1, generate, exact=True)
    samples = time_ways("question a", main_ways(), 1, generate, exact=False)
    assert [each["other_tokens"] for each in samples] == [0, 0, 1]


def test_a_model_that_retrieves_nothing_may_say_something_else():
    def generate(way, stats):
        ids = [1, 2] if way.alone is None else [3]
        return ids, lambda: Said(ids)

    ways = [*main_ways(), *without_retrieval()]
    samples = time_ways("question a", ways, 1, generate, exact=True)
    assert [each["tokens"] for each in samples] == [2, 2, 2, 1, 1]
    assert all(each["other_tokens"] == 0 for each in samples)
    assert [way.name for way in without_retrieval(look_up=False)] == [PLAIN]


def test_a_baseline_that_says_something_else_in_another_run_is_an_error():
    said = iter([1] * len(main_ways()) + [2] * len(main_ways()))

    def generate(way, stats):
        ids = [next(said)]
        return ids, lambda: Said(ids)

    with pytest.raises(IdsDifferError):
        time_ways("question a", main_ways(), 2, generate, exact=True)


def test_other_passages_are_an_error_in_float32():
    def generate(way, stats):
        stats.best_ids += [3, 4 if way.name == OURS else 5]
        return [1], lambda: Said([1])

    with pytest.raises(IdsDifferError, match=r"ours, psa .* has retrieved something else"):
        time_ways("question a", main_ways(), 1, generate, exact=True)
