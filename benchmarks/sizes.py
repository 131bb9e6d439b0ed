"""What models of several sizes gain: the cost of passes over several tokens, and recorded answers.

    python benchmarks/sizes.py --data DATA [--sizes 0.1B 1B 7B] [--dtype bfloat16]

Llamas with random weights are forced to write answers that others have written: how long a pass
takes depends on the shape alone, and how many tokens it yields on the text alone. Seconds are those
of decoding after the first token.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from gpu_bench import ForcedLlama, batch_of, recorded_texts
from suites import SIZES, RecordedAnswer, random_model, table

import hf_refspec as rs
from hf_refspec.apps.cli.arguments import positive
from hf_refspec.apps.shared.loading import load_tokenizer

PASSES = (8, 16, 64)  # tokens
LONGEST, CONTEXT = 600, 512  # tokens of a prompt, and of the text that passes are timed behind
KINDS = {"rag": "RAG", "humaneval": "code", "spec-bench": "chat"}


class FirstToken(transformers.StoppingCriteria):
    """Notes when the first token came, and ends nothing."""

    came = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.came = self.came or perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def decoding_seconds(model: Any, text: RecordedAnswer, tokens: int, **method: Any) -> float:
    """The seconds that a text takes after its first token."""
    inputs, _ = batch_of(model, [text])
    first = FirstToken()
    ids = model.generate(
        **inputs,
        **method,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        max_new_tokens=tokens,
        stopping_criteria=[first],
    )
    assert ids[0, -tokens:].tolist() == text.answer_ids[:tokens]
    return perf_counter() - first.came


def gain(model: Any, texts: list[RecordedAnswer], tokens: int) -> str:
    """The MAT and the speed-up of "auto" over several texts, plain decoding by turns with it."""
    plain = drafted = 0.0
    drafter = rs.ReferenceCopy() | rs.TokenRecycling()
    counts = rs.DraftStats()
    for text in texts:
        plain += decoding_seconds(model, text, tokens)
        drafted += decoding_seconds(model, text, tokens, candidate_generator=drafter)
        counts += drafter.stats
    return f"{counts.mat:.2f}, {plain / drafted:.2f}x"


def main(arguments: list[str] | None = None) -> int:
    """Prints a table, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="the data files, llama2-tokenizer among them")
    add("--sizes", nargs="+", choices=SIZES, default=["0.1B", "0.5B", "1B", "3B", "7B"])
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add("--device", default="cpu")
    add("--texts", type=positive, default=3, help="of each kind; default: 3")
    add("--max-new-tokens", type=positive, default=48, help="default: 48")
    args = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    tokenizer = load_tokenizer(str(args.data / "llama2-tokenizer"))
    texts = {
        kind: [
            each
            for each in recorded_texts(args.data, tokenizer)[kind]
            if len(each.prompt_ids) <= LONGEST and len(each.answer_ids) >= args.max_new_tokens
        ][: args.texts]
        for kind in KINDS
    }
    rs.warmup()
    columns = ["size", "plain step", *(f"pass of {n}" for n in PASSES), *KINDS.values()]
    sys.stdout.write(table(columns, []))
    for size in args.sizes:
        dtype = getattr(torch, args.dtype)
        model = random_model(size, len(tokenizer), args.device, dtype, ForcedLlama)
        found = rs.check(model, CONTEXT)
        passes = (f"{found.relative_costs[n]:.2f}" for n in PASSES)
        gains = (gain(model, texts[kind], args.max_new_tokens) for kind in KINDS)
        cells = [size, f"{1000 * found.plain_seconds:.0f} ms", *passes, *gains]
        print(f"| {' | '.join(cells)} |", flush=True)
        del model
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
