"""`hf-refspec bench`: measures suites, one question after another, and reports."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..demo.default_model import load_model, load_tokenizer
from ..hook import install
from ..index.kernels import warmup
from ..store.datastore import Datastore
from .machine import describe_machine, describe_versions
from .measure import Bench, ContextTooShortError, IdsDifferError
from .methods import decoding_methods
from .models import random_model
from .options import DECODING, BenchOptions
from .pass_costs import measure_pass_costs
from .plots import check_plotting, draw_plots
from .registry import REGISTRY, Suite
from .report import details_report, suites_report
from .results import Results, open_results
from .summary import summaries

REPORT = "report.md"


def run(options: BenchOptions) -> int:
    """Measures and reports; what was measured is kept where it is stopped.

    Returns:
        The exit status: 1 if ids differed, 130 if it was stopped by ctrl-C.

    Raises:
        ImportError, OSError, ValueError: For bad input, before work starts.
    """
    if options.out is None:
        raise ValueError("--out is missing: name a folder for the results")
    work = Work.prepared(options, options.out)
    status, message = 0, ""
    try:
        work.measure()
    except KeyboardInterrupt:
        status, message = 130, f"Stopped; --resume with --out {work.out} goes on."
    except IdsDifferError as error:
        status, message = 1, f"Stopped: {error}."
    print(work.report())
    if status == 0 and not any(work.results.entries(name) for name in work.questions):
        status, message = 1, "Nothing was measured: no question fits."
    if message:
        print(message)
    return status


@dataclass
class Work:
    """What is to be measured, with all that it reads."""

    options: BenchOptions
    out: Path
    questions: dict[str, list[Any]]
    tokenizer: PreTrainedTokenizerBase
    store: Datastore | None
    results: Results

    @classmethod
    def prepared(cls, options: BenchOptions, out: Path) -> Work:
        """Reads and checks all input: what is wrong should be known before work starts."""
        options.check()
        check_plotting()
        options = options.resolved()
        tokenizer = load_tokenizer(options.tokenizer)
        store = None
        if options.datastore is not None:
            store = Datastore.from_pretrained(options.datastore, tokenizer=tokenizer)
        questions = {name: _questions(name, options, tokenizer) for name in options.suites}
        machine = describe_machine(str(options.device))
        fresh = Results(machine, describe_versions(), options.settings())
        results = open_results(out, fresh, options.resume)
        for name, some in questions.items():
            for question in some:
                results.is_done(name, question)  # or it is something else
        return cls(options, out, questions, tokenizer, store, results)

    def measure(self) -> None:
        """One question after another; results.json has each as soon as it is done."""
        began, most = monotonic(), self.options.seconds
        bench = self._make_bench()
        for number, (name, questions) in enumerate(self.questions.items()):
            self.results.begin(name, len(questions))
            bench.begin()
            end = math.inf
            if most is not None:
                left = began + most - monotonic()
                end = monotonic() + left / (len(self.questions) - number)
            for question in tqdm(questions, desc=name, unit="question"):
                if monotonic() > end:
                    break
                if not self.results.is_done(name, question):
                    self.results.add(name, question, *_measured(REGISTRY[name], bench, question))
                    self.results.write(self.out)

    def report(self) -> str:
        """Writes report.md and its plots, and returns its first part, the tables of the suites."""
        results = self.results
        entries = {name: results.entries(name) for name in results.suites if name in DECODING}
        summed = {name: summaries(some) for name, some in entries.items() if some}
        plots = draw_plots(summed, self.out)
        text = suites_report(results)
        details = details_report(results, plots)
        (self.out / REPORT).write_text(f"{text}\n{details}", encoding="utf-8")
        return text

    def _make_bench(self) -> Bench:
        """Loads or makes the model and lets its first calls pass."""
        install()
        transformers.logging.set_verbosity_error()
        options = self.options
        device, dtype = str(options.device), getattr(torch, str(options.dtype))
        if options.random_model is not None:
            model = random_model(options.random_model, len(self.tokenizer), device, dtype)
        else:
            model = load_model(options.model, device, dtype)
        bench = Bench(
            model,
            self.tokenizer,
            lambda: decoding_methods(self.store),
            options.replay,
            options.max_new_tokens,
        )
        if set(self.questions) & set(DECODING):
            warmup()
            bench.warm_up()
            if not self.results.pass_costs:
                self.results.pass_costs = measure_pass_costs(model)
        return bench


def _questions(name: str, options: BenchOptions, tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """What a suite asks, up to the limit, in those parts that are measured one by one."""
    suite = REGISTRY[name]
    questions = suite.read(options, tokenizer)[: options.limit]
    if not questions:
        raise ValueError(
            f"there is no question for {name} in {options.data}, or with --replay none that has a "
            "recorded answer"
        )
    return [part for question in questions for part in suite.parts(question)]


def _measured(suite: Suite, bench: Bench, question: Any) -> tuple[list[dict[str, Any]], str | None]:
    """What came of a question, and why it went no further, if it did not.

    One that the model's context does not hold is counted, not cut.
    """
    entries = []
    try:
        for entry in suite.measure(bench, question):
            entries.append(entry)
    except ContextTooShortError as error:
        return entries, str(error)
    return entries, None
