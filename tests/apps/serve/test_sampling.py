"""Options of the next token: the texts are plain `generate`'s with the same processors."""

from __future__ import annotations

import pytest
import torch
from running_server import NAME, serving
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from hf_refspec.apps.serve.served_model import OutputPenalties

PROMPT = len(b"user: one\nassistant: ")
PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": 0.4}
BIASES = [[[70], 3.0], [[75], -100.0]]
PROCESSORS = {
    "penalties": (PENALTIES, [OutputPenalties(0.7, 0.4, PROMPT)]),
    "bias": ({"logit_bias": {"70": 3, "75": -100}}, [SequenceBiasLogitsProcessor(BIASES)]),
    "repetition": ({"repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(1.3)]),
}  # fmt: skip


def test_each_penalty_is_openais():
    """logit - count * frequency - (count > 0) * presence"""
    scores = OutputPenalties(0.5, 0.25, 2)(torch.tensor([[3, 1, 1, 1, 2]]), torch.zeros(1, 5))
    assert scores.tolist() == [[0, -1.25, -0.75, 0, 0]]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.9}])
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_give_plain_generates_texts(server, plain, name, sampling):
    body, processors = PROCESSORS[name]
    own = {"do_sample": True, **sampling} if sampling else {}
    processors = LogitsProcessorList(processors)
    expected = plain("one", seed=5, logits_processor=processors, **own)
    answer = server.chat("one", seed=5, **sampling, extra_body=body)
    assert answer.choices[0].message.content == expected != plain("one", seed=5, **own)


@pytest.mark.parametrize("option", [{"top_k": 3}, {"min_p": 0.2}])
def test_warpers_give_plain_generates_texts(server, plain, option):
    expected = plain("one", seed=4, do_sample=True, temperature=1.0, **option)
    answer = server.chat("one", seed=4, temperature=1.0, extra_body=option)
    assert answer.choices[0].message.content == expected


@pytest.mark.parametrize("stream", [False, True])
def test_n_rows_are_plain_generates_with_the_seeds_that_follow(speller, tokenizer, plain, stream):
    sampling = {"temperature": 0.9}
    expected = [plain("one", seed=seed, do_sample=True, **sampling) for seed in (7, 8, 9)]
    with serving(speller, tokenizer, max_rows=2) as server:
        answer = server.chat("one", n=3, seed=7, stream=stream, **sampling)
        if not stream:
            assert [each.message.content for each in answer.choices] == expected
            assert answer.usage.completion_tokens == 3 * 32
            return
        texts = ["", "", ""]
        for chunk in answer:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == expected


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_the_models_own_of_each_token(server, speller, tokenizer, stream):
    options = {"logprobs": True, "top_logprobs": 3, "max_tokens": 12, "logit_bias": {"70": 1}}
    answer = server.chat("one", stream=stream, **options)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        text = "".join(chunk.delta.content or "" for chunk in chunks)
        found = [each for chunk in chunks if chunk.logprobs for each in chunk.logprobs.content]
    else:
        text = answer.choices[0].message.content
        found = answer.choices[0].logprobs.content
    assert "".join(each.token for each in found) == text and len(found) == 12
    ids = tokenizer(f"user: one\nassistant: {text}", return_tensors="pt")["input_ids"]
    logits = speller(ids).logits[0].detach()
    logits[:, speller.generation_config.suppress_tokens] = -torch.inf
    expected = logits.log_softmax(-1)
    for place, each in enumerate(found, start=PROMPT):
        assert each.logprob == pytest.approx(float(expected[place - 1, ids[0, place]]), abs=1e-4)
        top = expected[place - 1].topk(3).values.tolist()
        assert [other.logprob for other in each.top_logprobs] == pytest.approx(top, abs=1e-4)
        assert bytes(each.bytes).decode() == each.token


def test_completions_describe_logprobs_in_lists(server):
    create = server.client.completions.create
    answer = create(model=NAME, prompt="the cat", logprobs=2, max_tokens=6, temperature=0)
    [choice] = answer.choices
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == [*range(6)]
    tops = zip(choice.logprobs.top_logprobs, choice.logprobs.token_logprobs, strict=True)
    assert all(len(top) == 2 and max(top.values()) == own for top, own in tops)
