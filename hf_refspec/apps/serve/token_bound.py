"""The fewest tokens that a text can have, known before it is tokenised."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

# NFC makes a text shorter by less than this: a Greek letter with two marks, by 3.5.
_SHRINKS = {"NFC": 4}
_KEEPS_ALL = {"ByteLevel", "Digits", "Split"}


class TokenBound:
    """The fewest tokens that a text can have.

    A byte-level BPE tokenizer spells every byte of a text with one character of a token, so that
    a text has at least its length divided by the longest token's. Bytes that are not in the
    vocabulary are dropped, and not counted. Other tokenizers may shorten a text by any factor
    (they strip spaces, or fuse what is unknown); for them the bound is 0.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        parts = json.loads(backend.to_str()) if backend is not None else {}
        self._longest = _longest_token(parts)
        known = set(parts["model"]["vocab"]) if self._longest < math.inf else set()
        letters = bytes_to_unicode()  # of byte-level tokenizers: the character for each byte
        self._dropped = bytes(n for n, letter in letters.items() if letter not in known)

    def of(self, text: str) -> int:
        """The bound for one text."""
        return int(len(text.encode().translate(None, self._dropped)) // self._longest)


def _longest_token(parts: dict[str, Any]) -> float:
    """The most bytes of a text that one token can stand for; infinite if nothing bounds them."""
    model, added = parts.get("model", {}), parts.get("added_tokens", [])
    normalizers = [each["type"] for each in _flat(parts.get("normalizer"))]
    splits = list(_flat(parts.get("pre_tokenizer")))
    if (
        model.get("type") != "BPE"
        or model.get("unk_token") is not None
        or not any(each["type"] == "ByteLevel" for each in splits)
        or not all(each["type"] in _KEEPS_ALL for each in splits)
        or any(each.get("behavior") == "Removed" for each in splits)
        or not all(each in _SHRINKS for each in normalizers)
        or any(each["lstrip"] or each["rstrip"] for each in added)  # they take all spaces around
    ):
        return math.inf
    lengths = [*map(len, model["vocab"]), *(len(each["content"].encode()) for each in added)]
    return max(lengths) * max(map(_SHRINKS.__getitem__, normalizers), default=1)


def _flat(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer."""
    if part is not None and part["type"] == "Sequence":
        for each in part.get("normalizers") or part.get("pretokenizers") or []:
            yield from _flat(each)
    elif part is not None:
        yield part
