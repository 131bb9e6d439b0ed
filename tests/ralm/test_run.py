"""Stops and streamers of iterative RaLM and of kNN-LM."""

from __future__ import annotations

import pytest
from bag_of_tokens import BagOfTokens
from calls import ListStreamer
from transformers import MaxLengthCriteria

import hf_refspec as rs

pytestmark = pytest.mark.parametrize("speculation", [None, "", "psa"])


@pytest.fixture(params=["iterative_ralm", "knn_lm"])
def generate(request, byte_llama, tokenizer, inputs, store):
    retrieval = {
        "iterative_ralm": {"retriever": BagOfTokens(len(tokenizer)), "query_length": 8},
        "knn_lm": {"knn_datastore": store, "k": 8, "lambda_": 0.6, "temperature": 4.0},
    }[request.param]
    call = {"custom_generate": getattr(rs, request.param), "max_new_tokens": 40, **retrieval}

    def generated(**options) -> list[int]:
        options = {**inputs, "do_sample": False, "eos_token_id": None, **call, **options}
        return byte_llama.generate(**options)[0].tolist()

    return generated


class Cancelled(ListStreamer):
    def put(self, value):
        super().put(value)
        if len(self.puts) == 9:
            raise InterruptedError


def test_only_what_is_verified_is_streamed(generate, inputs, speculation):
    streamer = ListStreamer()
    ids = generate(streamer=streamer, speculation=speculation)
    prompt = inputs["input_ids"].tolist()
    assert streamer.puts == [prompt, *([token] for token in ids[len(prompt[0]) :])]
    assert streamer.ended == 1
    with pytest.raises(InterruptedError):
        generate(streamer=Cancelled(), speculation=speculation)


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
