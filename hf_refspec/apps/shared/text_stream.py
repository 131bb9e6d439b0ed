"""The text of tokens, piece by piece."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

PART_OF_CHARACTER = "\ufffd"

# Byte-level tokenizers write a byte as its character in Latin-1 if that is printable, and number
# the others from 0x100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)}


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int, text: str) -> bytes:
    """The bytes of a token's text; of a part of a character those that the vocabulary names."""
    written = tokenizer.convert_ids_to_tokens(token)
    if PART_OF_CHARACTER not in text or not isinstance(written, str):
        return text.encode()
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", written):
        return bytes.fromhex(byte[1])
    if _BYTES.keys() >= {*written}:
        return bytes(_BYTES[character] for character in written)
    return text.encode()


class TextStream:
    """Turns tokens into pieces of text, which together are the text of all tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skips_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._ids: list[int] = []  # a window: a token's text can depend on the one before it
        self._read = 0  # how many of these have been returned as text

    def put(self, token: int) -> str:
        """The text that a token adds; nothing while it ends inside a character."""
        self._ids.append(token)
        text = self.end()
        if text.endswith(PART_OF_CHARACTER):
            return ""
        del self._ids[: self._read]
        self._read = len(self._ids)
        return text

    def end(self) -> str:
        """The rest of the text: a character that was never completed."""
        known = self._decode(self._ids[: self._read])
        return self._decode(self._ids)[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=self._skips_special, clean_up_tokenization_spaces=False
        )
