"""`hf-refspec bench`: measures suites, one question after another, and reports."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ...drafting.token_recycling import TokenRecycling
from ...extras import require
from ...generation.warmup import warmup
from ...hook import install
from ...smollm2 import default_model
from ...store.datastore import Datastore
from ..shared.loading import load_model, load_tokenizer
from .measure import Bench, ContextTooShortError, IdsDifferError
from .methods import (
    BUDGETS,
    LOOK_UP,
    PLAIN,
    Method,
    compiled_methods,
    decoding_methods,
    static_options,
)
from .models import random_model
from .registry import SUITES, Job
from .report import few_prompts, write_report
from .results import new_results, write_results

# A replay forces the text, and so cannot have these options.
FREELY = ("temperature", "batch_size", "recycling_table")


def run(args: Namespace) -> int:
    """Runs `hf-refspec bench`; bad input is an error before the work starts. See
    [`measure_suites`]."""
    _check(args)
    tokenizer = prepare(args)
    new_methods = _methods(args, tokenizer)
    jobs = {name: _jobs(name, args, tokenizer) for name in args.suites}

    def load(dtype: str) -> Bench:
        bench = load_bench(args, dtype, tokenizer, new_methods)
        if args.temperature is not None:
            bench.sampling = {"do_sample": True, "temperature": args.temperature}
        for verification in ("auto", "reproducible") if args.static is not None else ():
            static = static_options(args.static, args.device)
            rows, began = args.batch_size or 1, perf_counter()
            warmup(bench.model, args.static, rows, verification=verification, **static)
            print(f"compiled in {perf_counter() - began:.0f} s ({dtype}, {verification})")
        bench.warm_up()
        return bench

    return measure_suites(args, dict.fromkeys(args.dtype, jobs), load)


def prepare(args: Namespace) -> PreTrainedTokenizerBase:
    """Checks the options that name model and device, sets their defaults, and loads the
    tokenizer."""
    if args.out is None:
        raise ValueError("--out is missing: name a folder for the results")
    if args.random_model is not None and args.model is not None:
        raise ValueError("--model and --random-model are two models; leave one of them out")
    if args.random_model is not None and not args.replay:
        raise ValueError(
            "what a random model writes freely shows nothing: add --replay to --random-model "
            f"{args.random_model}, or name a trained model with --model"
        )
    if args.tokenizer is not None and args.random_model is None:
        raise ValueError(
            f"--tokenizer {args.tokenizer} is for --random-model; a trained model has its own"
        )
    if args.device_map is not None and (args.random_model or args.device) is not None:
        raise ValueError(
            f"--device-map {args.device_map} places a trained model by itself; leave out --device "
            "and --random-model"
        )
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device is 'cuda', but torch sees no GPU; use --device cpu, or install a torch with "
            "CUDA and check the driver"
        )
    require("matplotlib", "hf-refspec bench", "bench")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = args.dtype or ["bfloat16" if args.device == "cuda" else "float32"]
    if args.random_model is None:
        args.model = args.model or default_model()
    return load_tokenizer(args.tokenizer or args.model)


def _check(args: Namespace) -> None:
    """Raises `ValueError` if the other options contradict each other."""
    for name in args.suites:
        if name not in SUITES:
            raise ValueError(f"{name!r} is no suite; there are {', '.join(SUITES)}")
    for name in FREELY:
        if args.replay and getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is for text that the model writes; leave out --replay")
    if args.temperature is not None and (args.temperature <= 0 or args.batch_size is not None):
        raise ValueError(
            f"--temperature {args.temperature} must be above 0 and without --batch-size: rows of a "
            "batch draw their random numbers in another order when drafts are accepted"
        )
    if args.batch_size is not None and "spec-bench" not in args.suites:
        raise ValueError("--batch-size is for spec-bench alone; leave it out, or measure that")


def _jobs(name: str, args: Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Job]:
    jobs = SUITES[name](args, tokenizer)
    if not jobs:
        raise ValueError(
            f"there is no question for {name} in {args.data}, or with --replay none that has a "
            "recorded answer"
        )
    return jobs


def _methods(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> Callable[[], list[Method]]:
    """The methods that the options name, with new drafters at each call."""
    store = table = None
    if args.datastore is not None:
        store = Datastore.from_pretrained(args.datastore, tokenizer=tokenizer)
    if args.recycling_table is not None:
        table = TokenRecycling.from_pretrained(args.recycling_table, tokenizer)

    def all_methods() -> list[Method]:
        nodes = args.nodes or BUDGETS
        methods = decoding_methods(store, not args.replay, nodes, table)
        if args.static is not None:
            methods += compiled_methods(static_options(args.static, args.device), nodes)
        # transformers' look-up takes one row, and draws other random numbers than plain sampling.
        left_out = [] if args.batch_size is None and args.temperature is None else [LOOK_UP]
        return [method for method in methods if method.name not in left_out]

    names = {method.name for method in all_methods()}
    for name in args.methods or ():
        if name not in names:
            raise ValueError(
                f"--methods has {name!r}, but there are only {', '.join(sorted(names))}"
            )
    chosen = [PLAIN, *(args.methods or names)]
    return lambda: [method for method in all_methods() if method.name in chosen]


def load_bench(
    args: Namespace,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    new_methods: Callable[[], list[Method]],
) -> Bench:
    """Loads the model that the options name."""
    install()
    transformers.logging.set_verbosity_error()
    numbers = getattr(torch, dtype)
    if args.random_model is not None:
        model = random_model(args.random_model, len(tokenizer), args.device, numbers)
    else:
        model = load_model(args.model, args.device_map or args.device, numbers)
    warmup()
    return Bench(model, tokenizer, new_methods, args.replay, args.max_new_tokens)


def measure_suites(
    args: Namespace, jobs: dict[str, dict[str, list[Job]]], load: Callable[[str], Bench]
) -> int:
    """Measures the questions of each suite, by dtype and name, and reports; what was measured is
    kept when it is stopped. The report lists the options.

    Returns the exit status: 1 if ids differed or nothing was measured, 130 if stopped by ctrl-C.
    """
    results = new_results(args.out, _settings(args), args.device)
    status, message = 0, ""
    try:
        for dtype, suites in jobs.items():
            bench = load(dtype)
            for name, questions in suites.items():
                measure_suite(bench, questions, name, dtype, results, args.out)
    except KeyboardInterrupt:
        status, message = 130, f"Stopped; {args.out} has what was measured."
    except IdsDifferError as error:
        status, message = 1, f"Stopped: {error}."
    print(write_report(results, args.out))
    for name, suite in results["suites"].items():
        if warning := few_prompts(suite["entries"]):
            print(f"warning: {name}: {warning}", file=sys.stderr)
    if status == 0 and not any(suite["entries"] for suite in results["suites"].values()):
        status, message = 1, "Nothing was measured: no question fits into the model's context."
    if message:
        print(message)
    return status


def _settings(args: Namespace) -> dict[str, Any]:
    """The options that were given and influence the figures; of folders, whose paths differ between
    machines, the names."""
    unrecorded = ("run", "suites", "out", "data", "limit")
    settings = {
        name.replace("_", " "): Path(value).name if Path(str(value)).is_dir() else value
        for name, value in vars(args).items()
        if name not in unrecorded and value not in (None, False, 0)
    }
    settings["dtype"] = " ".join(args.dtype)
    return settings


def measure_suite(
    bench: Bench,
    jobs: list[Job],
    name: str,
    dtype: str,
    results: dict[str, Any],
    folder: Path,
    end: float = inf,
) -> None:
    """Measures one question after another; results.json has each as soon as it is measured. After
    the time `end` no question but the first is begun."""
    suite: dict[str, Any] = {"suite": name, "dtype": dtype, "questions": len(jobs), "done": 0}
    suite |= {"entries": [], "skipped": []}
    results["suites"][f"{name}, {dtype}"] = suite
    bench.begin()
    for job in tqdm(jobs, desc=f"{name}, {dtype}", unit="question", disable=None):
        if suite["done"] and perf_counter() > end:
            break
        try:
            for entry in job(bench):
                suite["entries"].append(entry)
        except ContextTooShortError as error:  # counted, not cut short
            suite["skipped"].append(str(error))
        suite["done"] += 1
        write_results(results, folder)
