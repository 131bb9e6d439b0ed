"""The text of tokens as they come."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

PART_OF_CHARACTER = "\ufffd"


class TextStream:
    """Turns the tokens of an answer into text one after another, without special tokens. All that
    it returns, put together, is the text of all tokens.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Theirs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # A window of tokens, since a token's text can depend on the one before it, and how many of
        # them are read.
        self._ids: list[int] = []
        self._read = 0

    def put(self, token: int) -> str:
        """The text that a token adds; nothing while it ends inside a character."""
        self._ids.append(token)
        text = self._new_text()
        if text.endswith(PART_OF_CHARACTER):
            return ""
        self._ids, self._read = self._ids[self._read :], len(self._ids) - self._read
        return text

    def end(self) -> str:
        """What is left: a character that was never completed."""
        return self._new_text()

    def _new_text(self) -> str:
        known = self._decode(self._ids[: self._read])
        return self._decode(self._ids)[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
