"""A grammar that llguidance has compiled for a tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from transformers import PreTrainedTokenizerBase

from ...extras import require

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Tokenizers as llguidance reads them, which takes a second each, while a grammar uses them.
_READ: WeakValueDictionary[tuple[int, int], _ReadTokenizer] = WeakValueDictionary()


class CompiledGrammar:
    """A grammar for the tokens of a tokenizer. It never changes: copies are the grammar itself.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target model's.
        argument (`str`): Which argument of [`GrammarDrafts`] the grammar comes from, for messages.
        grammar (`str`): In llguidance's own form.

    Raises:
        ImportError: If llguidance is not installed (extra `grammar`).
        TypeError, ValueError: As [`GrammarDrafts`].
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, argument: str, grammar: str) -> None:
        self._made_of = tokenizer, argument, grammar
        self._tokenizer = _read(tokenizer)
        self.vocab_size: int = self._tokenizer.tokens.vocab_size
        self.eos_id: int = self._tokenizer.tokens.eos_token
        self._start = _start(self._tokenizer.tokens, argument, grammar)

    def start(self) -> LLMatcher:
        """The state before the first token."""
        return self._start.deep_copy()

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text."""
        return self._tokenizer.tokens.decode_bytes([token])

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledGrammar:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledGrammar, self._made_of


class _ReadTokenizer:
    """A tokenizer as llguidance reads it, which keeps the one that it was read from."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: LLTokenizer) -> None:
        self.tokenizer, self.tokens = tokenizer, tokens


def llguidance() -> Any:
    """The library, which is an extra; raises an ImportError if it is not installed."""
    return require("llguidance", "GrammarDrafts", "grammar")


def _read(tokenizer: PreTrainedTokenizerBase) -> _ReadTokenizer:
    library = require("llguidance.hf", "GrammarDrafts", "grammar")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"tokenizer must be the target model's tokenizer itself, but is {tokenizer!r}"
        )
    key = id(tokenizer), len(tokenizer)
    read = _READ.get(key)
    if read is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"tokenizer is a {type(tokenizer).__name__} without an `eos_token`, by which a "
                "text of a grammar ends; set it"
            )
        try:
            tokens = library.from_tokenizer(tokenizer)
        except Exception as error:
            raise ValueError(
                f"tokenizer is a {type(tokenizer).__name__}, which llguidance cannot read "
                f"({error}); use a fast one, that has a tokenizer.json"
            ) from error
        read = _READ[key] = _ReadTokenizer(tokenizer, tokens)
    return read


def _start(tokens: LLTokenizer, argument: str, grammar: str) -> LLMatcher:
    """The state before the first token of a grammar that some text matches."""
    matcher = llguidance().LLMatcher(tokens, grammar, log_level=0)
    if matcher.is_error():
        raise ValueError(f"{argument} cannot be compiled: {matcher.get_error().strip()}")
    walk = matcher.deep_copy()
    walk.consume_tokens(walk.compute_ff_tokens())
    if walk.is_error():
        raise ValueError(
            f"{argument} forces a text that is too long, or never ends "
            f"({walk.get_error().splitlines()[0]}); check for rules that refer to themselves"
        )
    walk.compute_bitmask()  # which finds out
    if walk.is_stopped() and not walk.is_accepting():
        raise ValueError(f"{argument} matches no text; check for rules that refer to themselves")
    return matcher
