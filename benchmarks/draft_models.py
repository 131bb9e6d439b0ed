"""Draft models beside and together with look-up: MAT and speed of each alone, and of both.

    python benchmarks/draft_models.py SUITE... --data DATA --out DIR [--assistants NAME ...]

takes the arguments of `hf-refspec bench` that choose model and prompts, and writes its report. An
assistant is `layers-N`, the model's own first N layers as early exit; `bfloat16`, the model itself
in that type; or a folder or a Hub id of a model with the same tokenizer. Of a folder that
`distill.py` made, `DraftModel` drafts the tokens of `vocabulary.npy` alone.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fewer_layers import with_layers
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_refspec.apps.bench.methods import DEFAULT, PLAIN, Method, default_drafter
from hf_refspec.apps.bench.registry import SUITES
from hf_refspec.apps.bench.run import load_bench, measure_suites, prepare
from hf_refspec.apps.cli.bench import add_measuring
from hf_refspec.drafting.draft_model import DraftModel

ASSISTANTS = ("layers-10", "layers-15", "layers-20", "bfloat16")


def assistant_of(model: Any, name: str) -> PreTrainedModel:
    """An assistant by its name."""
    if name.startswith("layers-"):
        return with_layers(model, range(int(name.removeprefix("layers-"))))
    if name == "bfloat16":
        return copy.deepcopy(model).to(torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(name, dtype=model.dtype).to(model.device).eval()


def draft_model(model: Any, name: str) -> DraftModel:
    """A drafter by its assistant's name."""
    tokens = Path(name, "vocabulary.npy")
    vocabulary = np.load(tokens) if tokens.exists() else None
    return DraftModel(assistant_of(model, name), vocabulary=vocabulary)


def all_methods(drafters: dict[str, DraftModel]) -> list[Method]:
    """Plain decoding, look-up, and of each assistant transformers' own assisted generation, drafts
    of it alone, and blended with look-up."""
    methods = [Method(PLAIN), Method(DEFAULT, "auto", default_drafter())]
    for name, drafter in drafters.items():
        theirs = {"assistant_model": drafter.assistant}
        blend = default_drafter() | copy.deepcopy(drafter)
        methods += [
            Method(f"transformers' assisted, {name}", options=theirs),
            Method(f"DraftModel, {name}", "auto", copy.deepcopy(drafter)),
            Method(f"{DEFAULT} | DraftModel, {name}", "auto", blend),
        ]
    return methods


def measure(args: argparse.Namespace, names: Sequence[str]) -> int:
    """Measures all methods; returns the exit status of `hf-refspec bench`."""
    tokenizer = prepare(args)
    jobs = {name: SUITES[name](args, tokenizer) for name in args.suites}

    args.assistants = [Path(name).name for name in names]  # for the report

    def load(dtype: str) -> Any:
        bench = load_bench(args, dtype, tokenizer, list)
        drafters = {Path(name).name: draft_model(bench.model, name) for name in names}
        bench.new_methods = lambda: all_methods(drafters)
        bench.warm_up()
        return bench

    return measure_suites(args, dict.fromkeys(args.dtype, jobs), load)


def main(arguments: list[str] | None = None) -> int:
    """Measures the suites."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suites", nargs="+", choices=tuple(SUITES), metavar="SUITE")
    add_measuring(parser)
    parser.add_argument("--assistants", nargs="+", default=ASSISTANTS, metavar="NAME")
    args = parser.parse_args(arguments)
    if args.replay:
        parser.error("an assistant does not know what a model is forced to say; leave out --replay")
    args.batch_size = None
    return measure(args, args.assistants)


if __name__ == "__main__":
    sys.exit(main())
