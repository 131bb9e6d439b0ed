"""Calls that retrieve: their ends and streams, one text each, and cores that searches leave."""

from __future__ import annotations

import pytest
from transformers import MaxLengthCriteria

import hf_refspec as rs
from hf_refspec.ralm.options import RalmSpeculation
from tests.helpers.bag_of_tokens import BagOfTokens
from tests.helpers.calls import ListStreamer
from tests.helpers.walks import OnTwoCores, Vectors, generated

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
