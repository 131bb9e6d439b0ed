"""Grammars: of xgrammar and outlines, which keep state and see each prefix once, and of ours."""

import json

import pytest
import torch
from transformers import pipeline

import hf_refspec as rs

SCHEMA = {
    "type": "object",
    "properties": {"adult_price": {"type": "integer", "maximum": 99}},
    "required": ["adult_price"],
    "additionalProperties": False,
}
GREEDY = {"max_new_tokens": 20, "do_sample": False}
SAMPLED = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.8}


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


@pytest.fixture(scope="module")
def outlines_generator(trained_model, trained_tokenizer):
    outlines = pytest.importorskip("outlines", reason="the extra `integrations` is not installed")
    pytest.importorskip("outlines_core", reason="outlines_core is not installed (see setup.cfg)")
    from outlines.types import JsonSchema

    wrapped = outlines.from_transformers(trained_model, trained_tokenizer)
    return outlines.Generator(wrapped, JsonSchema(json.dumps(SCHEMA)), backend="outlines_core")


@pytest.mark.parametrize("rows", ["greedy", "sampled", "several"])
def test_xgrammar(
    trained_model, trained_tokenizer, prompts, xgrammar_processor, drafted_as_plain, rows
):
    """Several rows decode plainly: the processor knows them by their number."""
    texts = prompts[1:] if rows == "several" else prompts[1]
    inputs = trained_tokenizer(texts, return_tensors="pt", padding=True)

    def generated() -> list[str]:
        torch.manual_seed(0)
        ids = trained_model.generate(
            **inputs,
            **(SAMPLED if rows == "sampled" else GREEDY),
            logits_processor=[xgrammar_processor()],
        )
        new_ids = ids[:, inputs.input_ids.shape[1] :]
        new_texts = trained_tokenizer.batch_decode(new_ids, skip_special_tokens=True)
        return [checked(text) for text in new_texts]

    if rows != "several":
        drafted_as_plain(generated)
        return
    expected = generated()
    with rs.attach(trained_model, max_draft_tokens=8):
        assert generated() == expected


def test_outlines(trained_model, messages, outlines_generator, drafted_as_plain):
    texts = [message["content"] for [message] in messages[1:]]

    def sampled() -> str:
        torch.manual_seed(0)
        return checked(outlines_generator(texts[0], **SAMPLED))

    drafted_as_plain(sampled)
    expected = [checked(text) for text in outlines_generator.batch(texts, **GREEDY)]
    with rs.attach(trained_model, max_draft_tokens=8):  # several rows decode plainly
        assert outlines_generator.batch(texts, **GREEDY) == expected


def test_a_pipeline_with_an_attached_grammar(trained_model, trained_tokenizer, messages):
    """The pipeline takes the processor, and calls with one text after another."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    grammar = rs.GrammarDrafts(trained_tokenizer, json_schema=SCHEMA)
    generator = pipeline("text-generation", model=trained_model, tokenizer=trained_tokenizer)

    def generated() -> list[str]:
        processors = [grammar.processor()]
        chats = generator(messages[1:], logits_processor=processors, **GREEDY)
        return [checked(chat[0]["generated_text"][-1]["content"]) for chat in chats]

    expected = generated()
    with rs.attach(trained_model, grammar, max_draft_tokens=8) as attachment:
        assert generated() == expected
    assert attachment.stats.mat > 1.5
