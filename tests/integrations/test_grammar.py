"""Grammars: of xgrammar and outlines, which keep state and see each prefix once, and of ours."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import pipeline

import hf_refspec as rs

SCHEMA = {
    "type": "object",
    "properties": {
        "adult_price": {"type": "integer", "maximum": 99},
        "child_price": {"type": "integer", "maximum": 99},
    },
    "required": ["adult_price", "child_price"],
    "additionalProperties": False,
}
SAMPLING = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8},
}
MAX_NEW_TOKENS = 32


def checked(text: str) -> str:
    """Asserts that a text is JSON of the schema, and returns it."""
    assert json.loads(text).keys() == SCHEMA["properties"].keys()
    return text


@pytest.fixture(scope="module")
def xgrammar_processor(trained_model, trained_tokenizer):
    """Builds a processor for one call."""
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed (see setup.cfg)")
    from xgrammar.contrib.hf import LogitsProcessor

    vocab_size = trained_model.config.vocab_size
    info = xgrammar.TokenizerInfo.from_huggingface(trained_tokenizer, vocab_size=vocab_size)
    compiler = xgrammar.GrammarCompiler(info)
    grammar = compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    return lambda: LogitsProcessor(grammar)


@pytest.fixture(scope="module", params=["outlines_core", "llguidance"])
def outlines_generator(trained_model, trained_tokenizer, request):
    outlines = pytest.importorskip("outlines", reason="the extra `integrations` is not installed")
    pytest.importorskip(request.param, reason=f"{request.param} is not installed (see setup.cfg)")
    from outlines.types import JsonSchema

    wrapped = outlines.from_transformers(trained_model, trained_tokenizer)
    return outlines.Generator(wrapped, JsonSchema(json.dumps(SCHEMA)), backend=request.param)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_xgrammar(
    trained_model, trained_tokenizer, prompts, xgrammar_processor, drafted_as_plain, sampling
):
    inputs = trained_tokenizer(prompts[1], return_tensors="pt")

    def generated() -> str:
        torch.manual_seed(0)
        ids = trained_model.generate(
            **inputs,
            max_new_tokens=MAX_NEW_TOKENS,
            logits_processor=[xgrammar_processor()],
            **SAMPLING[sampling],
        )
        new_ids = ids[0, inputs.input_ids.shape[1] :]
        return checked(trained_tokenizer.decode(new_ids, skip_special_tokens=True))

    drafted_as_plain(generated)


def test_several_rows_of_xgrammar(
    trained_model, trained_tokenizer, prompts, xgrammar_processor, drafted_as_plain
):
    """They share the compiled grammar, which cannot be copied."""
    inputs = trained_tokenizer(prompts[1:], return_tensors="pt", padding=True)

    def generated() -> list[str]:
        ids = trained_model.generate(
            **inputs,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            logits_processor=[xgrammar_processor()],
        )
        new_ids = ids[:, inputs.input_ids.shape[1] :]
        texts = trained_tokenizer.batch_decode(new_ids, skip_special_tokens=True)
        return [checked(text) for text in texts]

    drafted_as_plain(generated)


def test_outlines(messages, outlines_generator, drafted_as_plain):
    [message] = messages[1]

    def generated() -> str:
        torch.manual_seed(0)
        options = {"max_new_tokens": MAX_NEW_TOKENS, **SAMPLING["sampled"]}
        return checked(outlines_generator(message["content"], **options))

    drafted_as_plain(generated)


def test_several_rows_of_outlines(messages, outlines_generator, drafted_as_plain):
    texts = [message["content"] for [message] in messages[1:]]

    def generated() -> list[str]:
        options = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False}
        return [checked(text) for text in outlines_generator.batch(texts, **options)]

    drafted_as_plain(generated)


@pytest.fixture(scope="module")
def grammar(trained_tokenizer):
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    return rs.GrammarDrafts(trained_tokenizer, json_schema=SCHEMA)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_forced_tokens_in_a_blend(trained_model, trained_tokenizer, prompts, grammar, sampling):
    inputs = trained_tokenizer(prompts[1], return_tensors="pt")
    options = {**inputs, **SAMPLING[sampling], "max_new_tokens": MAX_NEW_TOKENS}
    processors = [grammar.processor()]
    torch.manual_seed(0)
    expected = trained_model.generate(**options, logits_processor=processors)
    blend = grammar | rs.ReferenceCopy() | rs.TokenRecycling()
    options |= {"candidate_generator": blend, "max_draft_tokens": 8}
    torch.manual_seed(0)
    ids = trained_model.generate(**options, logits_processor=processors)
    assert ids.tolist() == expected.tolist()
    checked(trained_tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
    assert blend.stats.mat > 2.5


def test_a_pipeline_with_an_attached_grammar(trained_model, trained_tokenizer, messages, grammar):
    """The pipeline takes the processor, and calls with one text after another."""
    generator = pipeline("text-generation", model=trained_model, tokenizer=trained_tokenizer)
    options = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False}

    def generated() -> list[str]:
        processors = [grammar.processor()]
        chats = generator(messages[1:], logits_processor=processors, **options)
        return [checked(chat[0]["generated_text"][-1]["content"]) for chat in chats]

    expected = generated()
    with rs.attach(trained_model, grammar, max_draft_tokens=8) as attachment:
        assert generated() == expected
    assert attachment.stats.mat > 1.5
