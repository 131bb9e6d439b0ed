"""`hf-refspec bench`: measures suites, one question after another, and reports."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..demo.run import BUNDLED_MODEL
from ..hook import install
from ..index.kernels import warmup
from ..store.datastore import Datastore
from .ablation import Point, plot_points
from .compare import compare
from .machine import describe_machine, describe_versions
from .measure import Bench, ContextTooShortError, IdsDifferError
from .models import check_device, load_model, random_model, shape_of
from .pass_costs import measure_pass_costs
from .plots import check_plotting, draw_plots
from .registry import SUITES, Source, Suite, find_suites
from .report import ablation_table, details_report, suites_report
from .results import Results, open_results
from .summary import summaries
from .ways import make_ways

REPORT = "report.md"
ABLATION = Path("ablation") / "ablation.json"  # in `out`, if `hf-refspec ablate` was told so


@dataclass(frozen=True)
class Plan:
    """What to measure, and how.

    Attributes:
        suites (`list[str]`): Names.
        out (`Path`): The folder of the results.
        data (`Path`, *optional*): The folder of the data files.
        model (`str`, *optional*): A folder or a Hub id; the bundled model by default.
        random_model (`str`, *optional*): A size, instead of a model.
        tokenizer (`str`, *optional*): For a random model; that of the bundled model by default.
        datastore (`str`, *optional*): To draft from as well.
        replay (`bool`): Whether recorded answers are forced.
        limit (`int`, *optional*): The most questions of a suite.
        seconds (`float`, *optional*): The most time for all, the model's first calls among it: what
            is left is shared out among the suites, and none begins a question after its share.
        resume (`bool`): Whether to go on with what `out` has.
        device (`str`, *optional*): The GPU by default, if there is one.
        dtype (`str`, *optional*): float32 by default, on a GPU bfloat16.
        knowledge_base, encoder, milvus, knn_datastore (`str`, *optional*), distractors, repeat
            (`int`): Of the suites that retrieve, see [`Source`].
    """

    suites: list[str]
    out: Path
    data: Path | None = None
    model: str | None = None
    random_model: str | None = None
    tokenizer: str | None = None
    datastore: str | None = None
    replay: bool = False
    limit: int | None = None
    seconds: float | None = None
    resume: bool = False
    device: str | None = None
    dtype: str | None = None
    knowledge_base: str | None = None
    encoder: str | None = None
    distractors: int = 0
    milvus: str | None = None
    knn_datastore: str | None = None
    repeat: int = 1

    def check(self) -> None:
        """Refuses what does not go together, or does not go here.

        Raises:
            ImportError, ValueError: If it does not.
        """
        if self.random_model is not None and self.model is not None:
            raise ValueError("--model and --random-model are two models; leave one of them out")
        if self.random_model is not None and not self.replay:
            raise ValueError(
                "what a random model says by itself is no workload: add --replay to "
                f"--random-model {self.random_model}, or name a trained model with --model"
            )
        if self.tokenizer is not None and self.random_model is None:
            raise ValueError(
                f"--tokenizer {self.tokenizer} is for --random-model; a trained model has its own"
            )
        if self.random_model is not None:
            shape_of(self.random_model)
        self._check_options()
        check_device(self.chosen_device)
        check_plotting()

    def _check_options(self) -> None:
        """Refuses an option that no suite in the plan reads: it would be taken to have counted."""
        read = {option for name in self.suites for option in SUITES[name].options}
        for field in fields(self):
            readers = [name for name, suite in SUITES.items() if field.name in suite.options]
            value = getattr(self, field.name)
            if readers and field.name not in read and value != field.default:
                raise ValueError(
                    f"--{field.name.replace('_', '-')} {value} is read by {', '.join(readers)}; "
                    "leave it out, or measure one of these"
                )

    @property
    def chosen_device(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def chosen_dtype(self) -> str:
        return self.dtype or ("bfloat16" if self.chosen_device == "cuda" else "float32")

    @property
    def chosen_tokenizer(self) -> str:
        return self.tokenizer or self.model or str(BUNDLED_MODEL)

    def settings(self) -> dict[str, Any]:
        """What decides about the figures; of folders only the names and what is in them, others
        have them elsewhere."""
        return {
            "model": _name(self.model) or self.random_model or "bundled",
            "random weights": self.random_model is not None,
            "tokenizer": _name(self.chosen_tokenizer),
            "datastore": _name(self.datastore),
            "replay": self.replay,
            "device": self.chosen_device,
            "dtype": self.chosen_dtype,
            "knowledge base": _name(self.knowledge_base),
            "encoder": _name(self.encoder),
            "distractors": self.distractors or None,
            "milvus": True if self.milvus is not None else None,
            "knn datastore": _name(self.knn_datastore),
            "runs": self.repeat if self.repeat > 1 else None,
            "seconds": self.seconds,
        }


def _name(path: str | None) -> str | None:
    """A Hub id, or the name of a folder with a digest of what says what it is."""
    if path is None or not Path(path).is_dir():
        return path
    described = (Path(path) / name for name in ("config.json", "tokenizer.json"))
    digests = [sha256(file.read_bytes()).hexdigest()[:8] for file in described if file.exists()]
    return " ".join([Path(path).name, *digests])


def command(options: argparse.Namespace) -> int:
    """`hf-refspec bench`."""
    if options.suites[0] == "compare":
        return compare(options.suites[1:])
    if options.out is None:
        raise ValueError("--out is missing: name a folder for the results")
    names = {field.name for field in fields(Plan)}
    return run(Plan(**{name: value for name, value in vars(options).items() if name in names}))


def run(plan: Plan) -> int:
    """Measures and reports; what was measured is kept where it is stopped.

    Returns:
        The exit status: 1 if ids differed, 130 if it was stopped by ctrl-C.

    Raises:
        ImportError, OSError, ValueError: For bad input, before work starts.
    """
    work = Work.prepared(plan)
    status, message = 0, ""
    try:
        work.measure()
    except KeyboardInterrupt:
        status, message = 130, f"Stopped; --resume with --out {plan.out} goes on."
    except IdsDifferError as error:
        status, message = 1, f"Stopped: {error}."
    print(work.report())
    if status == 0 and not any(work.results.entries(name) for name in work.suites):
        status, message = 1, "Nothing was measured: no question fits."
    if message:
        print(message)
    return status


def _load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"the tokenizer of {name} cannot be loaded: {error}") from error


@dataclass
class Work:
    """A plan with all that it reads."""

    plan: Plan
    suites: dict[str, Suite]
    questions: dict[str, list[Any]]
    tokenizer: PreTrainedTokenizerBase
    store: Datastore | None
    results: Results

    @classmethod
    def prepared(cls, plan: Plan) -> Work:
        """Reads and checks all input: what is wrong should be known before work starts."""
        suites = find_suites(plan.suites)
        plan.check()
        tokenizer = _load_tokenizer(plan.chosen_tokenizer)
        store = None
        if plan.datastore is not None:
            store = Datastore.from_pretrained(plan.datastore, tokenizer=tokenizer)
        source = Source(
            tokenizer,
            plan.replay,
            plan.data,
            plan.knowledge_base,
            plan.encoder,
            plan.distractors,
            plan.milvus,
            plan.knn_datastore,
            plan.repeat,
        )
        questions = {
            name: [part for each in suite.read(source)[: plan.limit] for part in suite.parts(each)]
            for name, suite in suites.items()
        }
        for name, some in questions.items():
            if not some:
                raise ValueError(
                    f"there is no question for {name} in {plan.data}, or with --replay none that "
                    "has a recorded answer"
                )
        machine = describe_machine(plan.chosen_device)
        fresh = Results(machine, describe_versions(), plan.settings())
        results = open_results(plan.out, fresh, plan.resume)
        find_suites(list(results.suites))  # a report of all that is there is to be made
        for name, some in questions.items():
            for question in some:
                results.is_done(name, question)  # or it is something else
        return cls(plan, suites, questions, tokenizer, store, results)

    def measure(self) -> None:
        """One question after another; results.json has each as soon as it is done."""
        began, most = monotonic(), self.plan.seconds
        bench = self._make_bench()
        for number, (name, suite) in enumerate(self.suites.items()):
            self.results.begin(name, len(self.questions[name]))
            bench.begin()
            end = math.inf
            if most is not None:
                left = began + most - monotonic()
                end = monotonic() + left / (len(self.suites) - number)
            for question in tqdm(self.questions[name], desc=name, unit="question"):
                if monotonic() > end:
                    break
                if not self.results.is_done(name, question):
                    self.results.add(name, question, *_measured(suite, bench, question))
                    self.results.write(self.plan.out)

    def _make_bench(self) -> Bench:
        """Loads or makes the model and lets its first calls pass."""
        install()
        transformers.logging.set_verbosity_error()
        plan, dtype = self.plan, getattr(torch, self.plan.chosen_dtype)
        if plan.random_model is not None:
            size, vocab_size = plan.random_model, len(self.tokenizer)
            model = random_model(size, vocab_size, plan.chosen_device, dtype)
        else:
            model = load_model(plan.model or str(BUNDLED_MODEL), plan.chosen_device, dtype)
        bench = Bench(model, self.tokenizer, lambda: make_ways(self.store), plan.replay)
        if any(suite.decodes for suite in self.suites.values()):
            warmup()
            bench.warm_up()
            if not self.results.pass_costs:
                self.results.pass_costs = measure_pass_costs(model)
        return bench

    def report(self) -> str:
        """Writes report.md and its plots, and returns its first part, the tables of the suites."""
        out, results = self.plan.out, self.results
        entries = {name: results.entries(name) for name in results.suites}
        entries = {name: some for name, some in entries.items() if some}
        decoded = {name: some for name, some in entries.items() if SUITES[name].decodes}
        summed = {name: summaries(some) for name, some in decoded.items()}
        plots = draw_plots(summed, entries, results.pass_costs, out)
        ablation = None
        if (out / ABLATION).exists():
            points = [Point(**each) for each in json.loads((out / ABLATION).read_text())]
            ablation = ablation_table(points)
            plot_points(points, out / "store_size.png")
            plots.append("store_size.png")
        tables = {name: SUITES[name].tables(some) for name, some in entries.items()}
        text = suites_report(results, tables)
        details = details_report(results, plots, ablation)
        (out / REPORT).write_text(f"{text}\n{details}", encoding="utf-8")
        return text


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
