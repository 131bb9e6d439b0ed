"""The text of tokens that come one after another."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

_PART_OF_CHARACTER = "\ufffd"


class TokenText:
    """Decodes tokens as they come.

    A window of tokens is decoded, since a token's text can depend on the one before it.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target model's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._read = 0  # tokens of the window whose text has been returned

    def put(self, token: int) -> str:
        """The text that a token completes; nothing while it ends inside a character."""
        self._window.append(token)
        return self._new_text(last=False)

    def end(self) -> str:
        """The text that is left."""
        return self._new_text(last=True)

    def _new_text(self, last: bool) -> str:
        known = self._decode(self._window[: self._read])
        text = self._decode(self._window)
        if text.endswith(_PART_OF_CHARACTER) and not last:
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return text[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
