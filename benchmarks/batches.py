"""Batches of `generate`: how many times as fast as plain decoding, for each number of draft nodes.

    OMP_WAIT_POLICY=passive MALLOC_ARENA_MAX=1 python benchmarks/batches.py --data DATA

A batch is questions of one of Spec-Bench's categories, padded on the left. Plain decoding and each
of `--nodes` answer it at once, in threads of their own that take turns: a column of tokens at a
time, and the call whose clock is behind goes next. So all of them meet the same moments of a shared
machine. Threads that wait must not spin, and all of them should reuse the same memory, hence what
is set before the command. The prefill is one turn, of the same work in all of them, so that speeds
are those of decoding after it and of whole calls. Every drafter is fresh; what passes cost is known
from the batches before, as in a process that goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

import hf_refspec as rs
from hf_refspec.apps.bench.report import table
from hf_refspec.apps.bench.suites import Question, spec_bench
from hf_refspec.apps.shared.loading import load_model, load_tokenizer
from hf_refspec.apps.space.race import Lane
from hf_refspec.drafting.drafter import Drafter
from hf_refspec.generation.warmup import warmup


class Turns:
    """A streamer that ends its lane's turn when a column of tokens comes."""

    lane: Lane
    prefill_seconds = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.lane.put((), ())
        if self.lane.passes == 2:  # the prompts, and the first tokens
            self.prefill_seconds = self.lane.seconds

    def end(self) -> None:
        pass


class Call:
    """A call of `generate` for a batch, in a lane of its own; with `None` nodes plainly."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batch: BatchEncoding,
        new_tokens: int,
        nodes: int | str | None,
    ) -> None:
        self.drafter: Drafter | None = None
        options: dict[str, Any] = {}
        if nodes is not None:
            self.drafter = rs.ReferenceCopy() | rs.SiblingCopy() | rs.TokenRecycling()
            options = {"candidate_generator": self.drafter, "max_draft_tokens": nodes}
        self._generate = partial(
            model.generate, **batch, max_new_tokens=new_tokens, do_sample=False, **options
        )
        self._turns = Turns()
        self.lane = self._turns.lane = Lane(tokenizer, self._decode)

    def _decode(self) -> None:
        self.ids = self._generate(streamer=self._turns)

    @property
    def seconds(self) -> tuple[float, float]:
        """Of decoding after the prefill, and of the whole call."""
        return self.lane.seconds - self._turns.prefill_seconds, self.lane.seconds


def raced(calls: Sequence[Call]) -> None:
    """Runs calls to their ends, the one that has computed least always next."""
    lanes = [call.lane for call in calls]
    while going := [lane for lane in lanes if not lane.finished]:
        min(going, key=lambda lane: lane.seconds).advance()


def batches(
    questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase, rows: int, longest: int
) -> dict[str, BatchEncoding]:
    """The first `rows` questions of each category that has as many whose prompts have at most
    `longest` tokens."""
    chosen: dict[str, list[str]] = {}
    for question in questions:
        texts = chosen.setdefault(question.id.partition("/")[0], [])
        messages = [{"role": "user", "content": question.turns[0]}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        if len(texts) < rows and len(tokenizer(text)["input_ids"]) <= longest:
            texts.append(text)
    return {
        category: tokenizer(texts, return_tensors="pt", padding=True)
        for category, texts in chosen.items()
        if len(texts) == rows
    }


def speeds(seconds: np.ndarray) -> list[str]:
    """Times as fast as the first call: decoding / the whole call."""
    return [f"{decoding:.2f} / {whole:.2f}x" for decoding, whole in seconds[0] / seconds[1:]]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="see benchmarks/README.md")
    add("--model", help="a folder or a Hub id; default: SmolLM2-135M-Instruct")
    add("--rows", type=int, nargs="+", default=[2, 4, 8, 16])
    add("--dtypes", nargs="+", default=["float32", "bfloat16"])
    add("--nodes", nargs="+", default=["auto", "1", "4"], help="for each row")
    add("--categories", nargs="+", help="default: all")
    add("--max-new-tokens", type=int, default=48)
    add("--longest", type=int, default=700, help="tokens of a prompt")
    args = parser.parse_args(arguments)
    warmup()
    name = args.model or rs.default_model()
    tokenizer = load_tokenizer(name)
    tokenizer.padding_side = "left"
    questions = spec_bench(args.data / "spec_bench_questions.jsonl")
    every = [None, *(each if each == "auto" else int(each) for each in args.nodes)]
    lines = []
    for dtype in args.dtypes:
        model = load_model(name, "cpu", getattr(torch, dtype))
        for rows in args.rows:
            total = np.zeros((len(every), 2))
            chosen = batches(questions, tokenizer, rows, args.longest)
            first = next(iter(chosen.values()))
            raced([Call(model, tokenizer, first, 4, "auto")])  # probes the model
            for category, batch in chosen.items():
                if args.categories and category not in args.categories:
                    continue
                calls = [Call(model, tokenizer, batch, args.max_new_tokens, n) for n in every]
                raced(calls)
                seconds = np.array([call.seconds for call in calls])
                total += seconds
                equal = [torch.equal(call.ids, calls[0].ids) for call in calls[1:]]
                mats = [call.drafter.stats.mat for call in calls if call.drafter]
                line = [dtype, rows, category, *speeds(seconds), *(f"{mat:.2f}" for mat in mats)]
                lines.append([*line, f"{sum(equal)} of {len(equal)}"])
                print(*lines[-1], f"{seconds[0, 1]:.1f} s", flush=True)
            lines.append([dtype, rows, "**all**", *speeds(total), *[""] * len(every)])
            print(*lines[-1], flush=True)
    heads = [*args.nodes, *(f"MAT {each}" for each in args.nodes), "equal ids"]
    print(table(["", "rows", "category", *heads], lines))


if __name__ == "__main__":
    main()
