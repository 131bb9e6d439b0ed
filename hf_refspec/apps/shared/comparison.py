"""Plain decoding against drafted or speculative decoding: the same ids, and how much sooner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from transformers import BatchEncoding, PreTrainedModel


@dataclass(frozen=True)
class Decoded:
    """The new ids of one call of `generate`, and the seconds that it took."""

    ids: list[int]
    seconds: float


def decode(model: PreTrainedModel, inputs: BatchEncoding, **options: Any) -> Decoded:
    """Calls `generate` for one prompt, ids and mask `(1, n)`, and measures the time."""
    began = perf_counter()
    output = model.generate(**inputs, **options)
    ids = output[0, inputs["input_ids"].shape[1] :].tolist()  # waits for a GPU
    return Decoded(ids, perf_counter() - began)


def rate(calls: Iterable[Decoded]) -> float:
    """The tokens per second of several calls together."""
    calls = list(calls)
    return sum(len(call.ids) for call in calls) / sum(call.seconds for call in calls)


def speedup(plain: Iterable[Decoded], other: Iterable[Decoded]) -> float:
    """How many times as fast the `other` calls are, all of them together."""
    return rate(other) / rate(plain)


def first_difference(plain_ids: Sequence[int], other_ids: Sequence[int]) -> int | None:
    """The first position at which ids differ or one list ends; `None` where they are equal."""
    pairs = enumerate(zip(plain_ids, other_ids, strict=False))
    differing = next((i for i, (plain, other) in pairs if plain != other), None)
    if differing is None and len(plain_ids) != len(other_ids):
        return min(len(plain_ids), len(other_ids))
    return differing


def verdict(plain_ids: Sequence[int], other_ids: Sequence[int]) -> str:
    """Whether ids are those of plain decoding, in words."""
    position = first_difference(plain_ids, other_ids)
    return "ids identical" if position is None else f"IDS DIFFER from position {position}"
