"""Copies of logits processors share what was compiled, and read texts of their own."""

from __future__ import annotations

import pytest

from hf_refspec.generation.batch import copied_processor


class Held:
    """A processor that was used before, as libraries keep them."""

    def __init__(self, compiled, matcher):
        self.compiled, self.matchers = compiled, [matcher]


def test_llguidance(tokenizer):
    llguidance = pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    from llguidance.hf import from_tokenizer

    tokens = from_tokenizer(tokenizer)
    grammar = llguidance.LLMatcher.grammar_from_regex("ab")
    held = Held(tokens, llguidance.LLMatcher(tokens, grammar))
    copied = copied_processor(held)
    copied.matchers[0].consume_token(tokenizer("a")["input_ids"][0])
    assert copied.compiled is tokens
    assert held.matchers[0].compute_ff_bytes() == b"ab"
    assert copied.matchers[0].compute_ff_bytes() == b"b"


def test_xgrammar(tokenizer):
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed (see setup.cfg)")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    compiled = xgrammar.GrammarCompiler(info).compile_regex("ab")
    held = Held(compiled, xgrammar.GrammarMatcher(compiled))
    copied = copied_processor(held)
    assert copied.matchers[0].accept_token(tokenizer("a")["input_ids"][0])
    assert copied.compiled is compiled
    assert held.matchers[0].find_jump_forward_string() == "ab"
    assert copied.matchers[0].find_jump_forward_string() == "b"
