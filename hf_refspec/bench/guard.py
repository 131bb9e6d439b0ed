"""A guard against getting worse, for machines of any speed: MAT, forward passes and relative cost.

MAT is that of replays, which depends on nothing but texts and code. What drafting costs is counted
in runs of a fixed calibration loop beside it. benchmarks/guard.json has the figures that hold, and
benchmarks/guard.jsonl text of this package's own: edits of pieces of it, and completions.

    python -m hf_refspec.bench.guard [--data DIR]            # checks
    python -m hf_refspec.bench.guard [--data DIR] --write    # takes the new figures for good
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..demo.default_model import load_tokenizer
from ..drafting.datastore_drafts import DatastoreDrafts
from ..drafting.drafter import Drafter
from ..drafting.reference_copy import ReferenceCopy
from ..drafting.sessions.retrieval_cache import RetrievalCache
from ..drafting.tree import DraftTree
from ..index.kernels import warmup
from ..store.datastore import Datastore
from .records import read_records
from .replay import replay, stand_in_model
from .suites import (
    Question,
    RecordedAnswer,
    answered,
    chat_prompt,
    humaneval,
    llma_rag,
    random_texts,
    recorded,
    spec_bench,
)

LEAST_MAT = 0.99  # of the baseline
MOST_COST = 1.5
ROUNDS = 15
SECOND_LOOKS = 4
STEPS = 48  # timed in each round
ANSWERS = 10  # of each data file
AGAIN = "Once more: "


@dataclass(frozen=True)
class Case:
    """Answers to replay, of a vocabulary, and what drafts."""

    vocab_size: int
    answers: list[RecordedAnswer]
    drafter: Drafter
    nodes: int


@dataclass(frozen=True)
class Figures:
    """What is guarded of a case.

    Attributes:
        mat (`float`), forward_passes (`int`): Of the replay.
        relative_cost (`float`): Of a step of the drafter, in runs of the calibration loop.
    """

    mat: float
    forward_passes: int
    relative_cost: float


def shipped_cases(text: Path, folder: Path) -> dict[str, Case]:
    """Cases of the text that comes with the package.

    Args:
        text (`Path`): `guard.jsonl`.
        folder (`Path`): An empty one, for datastores.
    """
    tokenizer = load_tokenizer()
    edits, completions = _answers(text, "edit", tokenizer), _answers(text, "completion", tokenizer)
    again = _answers(text, "edit", tokenizer, AGAIN)
    # What the completions are not from, but is like them.
    documents = [np.array(answer.prompt_ids) for answer in edits]
    store = Datastore.build(documents, tokenizer, folder / "full", progress=False, num_proc=1)
    compact = store.compact(folder / "compact", max_bytes=20_000, progress=False)
    case = partial(Case, len(tokenizer))
    return {
        "edits, LLMA": case(edits, ReferenceCopy(mode="llma", copy_length=18), 18),
        "edits, ReferenceCopy, 16": case(edits, ReferenceCopy(), 16),
        "edits, ReferenceCopy, 64": case(edits, ReferenceCopy(), 64),
        "asked again, blend with RetrievalCache, 16": case(
            edits[:2] + again[:2], ReferenceCopy() | RetrievalCache(), 16
        ),
        "completions, ReferenceCopy, 64": case(completions, ReferenceCopy(), 64),
        "completions, REST, 64": case(completions, DatastoreDrafts(store, mode="rest"), 64),
        "completions, DatastoreDrafts, 64": case(completions, DatastoreDrafts(store), 64),
        "completions, compact, 64": case(completions, DatastoreDrafts(compact), 64),
        "completions, blend with DatastoreDrafts, 64": case(
            completions, ReferenceCopy() | DatastoreDrafts(store), 64
        ),
        "no-overlap, ReferenceCopy, 16": case(random_texts(tokenizer)[:1], ReferenceCopy(), 16),
    }


def data_cases(data: Path) -> dict[str, Case]:
    """Cases of the data files, see benchmarks/README.md."""
    tokenizer = load_tokenizer(str(data / "llama2-tokenizer"))
    rag = llma_rag(data / "llma_rag.jsonl", tokenizer)[:ANSWERS]
    problems = humaneval(data / "HumanEval.jsonl.gz", tokenizer)[:ANSWERS]
    questions = spec_bench(data / "spec_bench_questions.jsonl")
    with_answers = [question for question in questions if question.answers]
    first_turns = [next(_turns(each, tokenizer)) for each in with_answers[::ANSWERS]]
    multi_turn = [each for each in with_answers if len(each.turns) > 1][:ANSWERS]
    conversations = [turn for each in multi_turn for turn in _turns(each, tokenizer)]
    case = partial(Case, len(tokenizer))
    return {
        "rag, ReferenceCopy, 64": case(rag, ReferenceCopy(), 64),
        "humaneval, ReferenceCopy, 64": case(problems, ReferenceCopy(), 64),
        "spec-bench, ReferenceCopy, 64": case(first_turns, ReferenceCopy(), 64),
        "multi-turn, blend with RetrievalCache, 64": case(
            conversations, ReferenceCopy() | RetrievalCache(), 64
        ),
    }


def _turns(question: Question, tokenizer: PreTrainedTokenizerBase) -> Iterator[RecordedAnswer]:
    """Each turn with its recorded answer, after those before it."""
    assert question.answers is not None
    messages: list[str] = []
    for turn, (text, answer) in enumerate(zip(question.turns, question.answers, strict=True)):
        messages.append(text)
        yield RecordedAnswer(chat_prompt(messages, tokenizer), answered(question, turn, tokenizer))
        messages.append(answer)


def _answers(
    path: Path, kind: str, tokenizer: PreTrainedTokenizerBase, prefix: str = ""
) -> list[RecordedAnswer]:
    return [
        recorded(prefix + record.text("prompt"), record.text("answer"), tokenizer)
        for record in read_records(path)
        if record.text("kind") == kind
    ]


def measure(case: Case, before: dict[str, Any] | None = None) -> Figures:
    """Replays a case, and times its drafter beside the calibration loop.

    Args:
        case ([`Case`]): What to measure.
        before (`dict`, *optional*): Its figures that hold. A cost that is too high beside them is
            measured again: work of others makes drafting dear for a while, worse code for good.
    """
    stats = replay(case.answers, case.drafter, stand_in_model(case.vocab_size), case.nodes)
    cost = _relative_cost(case)
    for _ in range(SECOND_LOOKS):
        if before is None or cost <= MOST_COST * before["relative_cost"]:
            break
        cost = min(cost, _relative_cost(case))
    return Figures(round(stats.mat, 4), stats.forward_passes, round(cost, 3))


def _relative_cost(case: Case) -> float:
    """A step's cost in runs of the calibration loop.

    Of each step and of each run the fastest of some rounds counts, which others who use the
    machine have hardly disturbed.
    """
    steps, loops = [], []
    for _ in range(ROUNDS):
        steps.append(_step_seconds(case))
        loops.append([_calibration_seconds() for _ in range(STEPS)])
    return float(np.min(steps, axis=0).mean() / np.min(loops))


def _step_seconds(case: Case) -> list[float]:
    """How long each step takes along the first answer: to hear of a token, and to draft."""
    answer = case.answers[0]
    prompt_ids, answer_ids = map(np.array, (answer.prompt_ids, answer.answer_ids[:STEPS]))
    case.drafter.begin(prompt_ids, case.vocab_size)
    seconds = []
    for i in range(len(answer_ids)):
        began = perf_counter()
        case.drafter.observe(answer_ids[i : i + 1], DraftTree.empty(), None)
        case.drafter.draft(case.nodes)
        seconds.append(perf_counter() - began)
    return seconds


def _calibration_seconds() -> float:
    """Work of the kind that drafting is: small arrays made, joined and sorted, and plain loops."""
    began = perf_counter()
    numbers = np.arange(256, dtype=np.int64) * 7919 % 257
    for _ in range(10):
        order = np.argsort(numbers, kind="stable")
        numbers = np.concatenate((numbers[order][128:], numbers[:128]))
        sum(numbers.tolist())
    return perf_counter() - began


def failures(measured: dict[str, Figures], baseline: dict[str, Any]) -> list[str]:
    """What has become worse, a line each.

    Args:
        measured (`dict[str, Figures]`): By case.
        baseline (`dict`): The figures that hold, by case.
    """
    lines = []
    for name, figures in measured.items():
        if name not in baseline:
            lines.append(f"{name}: not in the baseline; add it with --write")
            continue
        before = Figures(**baseline[name])
        if figures.mat < LEAST_MAT * before.mat:
            lines.append(f"{name}: MAT was {before.mat}, is {figures.mat}")
        if figures.forward_passes * LEAST_MAT > before.forward_passes:
            passes = f"were {before.forward_passes}, are {figures.forward_passes}"
            lines.append(f"{name}: forward passes {passes}")
        if figures.relative_cost > MOST_COST * before.relative_cost:
            cost = f"cost {before.relative_cost} calibration loops, costs {figures.relative_cost}"
            lines.append(f"{name}: drafting {cost}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Checks, or writes, the figures; returns 1 if they have become worse."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--benchmarks", type=Path, default=Path("benchmarks"))
    parser.add_argument("--data", type=Path, help="the folder of the data files; they are optional")
    parser.add_argument("--write", action="store_true", help="take the new figures for good")
    options = parser.parse_args(arguments)
    if not (options.benchmarks / "guard.jsonl").is_file():
        parser.error(
            f"--benchmarks {options.benchmarks} has no guard.jsonl; run this in a checkout, or "
            "name the folder `benchmarks` of one"
        )

    if options.data and not options.data.is_dir():
        parser.error(f"--data {options.data} is no folder; benchmarks/README.md says what is in it")
    path = options.benchmarks / "guard.json"
    baseline = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    torch.set_num_threads(1)  # the stand-in is too small to share out
    warmup()
    with TemporaryDirectory() as folder:
        cases = shipped_cases(options.benchmarks / "guard.jsonl", Path(folder))
        cases |= data_cases(options.data) if options.data else {}
        measured = {}
        for name, case in cases.items():
            measured[name] = measure(case, None if options.write else baseline.get(name))
            print(f"{name:45} {measured[name]}", flush=True)
    if options.write:
        figures = baseline | {name: asdict(each) for name, each in measured.items()}
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        return 0
    worse = failures(measured, baseline)
    print("\n".join(worse) or "nothing has become worse")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
