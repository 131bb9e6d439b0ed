"""How retrieval is speculated: what RaLMSpec calls P, S and A, and what is beyond the paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..check_count import check_count

# The paper's settings, with prefetching or the scheduler on and off.
_PREFETCH, _NO_PREFETCH = 20, 1
_FIXED_STRIDE = 3
_PUBLISHED_MAX_GAMMA = 0.6
NEXT_ENTRIES = 10
DEFAULT_TIMEOUT = 60.0


@dataclass(frozen=True)
class Speculation:
    """How retrieval is speculated. [`Speculation.published`] has the paper's settings (RaLMSpec,
    arXiv 2401.14021).

    Args:
        prefetch (`int`, *optional*, defaults to 20):
            P: how many passages of each search the request cache takes, 1 for the best alone.
        stride (`int` or `"os3"`, *optional*, defaults to `"os3"`):
            S: how many steps are speculated before they are verified. `"os3"` chooses what
            maximises the expected verified steps per second.
        asynchronous (`bool`, *optional*, defaults to `True`):
            A: whether speculation continues while a verification runs.
        max_gamma (`float`, *optional*):
            The cap of the probability of a right step, which OS3 then estimates as the paper does
            (0.6 there). By default it is estimated by lag, and may come close to 1: see
            [`~ralm.gamma.GammaByLag`].
        steps_ahead (`int`, *optional*):
            The most steps that are speculated beside an asynchronous verification; 1 in the paper.
            By default as many as pay.
        pq_index (`bool`, *optional*, defaults to `True`):
            Whether speculation may use a kNN datastore's PQ index (see
            [`KnnDatastore.add_pq_index`]) instead of the request cache, while it measurably saves
            more time than it takes; not in the paper.
        next_entries (`int`, *optional*):
            kNN-LM: how many entries after each retrieved one the request cache takes as well, n in
            the paper's section 5.3, and 10 there. By default 10 where `k` is at most 128, and none
            where it is more: they would add hardly anything, and make guesses slow.
        timeout (`float`, *optional*, defaults to 60):
            The most seconds for one search. A search that takes longer, or fails, is repeated
            once. `None` for no limit.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
    """

    prefetch: int = _PREFETCH
    stride: int | Literal["os3"] = "os3"
    asynchronous: bool = True
    max_gamma: float | None = None
    steps_ahead: int | None = None
    pq_index: bool = True
    next_entries: int | None = None
    timeout: float | None = DEFAULT_TIMEOUT

    def __post_init__(self) -> None:
        check_count("prefetch", self.prefetch)
        if self.stride != "os3":
            check_count("stride", self.stride, ' or "os3"')
        for name in ("asynchronous", "pq_index"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, but is {getattr(self, name)!r}")
        if self.max_gamma is not None and not 0 < self.max_gamma < 1:
            raise ValueError(
                f"max_gamma must lie between 0 and 1, or be None, but is {self.max_gamma}"
            )
        if self.steps_ahead is not None:
            check_count("steps_ahead", self.steps_ahead, " or None")
        if self.next_entries is not None and self.next_entries != 0:
            check_count("next_entries", self.next_entries, ", 0 or None")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds, or None, but is {self.timeout}")

    @classmethod
    def parse(cls, text: str | Speculation | None) -> Speculation | None:
        """What the option `speculation` means: the letters of what is on, as in the paper's tables.

        Args:
            text (`str`, `Speculation`, *optional*): Of `"p"` (prefetching), `"s"` (stride
                scheduler) and `"a"` (asynchronous verification), in any order; `""` speculates
                with a stride of 3 and nothing else. `None` is the baseline, which does not
                speculate.

        Raises:
            TypeError: If it is something else.
            ValueError: If it has other letters, or one twice.
        """
        return text if text is None or isinstance(text, Speculation) else cls(**_switched(text))

    @classmethod
    def published(cls, text: str) -> Speculation:
        """The same letters with the paper's own settings: gamma at most 0.6, one step beside a
        verification, no PQ index, and the next 10 entries with any `k`. Its kNN-LM is `"s"`: the
        entries take the place of prefetching, and verification is not asynchronous. Arguments and
        exceptions as of [`Speculation.parse`]."""
        return cls(
            **_switched(text),
            max_gamma=_PUBLISHED_MAX_GAMMA,
            steps_ahead=1,
            pq_index=False,
            next_entries=NEXT_ENTRIES,
        )


def _switched(text: str) -> dict[str, Any]:
    if not isinstance(text, str):
        raise TypeError(
            'speculation must be a string like "psa", a Speculation, or None for none, but is '
            f"{text!r}"
        )
    if not set(text) <= set("psa") or len(set(text)) < len(text):
        raise ValueError(
            'speculation must be of the letters "p" (prefetching), "s" (stride scheduler) and "a" '
            f"(asynchronous verification), each at most once, but is {text!r}"
        )
    return {
        "prefetch": _PREFETCH if "p" in text else _NO_PREFETCH,
        "stride": "os3" if "s" in text else _FIXED_STRIDE,
        "asynchronous": "a" in text,
    }
