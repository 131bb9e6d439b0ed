"""`hf-refspec bench`: measures suites, one question after another, and reports."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ...drafting.token_recycling import TokenRecycling
from ...generation.warmup import warmup
from ...hook import install
from ...store.datastore import Datastore
from ..shared.default_model import default_model, load_model, load_tokenizer
from .decisions import DecisionLog
from .measure import Bench, ContextTooShortError, IdsDifferError
from .methods import (
    BUDGETS,
    LOOK_UP,
    PLAIN,
    Method,
    compiled_methods,
    decoding_methods,
    recycling_settings,
    static_options,
)
from .models import random_model
from .registry import RETRIEVING, SUITES, Job
from .report import warnings, write_report
from .results import new_results, write_results
from .style import check_plotting

DECODING = tuple(name for name in SUITES if name not in RETRIEVING)
# The suites that read an option: elsewhere it would have no effect.
READ_BY = {
    "datastore": DECODING,
    "knowledge_base": ("ralm",),
    "encoder": ("ralm",),
    "distractors": ("ralm",),
    "milvus": ("ralm",),
    "knn_datastore": ("knn",),
    "ablate": ("spec-bench", *RETRIEVING),
    "batch_size": ("spec-bench",),
    "temperature": DECODING,
    "methods": DECODING,
    "nodes": DECODING,
    "recycling_table": DECODING,
}
# What a replay, which forces the text and knows no expectations, cannot have.
FREELY = ("temperature", "batch_size", "recycling_table")


def run(args: Namespace) -> int:
    """Measures suites and reports; what was measured is kept when it is stopped.

    Args:
        args (`Namespace`): The options of `hf-refspec bench`, see `commands/bench.py`.

    Returns:
        The exit status: 1 if ids differed or nothing was measured, 130 if stopped by ctrl-C.

    Raises:
        ImportError, OSError, ValueError: For bad input, before the work starts.
    """
    _check(args)
    check_plotting()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = args.dtype or ["bfloat16" if args.device == "cuda" else "float32"]
    if args.random_model is None:
        args.model = args.model or default_model()
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    new_methods = _methods(args, tokenizer)
    jobs = {
        dtype: {name: _jobs(name, args, tokenizer) for name in args.suites} for dtype in args.dtype
    }
    results = new_results(args.out, _settings(args), args.device)

    status, message = 0, ""
    try:
        for dtype, of_suites in jobs.items():
            bench = _load(args, dtype, tokenizer, new_methods)
            for name, of_suite in of_suites.items():
                suite = {"suite": name, "dtype": dtype, "questions": len(of_suite), "done": 0}
                results["suites"][f"{name}, {dtype}"] = suite | {"entries": [], "skipped": []}
                bench.decisions = DecisionLog(args.out / f"decisions_{name}_{dtype}.jsonl")
                _measure(bench, of_suite, f"{name}, {dtype}", results, args.out)
    except KeyboardInterrupt:
        status, message = 130, f"Stopped; {args.out} has what was measured."
    except IdsDifferError as error:
        status, message = 1, f"Stopped: {error}."
    print(write_report(results, args.out))
    for warning in warnings(results):
        print(f"warning: {warning}", file=sys.stderr)
    if status == 0 and not any(suite["entries"] for suite in results["suites"].values()):
        status, message = 1, "Nothing was measured: no question fits into the model's context."
    if message:
        print(message)
    return status


def _check(args: Namespace) -> None:
    """Raises `ValueError` if options are missing or contradict each other."""
    if args.out is None:
        raise ValueError("--out is missing: name a folder for the results")
    for name in args.suites:
        if name not in SUITES:
            raise ValueError(f"{name!r} is no suite; there are {', '.join(SUITES)}")
    if args.random_model is not None and args.model is not None:
        raise ValueError("--model and --random-model are two models; leave one of them out")
    if args.random_model is not None and not args.replay:
        raise ValueError(
            "what a random model writes freely tells nothing: add --replay to --random-model "
            f"{args.random_model}, or name a trained model with --model"
        )
    if args.tokenizer is not None and args.random_model is None:
        raise ValueError(
            f"--tokenizer {args.tokenizer} is for --random-model; a trained model has its own"
        )
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device is 'cuda', but torch sees no GPU; use --device cpu, or install a torch with "
            "CUDA and check the driver"
        )
    for name in FREELY:
        if args.replay and getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is for text that the model writes; leave out --replay")
    if args.temperature is not None and (args.temperature <= 0 or args.batch_size is not None):
        raise ValueError(
            f"--temperature {args.temperature} must be above 0 and without --batch-size: rows of a "
            "batch draw their random numbers in another order when drafts are accepted"
        )
    for name, readers in READ_BY.items():
        if getattr(args, name) and not set(readers) & set(args.suites):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{option} is read by {', '.join(readers)}; leave it out, or measure one of these"
            )
    if args.ablate and set(args.suites) & set(DECODING):
        if args.suites != ["spec-bench"]:
            raise ValueError("--ablate measures other methods: of spec-bench, name it alone")
        for name in ("replay", "methods", "nodes", "datastore", "recycling_table"):
            if getattr(args, name):
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"--ablate measures methods of its own; leave out {option}")


def _settings(args: Namespace) -> dict[str, Any]:
    """The options that influence the figures, without those that were left out.

    Of a folder its name is recorded, as it is elsewhere on other machines.
    """
    unrecorded = ("run", "suites", "out", "data", "limit", "milvus")
    settings = {
        name.replace("_", " "): Path(value).name if Path(str(value)).is_dir() else value
        for name, value in vars(args).items()
        if name not in unrecorded and value not in (None, False, 0)
    }
    settings["dtype"] = " ".join(args.dtype)
    if args.milvus is not None:
        settings["milvus"] = True  # its address may contain a password
    return settings


def _jobs(name: str, args: Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Job]:
    jobs = SUITES[name](args, tokenizer)
    if not jobs:
        raise ValueError(
            f"there is no question for {name} in {args.data}, or with --replay none that has a "
            "recorded answer"
        )
    return jobs


def _methods(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> Callable[[], list[Method]]:
    """Returns the methods that are asked for, with new drafters.

    Raises:
        ValueError: If one of `--methods` does not exist.
    """
    store = table = None
    if args.datastore is not None:
        store = Datastore.from_pretrained(args.datastore, tokenizer=tokenizer)
    if args.recycling_table is not None:
        table = TokenRecycling.from_pretrained(args.recycling_table, tokenizer)

    def all_methods() -> list[Method]:
        if args.ablate:
            settings = recycling_settings().values()
            return [Method(PLAIN), *(method for of in settings for method in of.values())]
        nodes = args.nodes or BUDGETS
        methods = decoding_methods(store, not args.replay, nodes, table)
        if args.static is not None:
            methods += compiled_methods(static_options(args.static, args.device), nodes)
        # transformers' look-up takes one row, and other random numbers than plain sampling.
        left_out = [] if args.batch_size is None and args.temperature is None else [LOOK_UP]
        return [method for method in methods if method.name not in left_out]

    def new_methods() -> list[Method]:
        chosen = [PLAIN, *(args.methods or names)]
        return [method for method in all_methods() if method.name in chosen]

    names = {method.name for method in all_methods()}
    for name in args.methods or ():
        if name not in names:
            raise ValueError(
                f"--methods has {name!r}, but there are only {', '.join(sorted(names))}"
            )
    return new_methods


def _load(
    args: Namespace,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    new_methods: Callable[[], list[Method]],
) -> Bench:
    """Loads the model and warms it up."""
    install()
    transformers.logging.set_verbosity_error()
    numbers = getattr(torch, dtype)
    if args.random_model is not None:
        model = random_model(args.random_model, len(tokenizer), args.device, numbers)
    else:
        model = load_model(args.model, args.device, numbers)
    sampling = {}
    if args.temperature is not None:
        sampling = {"do_sample": True, "temperature": args.temperature}
    bench = Bench(model, tokenizer, new_methods, args.replay, args.max_new_tokens, sampling)
    if set(args.suites) & set(DECODING):
        warmup()
        for verification in ("auto", "reproducible") if args.static is not None else ():
            static = static_options(args.static, args.device)
            began = perf_counter()
            warmup(model, args.static, args.batch_size or 1, verification=verification, **static)
            print(f"compiled in {perf_counter() - began:.0f} s ({dtype}, {verification})")
        bench.warm_up()
    return bench


def _measure(
    bench: Bench, jobs: list[Job], name: str, results: dict[str, Any], folder: Path
) -> None:
    """Measures one question after another; results.json has each as soon as it is done."""
    suite = results["suites"][name]
    bench.begin()
    for job in tqdm(jobs, desc=name, unit="question", disable=None):
        try:
            for entry in job(bench):
                suite["entries"].append(entry)
        except ContextTooShortError as error:  # counted, not cut short
            suite["skipped"].append(str(error))
        suite["done"] += 1
        write_results(results, folder)
