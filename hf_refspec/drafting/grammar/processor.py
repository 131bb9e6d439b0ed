"""A grammar compiled by llguidance, and the logits processor that constrains by it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from ...messages import require

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class CompiledGrammar:
    """A grammar, in llguidance's own form, for the tokens of a tokenizer. It raises as
    [`GrammarDrafts`] does, whose `argument` it is. It never changes: a copy is the same object."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, argument: str, grammar: str) -> None:
        self._made_of = tokenizer, argument, grammar
        self._tokens = _read(tokenizer, len(tokenizer))
        self.eos_id: int = self._tokens.eos_token
        self._start: LLMatcher = llguidance().LLMatcher(self._tokens, grammar, log_level=0)
        if self._start.is_error():
            raise ValueError(f"{argument} cannot be compiled: {self._start.get_error().strip()}")
        walk = self.start()
        walk.consume_tokens(walk.compute_ff_tokens())
        if walk.is_error():
            raise ValueError(
                f"{argument} forces a text that is too long, or never ends "
                f"({walk.get_error().splitlines()[0]}); check for rules that refer to themselves"
            )
        walk.compute_bitmask()  # which finds that nothing may follow
        if walk.is_stopped() and not walk.is_accepting():
            raise ValueError(
                f"{argument} matches no text; check for rules that refer to themselves"
            )

    def start(self) -> LLMatcher:
        """The state before the first token."""
        return self._start.deep_copy()

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text."""
        return self._tokens.decode_bytes([token])

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledGrammar:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledGrammar, self._made_of


def llguidance(module: str = "") -> Any:
    """The library, or a module of it; raises an ImportError if this extra is not installed."""
    return require(f"llguidance{module}", "GrammarDrafts", "grammar")


class _Tokens:
    """A tokenizer as llguidance reads it, except that added tokens such as Qwen's `<tool_call>` are
    text unless the tokenizer says that they are special, and that no text becomes special tokens:
    llguidance takes them all for special, and then refuses a text that its tokenizer turns into
    one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, as_read: LLTokenizer) -> None:
        self._as_read = as_read
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [as_read.decode_bytes([token]) for token in range(as_read.vocab_size)]
        added = tokenizer.added_tokens_decoder
        special = {token for token, added_token in added.items() if added_token.special}
        self.special_token_ids = sorted(special.union(tokenizer.all_special_ids))
        names = tokenizer.convert_ids_to_tokens(self.special_token_ids)
        # After the first character of each, where a text is cut so that it is not read as one.
        cuts = [f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in names if name[1:]]
        self._cut = re.compile("|".join(cuts) or "(?!)")

    def __call__(self, text: str) -> list[int]:
        parts = self._cut.split(text)
        return [token for part in parts for token in self._as_read.tokenize_str(part)]


@lru_cache(maxsize=4)
def _read(tokenizer: PreTrainedTokenizerBase, _length: int) -> LLTokenizer:
    """A tokenizer of that length for llguidance, in a second."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer is a {type(tokenizer).__name__} without an `eos_token`, which ends a "
            "grammar's text; set it"
        )
    library = llguidance()
    try:
        tokens = _Tokens(tokenizer, llguidance(".hf").from_tokenizer(tokenizer, slices=[]))
    except Exception as error:
        raise ValueError(
            f"tokenizer is a {type(tokenizer).__name__}, which llguidance cannot read "
            f"({error}); use a fast one, which has a tokenizer.json"
        ) from error
    read: LLTokenizer = library.LLTokenizer(library.TokenizerWrapper(tokens))
    return read


# Strings, regular expressions and comments of Lark, or else the name of a token.
_LARK = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|(?:#|//)[^\n]*|(<[^<>\s]+>)')


def with_token_ids(tokenizer: PreTrainedTokenizerBase, lark: str) -> str:
    """A grammar that names added tokens by ids: llguidance knows names of special tokens alone."""
    added = tokenizer.get_added_vocab()

    def numbered(match: re.Match[str]) -> str:
        name = match[1]
        return f"<[{added[name]}]>" if name in added else match[0]

    return _LARK.sub(numbered, lark)


class _Text(NamedTuple):
    """A row's place in the grammar. It never changes: a copy is the same object."""

    ids: np.ndarray
    prompt_length: int
    matcher: LLMatcher

    def __deepcopy__(self, memo: dict[int, Any]) -> _Text:
        return self


class GrammarProcessor(LogitsProcessor):
    """Allows only the tokens that a grammar allows.

    The grammar begins after the first ids that it sees, the prompt, and an end-of-text token ends
    it. It may serve one call after another, with any number of rows: ids are a prompt unless they
    continue a known text by one token, or go back in its output."""

    knows_one_row = True  # a copy may be asked about each of several, see `request.py`

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._texts: list[_Text] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Sets the scores `(R, vocab_size)` of tokens that cannot follow to minus infinity."""
        rows = input_ids.numpy(force=True).copy()
        self._texts = [self._text(i, ids) for i, ids in enumerate(rows)]
        allowed = np.zeros(scores.shape, np.bool_)
        for text, row in zip(self._texts, allowed, strict=True):
            mask = unpacked_mask(text.matcher)[: len(row)]
            row[: len(mask)] = mask
        # Twice as fast as `masked_fill` on a CPU.
        return torch.where(torch.from_numpy(allowed).to(scores.device), scores, -torch.inf)

    def _text(self, index: int, ids: np.ndarray) -> _Text:
        """The text of a row, which in beam search may continue another row's."""
        for before in (*self._texts[index : index + 1], *self._texts):
            known = len(before.ids)
            if not before.prompt_length < len(ids) <= known + 1:
                continue
            if (before.ids[: len(ids) - 1] == ids[:-1]).all():
                matcher = before.matcher.deep_copy()
                read = known
                if len(ids) <= known:  # back to an earlier point of its output
                    matcher = self._grammar.start()
                    read = before.prompt_length
                matcher.try_consume_tokens(ids[read:].tolist())
                return _Text(ids, before.prompt_length, matcher)
        return _Text(ids, len(ids), self._grammar.start())


def unpacked_mask(matcher: LLMatcher) -> np.ndarray:
    """True for each token that may follow a state, bool of shape `(n,)`."""
    packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(packed, bitorder="little").view(np.bool_)
