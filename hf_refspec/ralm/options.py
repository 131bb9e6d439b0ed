"""The options of speculative retrieval: RaLMSpec's P, S and A, and others beyond the paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

_PREFETCH = 20


@dataclass(frozen=True)
class RalmSpeculation:
    """Options of speculative retrieval (RaLMSpec, arXiv 2401.14021), see also `published`.

    Args:
        prefetch (`int`, *optional*, defaults to 20):
            P: how many passages of a search the request cache takes; 1 for the best alone.
        prefetch_searches (`"all"` or `"first"`, *optional*, defaults to `"all"`):
            Which searches take `prefetch` passages: all of them, as in the paper's text, or the
            first of a call alone, as in the authors' scripts.
        stride (`int` or `"os3"`, *optional*, defaults to `"os3"`):
            S: how many steps are speculated before they are verified. `"os3"` chooses the number
            that maximises the expected verified steps per second, none where waiting is faster.
        asynchronous (`bool`, *optional*, defaults to `True`):
            A: whether speculation continues while a verification runs.
        max_gamma (`float`, *optional*):
            The cap of gamma, the probability that a step is right: 0.6 in the paper. With a cap,
            the scheduler is the paper's: it estimates gamma from the last five verifications of the
            call, at most one step is speculated during an asynchronous verification, and the
            request cache of a kNN-LM takes the next 10 entries after each retrieved one. Without
            one, all steps that pay are speculated during a verification, the next call of a
            retriever begins with the estimates of this one and the ids retrieved last, and a kNN-LM
            takes the next entries with at most 128 neighbours.
    """

    prefetch: int = _PREFETCH
    stride: int | Literal["os3"] = "os3"
    asynchronous: bool = True
    max_gamma: float | None = None
    prefetch_searches: Literal["all", "first"] = "all"

    @classmethod
    def parse(cls, text: str | RalmSpeculation | None) -> RalmSpeculation | None:
        """Reads the option `speculation`, as the paper's tables write it.

        Args:
            text (`str`, `RalmSpeculation`, *optional*): The letters `"p"` (prefetching), `"s"`
                (stride scheduler) and `"a"` (asynchronous verification), in any order; `""`
                speculates with a stride of 3 and nothing else. `None` does not speculate.

        Raises:
            ValueError: If it has other letters, or one twice.
        """
        return text if text is None or isinstance(text, RalmSpeculation) else cls(**_switched(text))

    @classmethod
    def published(cls, text: str) -> RalmSpeculation:
        """As `parse`, with the settings of the authors' scripts.

        These are `max_gamma=0.6`, and prefetching at the first search of a call alone. The
        published kNN-LM is `"s"`: the next entries take the place of prefetching.

        Three things differ: a verification takes `b0 + b1 * stride`, passages keep their keys and
        values (for the baseline as well), and asynchronous verification runs in real time instead
        of being computed."""
        return cls(**_switched(text), max_gamma=0.6, prefetch_searches="first")


def _switched(text: str) -> dict[str, Any]:
    """The arguments of a `RalmSpeculation`, with the paper's numbers, by letters."""
    if not set(text) <= set("psa") or len(set(text)) < len(text):
        raise ValueError(
            'speculation must be of the letters "p" (prefetching), "s" (stride scheduler) and "a" '
            f"(asynchronous verification), each at most once, but is {text!r}"
        )
    return {
        "prefetch": _PREFETCH if "p" in text else 1,
        "stride": "os3" if "s" in text else 3,
        "asynchronous": "a" in text,
    }
