"""Calls that retrieve: their ends and streams, one text each, and cores that searches leave."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial

import pytest
from transformers import MaxLengthCriteria

import hf_refspec as rs
from hf_refspec.ralm.options import RalmSpeculation
from hf_refspec.ralm.run import LEARNED
from tests.helpers.bag_of_tokens import BagOfTokens
from tests.helpers.calls import ListStreamer
from tests.helpers.walks import (
    ENTRIES,
    OnTwoCores,
    Slow,
    Timed,
    Vectors,
    all_ids_are_kept,
    generated,
)

every_speculation = pytest.mark.parametrize("speculation", [None, "", "psa"])


@pytest.fixture(params=["iterative_ralm", "knn_lm"])
def generate(request, byte_llama, tokenizer, inputs, store):
    retrieval = {
        "iterative_ralm": {"retriever": BagOfTokens(len(tokenizer)), "query_length": 8},
        "knn_lm": {"knn_datastore": store, "k": 8, "lambda_": 0.6, "temperature": 4.0},
    }[request.param]
    call = {"custom_generate": getattr(rs, request.param), "max_new_tokens": 40, **retrieval}

    def ids_of(**options) -> list[int]:
        options = {**inputs, "do_sample": False, "eos_token_id": None, **call, **options}
        return byte_llama.generate(**options)[0].tolist()

    return ids_of


class Cancelled(ListStreamer):
    def put(self, value):
        super().put(value)
        if len(self.puts) == 9:
            raise InterruptedError


@every_speculation
def test_only_what_is_verified_is_streamed(generate, inputs, speculation):
    streamer = ListStreamer()
    ids = generate(streamer=streamer, speculation=speculation)
    prompt = inputs["input_ids"].tolist()
    assert streamer.puts == [prompt, *([token] for token in ids[len(prompt[0]) :])]
    assert streamer.ended == 1
    with pytest.raises(InterruptedError):
        generate(streamer=Cancelled(), speculation=speculation)


@every_speculation
def test_eos_stop_strings_and_criteria_end_the_text(generate, tokenizer, inputs, speculation):
    whole, begin = generate(speculation=None), inputs["input_ids"].shape[1]
    for place in (begin, begin + 5, begin + 13, begin + 35):
        end = whole.index(whole[place], begin) + 1
        assert generate(speculation=speculation, eos_token_id=whole[place]) == whole[:end]
    criteria = [MaxLengthCriteria(begin + 9)]
    assert generate(speculation=speculation, stopping_criteria=criteria) == whole[: begin + 9]
    character = next(each for each in tokenizer.decode(whole[begin + 5 :]) if each.isascii())
    stop = {"stop_strings": [character], "tokenizer": tokenizer}
    ids = generate(speculation=speculation, **stop)
    assert ids == generate(speculation=None, **stop) == whole[: len(ids)] != whole


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("slower", [2.0, 3.0])
@pytest.mark.parametrize("search_seconds", [0.3, 0.8, 5.0])
def test_with_as_many_threads_as_cores_no_request_is_slower_than_waiting(
    search_seconds, slower, right
):
    retriever = OnTwoCores(search_seconds, right, per_query=search_seconds / 4)
    retriever.slower = slower
    for retriever.topic in (0, 0, 1, 2, 2):
        began = retriever.now
        stats = retriever.generated(RalmSpeculation(), 12)
        assert stats.contention == 2.0 and "contention 2.00" in str(stats)
        assert retriever.now - began <= 12 * (1 + search_seconds) / 0.97


def test_steps_go_on_beside_searches_where_cores_are_left_to_them():
    seconds = []
    for threads in (2, 1):
        retriever = OnTwoCores(search_seconds=2.0, per_query=1.0)
        retriever.search_threads = retriever.model_threads = threads
        retriever.slower = 1.25
        for _ in range(3):
            stats = retriever.generated(RalmSpeculation())
        assert stats.contention == (2.0 if threads == 2 else 1.0)
        seconds.append(retriever.now)
    assert seconds[1] < 0.8 * seconds[0]


def test_more_prefetched_than_a_graph_is_walked_for_is_refused():
    retriever = Vectors()
    retriever.index = "hnsw"
    with pytest.raises(ValueError, match="prefetch must be at most 128"):
        generated(RalmSpeculation(prefetch=200), retriever)
    assert generated(RalmSpeculation(prefetch=200), retriever, k=200)[1].steps > 0
    retriever.ef_search = 200
    assert generated(RalmSpeculation(prefetch=200), retriever)[1].steps > 0
    assert generated(RalmSpeculation(prefetch=200), Vectors())[1].steps > 0


PS = RalmSpeculation.parse("ps")


def test_a_request_begins_with_what_the_last_one_of_its_kind_has_seen():
    retriever = Timed()
    first, second = retriever.generated(PS), retriever.generated(PS)
    assert first.strides[:2] == Timed().generated(PS).strides[:2]
    assert second.strides[1] > first.strides[1]
    other = RalmSpeculation.parse("s")
    assert retriever.generated(other).strides == Timed().generated(other).strides


def test_as_published_nothing_is_left_to_others_nor_taken_from_them():
    retriever, published = Timed(), RalmSpeculation.published("ps")
    first = retriever.generated(published)
    assert retriever.generated(PS).strides == Timed().generated(PS).strides
    assert retriever.generated(published).strides == first.strides


def test_the_first_search_of_a_request_is_guessed_from_earlier_ones():
    for search_seconds in (0.5, 20.0):
        retriever = Timed(search_seconds)
        requests = [retriever.generated(RalmSpeculation(), length=9) for _ in range(4)]
        assert not requests[0].speculation_was_right[0] and requests[-1].speculation_was_right[0]
        assert requests[-1].waiting_seconds < requests[0].waiting_seconds
        retriever.topic = 1
        assert not retriever.generated(RalmSpeculation(), length=9).speculation_was_right[0]
        for copied in (deepcopy(retriever), pickle.loads(pickle.dumps(retriever))):
            strides = copied.generated(RalmSpeculation(), length=9).strides
            assert strides == Timed(search_seconds).generated(RalmSpeculation(), length=9).strides


def test_no_more_ids_are_kept_than_can_be_scored_in_a_twentieth_of_a_search_or_step():
    for search_seconds, most in ((0.3, 15), (20.0, 50)):
        retriever = Timed(search_seconds, per_id=0.001)
        for retriever.topic in range(20):
            retriever.generated(RalmSpeculation(), length=4)
        ((_, ids),) = vars(retriever)[LEARNED].values()
        assert 0.6 * most <= len(ids) <= 2 * most and ids[0] >= 190_000


@all_ids_are_kept()
def test_calls_of_several_threads_share_what_they_retrieve():
    retriever, plain = Slow(), [generated(None, Vectors(), 20, seed)[0] for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            found = threads.map(partial(generated, RalmSpeculation(), retriever, 20), range(4))
            assert [steps for steps, _ in found] == plain
    ((_, ids),) = vars(retriever)[LEARNED].values()
    assert {i for steps in plain for step in steps for i in step} <= set(ids.tolist())


@pytest.mark.parametrize("speculation", [RalmSpeculation(), PS])
@all_ids_are_kept()
def test_ids_that_have_left_the_knowledge_base_are_forgotten(speculation):
    class Shrinking(Slow):
        def score(self, query, ids):
            return self.vectors[ids] @ query  # an IndexError

    retriever = Shrinking(entries=ENTRIES)
    generated(speculation, retriever)
    retriever.vectors = retriever.vectors[:10]
    plain, _ = generated(None, retriever, seed=1)
    for _ in range(2):
        assert generated(speculation, retriever, seed=1)[0] == plain
    ((_, ids),) = vars(retriever)[LEARNED].values()
    assert ids.max() < 10


@pytest.mark.parametrize("base", [list, type("Slotted", (), {"__slots__": ()})])
def test_a_retriever_that_can_keep_nothing_is_none_the_worse(base):
    class Bare(base):
        __slots__ = ()

        def search(self, queries, k):
            return Vectors().search(queries, k)

        def score(self, query, ids):
            return Vectors().score(query, ids)

    assert generated(RalmSpeculation(), Bare())[0] == generated(None, Vectors())[0]
