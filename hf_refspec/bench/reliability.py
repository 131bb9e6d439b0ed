"""Are the estimates right? Of the nodes that a blend believes in so much, how many are accepted.

    python -m hf_refspec.bench.reliability llma_rag.jsonl --tokenizer path/or/hub-id --out folder

The recorded answers stand for what the target model says. Estimates of the first tokens do not
count: they are made before anything has been learned of these texts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from ..drafting.datastore_drafts import DatastoreDrafts
from ..drafting.drafter import Drafter
from ..drafting.reference_copy import ReferenceCopy
from ..drafting.sessions.retrieval_cache import RetrievalCache
from ..drafting.tree import ROOT, DraftTree
from ..store.datastore import Datastore
from .plots import check_plotting, new_plot
from .report import table
from .suites import RecordedAnswer, humaneval, llma_rag

BINS = 10
LEARNING = 2000  # tokens that come before what counts
NODES = 64


def foreseen(tree: DraftTree, tokens: np.ndarray) -> np.ndarray:
    """Which nodes of a draft are what came: bool of shape `(T,)`, for `tokens` int64 `(m,)`."""
    right = np.zeros(len(tree), dtype=np.bool_)
    children = tree.children()
    node = ROOT
    for token in tokens.tolist():
        child = children.get((node, token))
        if child is None:
            break
        right[child] = True
        node = child
    return right


def judge_drafts(
    drafter: Drafter, answers: Iterable[RecordedAnswer], vocab_size: int, skipped_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Drafts along recorded answers.

    Args:
        drafter ([`Drafter`]): What drafts.
        answers (iterable of [`RecordedAnswer`]): What came.
        vocab_size (`int`): All tokens are below it.
        skipped_tokens (`int`): Drafts before so many tokens do not count.

    Returns:
        The estimate of each node (float32 of shape `(n,)`), and whether it was accepted (bool).
    """
    estimates, outcomes, told = [], [], 0
    for answer in answers:
        ids = np.array(answer.answer_ids, dtype=np.int64)
        with drafter.session(np.array(answer.prompt_ids, dtype=np.int64), vocab_size):
            drafter.observe(ids[:1], DraftTree.empty(), None)
            place = 1
            while place < len(ids):
                tree = drafter.draft(NODES)
                right = foreseen(tree, ids[place:])
                if told + place >= skipped_tokens:
                    # What lies behind the text's end nobody can tell.
                    known = tree.depths() <= len(ids) - place
                    estimates.append(tree.probs[known])
                    outcomes.append(right[known])
                emitted = ids[place : place + int(right.sum()) + 1]
                drafter.observe(emitted, tree, None)
                place += len(emitted)
        told += len(ids)
    return np.concatenate(estimates), np.concatenate(outcomes)


def reliability(estimates: np.ndarray, outcomes: np.ndarray) -> list[tuple[int, float, float]]:
    """Of each tenth of estimates that has any: how many, their mean, and the share accepted."""
    bins = np.minimum((estimates * BINS).astype(np.int64), BINS - 1)
    return [
        (int(here.sum()), float(estimates[here].mean()), float(outcomes[here].mean()))
        for here in (bins == each for each in range(BINS))
        if here.any()
    ]


def calibration_error(bins: list[tuple[int, float, float]]) -> float:
    """The expected calibration error: the mean distance of estimates from what was observed."""
    total = sum(count for count, _, _ in bins)
    return sum(count * abs(estimate - observed) for count, estimate, observed in bins) / total


def plot(bins: list[tuple[int, float, float]], name: str, path: Path) -> None:
    """Draws what was observed against what had been estimated."""
    error = calibration_error(bins)
    _, estimates, observed = zip(*bins, strict=True)
    with new_plot(path) as axes:
        axes.plot([0, 1], [0, 1], linestyle=":", color="gray", label="as estimated")
        axes.plot(estimates, observed, marker="o", label=f"{name}, calibration error {error:.3f}")
        axes.set(xlabel="estimated probability of acceptance", ylabel="accepted", aspect="equal")


def main(arguments: list[str] | None = None) -> None:
    """Prints the share of nodes accepted by what they had promised, and plots it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("data", type=Path, help="llma_rag.jsonl or HumanEval.jsonl.gz")
    parser.add_argument("--tokenizer", required=True, help="a folder or a Hub id")
    parser.add_argument("--datastore", help="a folder or a Hub id, to draft from as well")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the plot")
    options = parser.parse_args(arguments)

    check_plotting()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    read = humaneval if options.data.suffix == ".gz" else llma_rag
    answers = read(options.data, tokenizer)
    drafter = ReferenceCopy() | RetrievalCache(top_k=0)
    if options.datastore:
        store = Datastore.from_pretrained(options.datastore, tokenizer=tokenizer)
        drafter |= DatastoreDrafts(store)
    bins = reliability(*judge_drafts(drafter, answers, len(tokenizer), LEARNING))
    rows = [(count, f"{estimate:.3f}", f"{observed:.3f}") for count, estimate, observed in bins]
    print(table(["nodes", "estimated", "accepted"], rows))
    print(f"expected calibration error: {calibration_error(bins):.4f}")
    options.out.mkdir(parents=True, exist_ok=True)
    plot(bins, options.data.stem, options.out / "reliability.png")


if __name__ == "__main__":
    main()
