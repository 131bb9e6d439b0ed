"""Batches of `generate`: how many times as fast as plain decoding, for each number of draft tokens.

    python benchmarks/batches.py --data DATA [--rows 2 4 8 16] [--nodes auto 1 4]

A batch has questions of one of Spec-Bench's categories, padded on the left. Plain decoding and each
of `--nodes` answer it by turns. Every category is a batch, and drafters are kept from batch to
batch, as in a process that goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from suites import spec_bench
from transformers import BatchEncoding, PreTrainedTokenizerBase

import hf_refspec as rs
from hf_refspec.apps.bench.measure import Chat
from hf_refspec.apps.cli.arguments import add_model, draft_budget, positive
from hf_refspec.apps.shared.comparison import UNDRAFTED, Comparison, Methods
from hf_refspec.apps.shared.loading import load_model, load_tokenizer
from hf_refspec.apps.shared.streams import Terminal

LONGEST = 700


def batches(
    questions: Sequence[Chat], tokenizer: PreTrainedTokenizerBase, rows: int
) -> dict[str, BatchEncoding]:
    """The first `rows` questions with prompts of at most `LONGEST` tokens, of each category that
    has enough of them."""
    chosen: dict[str, list[str]] = {}
    for question in questions:
        texts = chosen.setdefault(question.category, [])
        messages = question.until(0, [])
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        if len(texts) < rows and len(tokenizer(text)["input_ids"]) <= LONGEST:
            texts.append(text)
    return {
        category: tokenizer(texts, return_tensors="pt", padding=True)
        for category, texts in chosen.items()
        if len(texts) == rows
    }


def main(arguments: list[str] | None = None) -> int:
    """Prints a table for each number of rows; returns 1 if ids differ in float32."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="the folder with spec_bench_questions.jsonl")
    add_model(parser)
    add("--rows", type=positive, nargs="+", default=[2, 4, 8, 16])
    add("--nodes", type=draft_budget, nargs="+", default=["auto", 1, 4], help="for each row")
    add("--max-new-tokens", type=positive, default=48)
    args = parser.parse_args(arguments)
    tokenizer = load_tokenizer(args.model)
    tokenizer.padding_side = "left"
    questions = spec_bench(args.data / "spec_bench_questions.jsonl")
    model = load_model(args.model, args.device_map, args.dtype)
    rs.warmup()

    def methods() -> Methods:
        drafters = [rs.ReferenceCopy() | rs.SiblingCopy() | rs.TokenRecycling() for _ in args.nodes]
        drafted = {
            f"{nodes} draft tokens": {"candidate_generator": drafter, "max_draft_tokens": nodes}
            for nodes, drafter in zip(args.nodes, drafters, strict=True)
        }
        return {UNDRAFTED: {}, **drafted}

    status = 0
    for rows in args.rows:
        comparison = Comparison(model, methods, do_sample=False, max_new_tokens=args.max_new_tokens)
        comparison.warm_up()
        for category, batch in batches(questions, tokenizer, rows).items():
            comparison.ask(batch.to(model.device))
            last = {name: calls[-1].seconds for name, calls in comparison.calls.items()}
            faster = (f"{name} {last[UNDRAFTED] / each:.2f}x" for name, each in last.items())
            print(f"{rows} rows, {category}:", ", ".join(faster), flush=True)
        print(f"{rows} rows, all categories; MAT is of all rows together:")
        status |= comparison.report(Terminal())
    return status


if __name__ == "__main__":
    sys.exit(main())
