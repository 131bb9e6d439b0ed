"""Questions, samples and entries as `hf-refspec bench` writes them, for its tests."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hf_refspec.bench.measure import Sample
from hf_refspec.ralm.stats import RetrievalStats


@dataclass
class Asked:
    """A question."""

    id: str
    ids: list[int] = field(default_factory=lambda: [1, 2])
    of: object = None


def sample(
    method: str, tokens: int, passes: int, prefill: float, decoding: float, **others: Any
) -> dict[str, Any]:
    nodes = others.pop("nodes", 8)
    return asdict(Sample(method, nodes, tokens, passes, prefill, decoding, **others))


def retrieval_sample(method: str, run: int, seconds: float, **stats: Any) -> dict[str, Any]:
    """Of 8 tokens, half of the time for the prefill."""
    retrieval = {**RetrievalStats().to_dict(), **stats}
    half = seconds / 2
    return sample(method, 8, 8, half, half, nodes=0, run=run, retrieval=retrieval)


def retrieval_entry(name: str, samples: list[dict], ablated: bool = False) -> dict[str, Any]:
    about = {"name": name, "retriever": "flat", "passages": 1234, "ablated": ablated}
    return {**about, "samples": samples}
