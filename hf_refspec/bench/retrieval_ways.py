"""The ways to retrieve while generating that are compared, and one prompt timed in all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias

from ..ralm.options import Speculation
from ..ralm.stats import RetrievalStats
from .measure import IdsDifferError
from .said import Said
from .ways import LOOK_UP, LOOK_UP_TOKENS, PLAIN, mixed

BASELINE = "baseline"
PUBLISHED, OURS = "as published, psa", "ours, psa"
WITHOUT_SKETCH = "ours, psa, without the sketch"  # of a kNN datastore
WITH_DRAFTS = " + ReferenceCopy"
STRIDES = range(1, 9)
# Of which all ablations and fixed strides are measured, five times as many ways: the first.
ABLATED_QUESTIONS = 3
# Queries of a search, and searches of each size, where these are timed alone.
BATCHES, SEARCHES = (1, 2, 4, 8), 3
# One for each step of the text: where they are the same they say nothing, and else it is an error.
_NOT_KEPT = ("best_ids", "speculation_was_right")


@dataclass(frozen=True)
class RetrievalWay:
    """A way to retrieve while generating.

    Attributes:
        name (`str`): For people.
        speculation ([`Speculation`], *optional*): `None` to wait for every search.
        drafts (`bool`): Whether tokens are drafted as well.
        alone (`dict`, *optional*): The keyword arguments of a `generate` that retrieves nothing,
            and so says something else; `None` where it retrieves.
    """

    name: str
    speculation: Speculation | None
    drafts: bool = False
    alone: dict[str, Any] | None = None


# The new ids, and what to call for what is compared, see [`Bench.say`].
Generate: TypeAlias = Callable[[RetrievalWay, RetrievalStats], tuple[list[int], Callable[[], Said]]]


def main_ways() -> list[RetrievalWay]:
    """The baseline first, then the paper's way and ours."""
    return [
        RetrievalWay(BASELINE, None),
        RetrievalWay(PUBLISHED, Speculation.published("psa")),
        RetrievalWay(OURS, Speculation()),
    ]


def with_drafts() -> list[RetrievalWay]:
    """The baseline and our way once more, each with tokens drafted beside it."""
    return [
        RetrievalWay(way.name + WITH_DRAFTS, way.speculation, drafts=True)
        for way in main_ways()
        if way.name in (BASELINE, OURS)
    ]


def without_retrieval(look_up: bool = True) -> list[RetrievalWay]:
    """The model alone, and with transformers' own drafts: what all the retrieving costs.

    Args:
        look_up (`bool`, *optional*, defaults to `True`): Whether the model takes these.
    """
    ways = [RetrievalWay(PLAIN, None, alone={})]
    if look_up:
        options = {"prompt_lookup_num_tokens": LOOK_UP_TOKENS}
        ways.append(RetrievalWay(LOOK_UP, None, alone=options))
    return ways


def ablations() -> list[RetrievalWay]:
    """The paper's way without some of P, S and A (Tables 1 and 4)."""
    return [
        RetrievalWay(f"as published, {letters or 'none'}", Speculation.published(letters))
        for letters in ("", "p", "s", "a", "ps", "pa", "sa")
    ]


def fixed_strides() -> list[RetrievalWay]:
    """What the stride scheduler is held against; everything else is as in our way."""
    ways = []
    for asynchronous in (True, False):
        ways += [
            RetrievalWay(stride_name(stride, asynchronous), Speculation(20, stride, asynchronous))
            for stride in STRIDES
        ]
    return [*ways, RetrievalWay(scheduled_name(False), Speculation(asynchronous=False))]


def stride_name(stride: int, asynchronous: bool) -> str:
    """The way with a fixed stride."""
    return f"stride {stride}{', asynchronous' if asynchronous else ''}"


def scheduled_name(asynchronous: bool) -> str:
    """The way whose stride OS3 chooses, all else being equal."""
    return OURS if asynchronous else "ours, ps"


def time_ways(
    name: str, ways: list[RetrievalWay], runs: int, generate: Generate, exact: bool
) -> list[dict[str, Any]]:
    """Generates in all ways in turn, in mixed order, as often as there are runs.

    Args:
        name (`str`): What the prompt is called.
        ways (`list` of [`RetrievalWay`]): The first is the one whose ids all must have.
        runs (`int`): How often.
        generate (callable): Generates and fills the statistics.
        exact (`bool`): Whether other ids, or other passages, are an error, as in float32.

    Returns:
        A sample for each run and way, in the order of these, as plain types.

    Raises:
        IdsDifferError: If ids differ where they must not.
    """
    samples: list[dict[str, Any]] = []
    for run in range(runs):
        turns = {way.name: _one_turn(way, generate) for way in mixed(ways, f"{name}, {run}")}
        if run == 0:
            plain, plain_passages = turns[ways[0].name].said, turns[ways[0].name].passages
        for way in ways:
            turn = turns[way.name]
            if way.alone is not None:
                samples.append({**turn.figures, "run": run, "other_tokens": 0})
                continue
            other_passages = turn.passages != plain_passages
            if exact and (turn.said.beyond_rounding(plain) or other_passages):
                raise IdsDifferError(
                    f"{name}: {way.name} gives other ids than {ways[0].name}, or has retrieved "
                    "something else; in float32 they must be the same"
                )
            other_tokens = len(turn.said.differences(plain))
            samples.append({**turn.figures, "run": run, "other_tokens": other_tokens})
    return samples


@dataclass(frozen=True)
class _Turn:
    """A prompt generated in one way: what is kept of it, and what is compared."""

    figures: dict[str, Any]
    said: Said
    passages: list[int]


def _one_turn(way: RetrievalWay, generate: Generate) -> _Turn:
    stats = RetrievalStats()
    began = perf_counter()
    ids, what_was_said = generate(way, stats)
    seconds = perf_counter() - began
    kept = {key: x for key, x in stats.to_dict().items() if key not in _NOT_KEPT}
    figures = {"way": way.name, "seconds": seconds, "tokens": len(ids), "stats": kept}
    return _Turn(figures, what_was_said(), stats.best_ids)


def time_searches(retriever: Any, queries: list[Any], k: int) -> dict[str, list[float]]:
    """The seconds of some searches for `k` of each query, for each size of a batch."""
    seconds: dict[str, list[float]] = {str(batch): [] for batch in BATCHES}
    for _ in range(SEARCHES):
        for batch in BATCHES:
            began = perf_counter()
            retriever.search(queries[:batch], k)
            seconds[str(batch)].append(perf_counter() - began)
    return seconds
