"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes a text on up to the first stop string, and holds back what may begin one.

    Args:
        strings (sequence of `str`): None of them empty.

    Attributes:
        found (`bool`): Whether one has come; nothing is to follow it.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.found = False
        self._strings = strings
        self._held = ""

    def put(self, text: str) -> str:
        """Takes the next piece, and returns what is sure to stand before any stop string."""
        text = self._held + text
        places = [place for each in self._strings if (place := text.find(each)) >= 0]
        self.found = bool(places)
        end = min(places) if places else len(text) - self._begun(text)
        self._held = "" if self.found else text[end:]
        return text[:end]

    def end(self) -> str:
        """What was held back for nothing."""
        return self._held

    def _begun(self, text: str) -> int:
        """How many characters at the end of a text may begin a stop string."""
        longest = max((len(each) - 1 for each in self._strings), default=0)
        counts = range(min(longest, len(text)), 0, -1)
        ends = (n for n in counts if any(each.startswith(text[-n:]) for each in self._strings))
        return next(ends, 0)
