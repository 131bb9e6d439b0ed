"""What drafts are worth on one GPU, eager and compiled: `scripts/gpu_bench`.

A Llama of the shape of Llama 3.1 8B with random weights in bfloat16 is forced to write recorded
answers; then a trained model writes freely, where one is at hand. Each prompt is decoded by all
methods in mixed order, and suites take turns, so that whenever the time is up all of them have been
measured equally often.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from ...drafting.reference_copy import ReferenceCopy
from ...drafting.token_recycling import TokenRecycling
from ...generation.warmup import warmup
from ...hook import install
from ...text_config import text_config
from ...verification.static import WIDTHS
from ..shared.default_model import default_model, load_model, load_tokenizer
from . import suites
from .gpu_report import NODES, Run, Stage, gpu_report, label
from .measure import Bench
from .methods import (
    COMPILED,
    DEFAULT,
    LOOK_UP,
    PLAIN,
    Method,
    compiled_methods,
    static_options,
    transformers_methods,
)
from .models import ForcedLlama, forced_model
from .results import machine, versions
from .suites import RecordedAnswer, chat_prompt
from .summary import Entry

ROOT = Path(__file__).parents[3]
ROWS = (1, 4)
# Of Llama 3.1, more than the tokenizer of the recorded texts has.
VOCABULARY = 128_256
# Of an answer as many tokens are measured, and answers of fewer are left out: a graph is captured
# in the first calls, and a short text says nothing.
NEW_TOKENS, FEWEST_TOKENS, WARM_UP_TOKENS = 96, 48, 32
# The parts of the time after which the single texts and the batches should be done.
SINGLE, BATCHES = 0.53, 0.8
# The part that is left for single texts, however long compiling may take.
MEASURING = 0.27
QUESTIONS = 8  # of a suite, at most


class Text(NamedTuple):
    """A prompt, and what the model is forced to write; `None` where it writes freely."""

    prompt_ids: list[int]
    answer_ids: list[int] | None


def gpu_methods(static: dict[str, Any]) -> list[Method]:
    """Eager, compiled and reproducible decoding, plain and drafted.

    Args:
        static (`dict`): See [`static_options`].
    """
    return [
        *transformers_methods(),
        *(Method(DEFAULT, nodes, ReferenceCopy() | TokenRecycling()) for nodes in NODES),
        *compiled_methods(static, NODES),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measures and writes the report; returns the exit status."""
    began = perf_counter()
    options = _options(arguments)
    try:
        options = _checked(options)
    except (OSError, ValueError) as error:
        print(f"gpu_bench: {error}", file=sys.stderr)
        return 2
    install()
    transformers.logging.set_verbosity_error()
    run = Run(_about(options))
    until = {part: began + part * options.seconds for part in (SINGLE, BATCHES, 1.0)}
    options.end = until[1.0]
    try:
        _measure_random_model(run, options, until)
        _measure_trained_model(run, options, until[1.0])
    except KeyboardInterrupt:
        run.notes.append("stopped by ctrl-C")
    _write(run, options)
    print(gpu_report(run))
    return 0 if any(stage.entries for stage in run.stages) else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_bench", description="Measures on one NVIDIA GPU."
    )
    add = parser.add_argument
    add("--data", type=Path, default=ROOT.parent / "shared" / "data", help="the data files")
    add("--out", type=Path, default=ROOT / "benchmarks", help="the folder of the report")
    add("--tokenizer", help="of the recorded texts; default: llama2-tokenizer among the data")
    add("--model", help="a trained model that writes freely; default: the default model")
    add("--seconds", type=float, default=360.0, help="after which nothing new is begun")
    add("--small", action="store_true", help="a tiny model, on the CPU if there is no GPU")
    return parser.parse_args(arguments)


def _checked(options: argparse.Namespace) -> argparse.Namespace:
    """Raises `ValueError` or `OSError` for what cannot be run, and fills in what follows."""
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cpu" and not options.small:
        raise ValueError(
            "torch sees no GPU; check the driver and that torch has CUDA, or try it with --small"
        )
    if not options.data.is_dir():
        raise ValueError(
            f"--data {options.data} is no folder; benchmarks/README.md says what goes there"
        )
    if options.seconds <= 0:
        raise ValueError(f"--seconds must be above 0, but is {options.seconds:g}")
    options.tokenizer = options.tokenizer or str(options.data / "llama2-tokenizer")
    options.of_texts = load_tokenizer(options.tokenizer)
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def _about(options: argparse.Namespace) -> dict[str, Any]:
    about: dict[str, Any] = {"machine": machine(options.device), "versions": versions()}
    about["versions"]["python"] = platform.python_version()
    if options.device == "cuda":
        about["machine"]["compute capability"] = "{}.{}".format(*torch.cuda.get_device_capability())
        about["machine"]["memory, GiB"] = torch.cuda.get_device_properties(0).total_memory >> 30
        about["machine"]["driver"] = _driver()
        about["versions"]["CUDA"] = torch.version.cuda
    about["settings"] = {"seconds": options.seconds, "small": options.small}
    return about


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def _measure_random_model(run: Run, options: argparse.Namespace, until: dict[float, float]) -> None:
    tokenizer = options.of_texts
    _say("the random model")
    if options.small:
        size, dtype, vocab_size = "tiny", torch.float32, len(tokenizer)
    else:
        size, dtype, vocab_size = "8B", torch.bfloat16, max(VOCABULARY, len(tokenizer))
    texts = {name: texts for name, texts in _recorded(run, options, tokenizer) if texts}
    if not texts:
        run.notes.append("the random model was not measured: there is no recorded text")
        return
    model = forced_model(size, vocab_size, options.device, dtype)
    about = f"Random Llama, {size}, {str(dtype).removeprefix('torch.')}"
    for rows, end in zip(ROWS, (until[SINGLE], until[BATCHES]), strict=True):
        of_rows = {name: _in_rows(each, rows) for name, each in texts.items()}
        stage = Stage(f"{about}, {_of_rows(rows)}")
        bench = Bench(model, tokenizer, list, False, NEW_TOKENS)
        _measure(run, stage, bench, of_rows, end, options)
    del model, bench  # the memory is needed
    _free()


def _measure_trained_model(run: Run, options: argparse.Namespace, end: float) -> None:
    dtype = torch.float32 if options.small else torch.bfloat16
    try:
        if perf_counter() > end:
            raise OSError("the time was up")
        if options.small and options.model is None:
            raise OSError("with --small one must be named with --model")
        name = options.model or default_model()
        if options.model is None and not Path(name).is_dir():
            raise OSError("it is not on this machine; name a folder with --model")
        model, tokenizer = load_model(name, options.device, dtype), load_tokenizer(name)
    except (OSError, ValueError, ImportError) as error:
        run.notes.append(f"no trained model was measured: {str(error).partition(chr(10))[0]}")
        return
    texts: dict[str, list[Text]] = {}
    rag = options.data / "llma_rag.jsonl"
    if rag.exists():
        answers = suites.llma_rag(rag, tokenizer)[:QUESTIONS]
        texts["rag"] = [Text(each.prompt_ids, None) for each in answers]
    questions = options.data / "spec_bench_questions.jsonl"
    if questions.exists():
        asked = suites.taking_turns(suites.spec_bench(questions))[: 2 * QUESTIONS]
        texts["spec-bench"] = [Text(chat_prompt(q.turns[:1], tokenizer), None) for q in asked]
    about = f"{Path(name).name}, {str(dtype).removeprefix('torch.')}"
    for rows in ROWS:
        of_rows = {name: _in_rows(each, rows) for name, each in texts.items()}
        # The batches get what the single texts leave, and these about half of the time.
        until = end if rows == ROWS[-1] else (perf_counter() + end) / 2
        stage = Stage(f"{about}, {_of_rows(rows)}")
        bench = Bench(model, tokenizer, list, False, NEW_TOKENS)
        _measure(run, stage, bench, of_rows, until, options)


def _recorded(
    run: Run, options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, list[Text]]]:
    """The recorded texts of each suite, those that are long enough."""
    sources: dict[str, tuple[str, Callable[[Path], list[RecordedAnswer]]]] = {
        "rag": ("llma_rag.jsonl", lambda path: suites.llma_rag(path, tokenizer)),
        "humaneval": ("HumanEval.jsonl.gz", lambda path: suites.humaneval(path, tokenizer)),
        "no-overlap": ("", lambda _: suites.random_texts(tokenizer)),
        "spec-bench": ("spec_bench_questions.jsonl", lambda path: _answers(path, tokenizer)),
    }
    for name, (file, read) in sources.items():
        path = options.data / file
        if not path.exists():
            run.notes.append(f"{name} was not measured: {path.name} is missing")
            continue
        # Without the end of the text, so that all rows of a batch go on to the same length.
        answers = (Text(each.prompt_ids, each.answer_ids[:-1]) for each in read(path))
        long = [each for each in answers if len(each.answer_ids or ()) >= FEWEST_TOKENS]
        yield name, long[: QUESTIONS * ROWS[-1]]


def _answers(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[RecordedAnswer]:
    questions = suites.taking_turns([q for q in suites.spec_bench(path) if q.answers])
    return [
        RecordedAnswer(chat_prompt(q.turns[:1], tokenizer), suites.answered(q, 0, tokenizer))
        for q in questions
    ]


def _in_rows(texts: list[Text], rows: int) -> list[list[Text]]:
    """Batches of so many texts; those that are left over are left out."""
    starts = range(0, len(texts) - rows + 1, rows)
    return [texts[start : start + rows] for start in starts][:QUESTIONS]


def _of_rows(rows: int) -> str:
    return "one text at a time" if rows == 1 else f"{rows} texts at a time"


def _measure(
    run: Run,
    stage: Stage,
    bench: Bench,
    batches: dict[str, list[list[Text]]],
    end: float,
    options: argparse.Namespace,
) -> None:
    """Measures batches of all suites in turn until the time is up, of each suite one if the time of
    all stages allows it."""
    # How long each method took to warm up with fewer rows.
    rows, longest = _shape(batches)
    expected = run.stages[-1].first_seconds if rows > 1 else {}
    run.stages.append(stage)
    _say(f"{stage.title}: warming up")
    methods = gpu_methods(static_options(longest + NEW_TOKENS, options.device))
    if rows > 1:
        methods = [each for each in methods if each.name != LOOK_UP]  # it takes one row
    until = end if rows > 1 else options.end - MEASURING * options.seconds
    warm_up(stage, bench, methods, rows, longest, until, expected)
    _write(run, options)
    turns = [
        (number, name, of_suite[number])
        for number in range(QUESTIONS)
        for name, of_suite in batches.items()
        if number < len(of_suite)
    ]
    slowest = 0.0
    for number, name, texts in turns if bench.methods else ():
        began = perf_counter()
        if began + slowest > (end if number else options.end):
            if number == 0:
                stage.left_out.append(f"{name}: the time was up")
            continue
        _say(f"{stage.title}: {name}, {number + 1}")
        entry = measure_texts(bench, f"{name} {number + 1}", texts)
        stage.entries.setdefault(name, []).append(entry)
        slowest = max(slowest, perf_counter() - began)
        _write(run, options)
    if options.device == "cuda":
        stage.reserved_bytes = torch.cuda.max_memory_reserved()
    # Otherwise torch would compile the next number of rows for any number of them.
    torch.compiler.reset()
    _free()


def warm_up(
    stage: Stage,
    bench: Bench,
    methods: list[Method],
    rows: int,
    longest: int,
    end: float,
    expected: dict[str, float],
) -> None:
    """Calls each method until nothing is compiled or captured any more, and gives the bench those
    that work.

    Args:
        stage ([`Stage`]): Is told how long it took, and what was left out.
        bench ([`Bench`]): Without methods yet.
        methods (`list[Method]`): Plain decoding first.
        rows (`int`): How many texts are decoded at a time.
        longest (`int`): The tokens of the longest prompt.
        end (`float`): The time after which nothing is begun.
        expected (`dict[str, float]`): How long methods will take, as far as it is known.
    """
    vocab_size = text_config(bench.model).vocab_size
    # As long as the longest text, and of tokens from which no table learns anything for others.
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(vocab_size // 2, vocab_size, (longest // 2 + 1,), generator=generator)
    ids = half.repeat(3)[: longest + WARM_UP_TOKENS].tolist()
    texts = [Text(ids[:longest], ids[longest:])] * rows
    compiled: set[str] = set()
    for method in methods:
        name, began = label(method.name, method.nodes), perf_counter()
        verification = method.options.get("verification", "auto")
        compiles = method.drafter and method.options and verification not in compiled
        # A width takes as long as the only one of plain decoding.
        widths = len(WIDTHS) if compiles else 0
        one = stage.first_seconds.get(f"{PLAIN}, {COMPILED}", 0.0)
        if began + expected.get(name, widths * one) > end:
            stage.left_out.append(f"{name}: there was no time to warm it up")
            continue
        try:
            if compiles:
                warmup(bench.model, longest + NEW_TOKENS, rows, **method.options)
                compiled.add(verification)
            measure_texts(bench, "warm-up", texts, [method])
            if bench.model.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            measure_texts(bench, "warm-up", texts, [method])
        except Exception as error:  # whatever a compiler or a driver may raise: others are measured
            line = str(error).strip().partition("\n")[0]
            stage.left_out.append(f"{name}: {type(error).__name__}: {line}")
            if method.name == PLAIN:
                return
            continue
        if bench.model.device.type == "cuda":
            stage.peak_bytes[name] = torch.cuda.max_memory_allocated()
        stage.first_seconds[name] = perf_counter() - began
        bench.methods.append(method)


def _shape(batches: dict[str, list[list[Text]]]) -> tuple[int, int]:
    """The number of rows, and the length of the longest prompt."""
    all_batches = [batch for of_suite in batches.values() for batch in of_suite]
    longest = max(len(text.prompt_ids) for batch in all_batches for text in batch)
    return len(all_batches[0]), longest


def measure_texts(
    bench: Bench, name: str, texts: list[Text], methods: list[Method] | None = None
) -> Entry:
    """Decodes a batch by all methods; a model that can be forced writes its answers."""
    kwargs: dict[str, Any] = {}
    bench.max_new_tokens = NEW_TOKENS
    if isinstance(bench.model, ForcedLlama):
        bench.model.force([[*text.prompt_ids, *(text.answer_ids or ())] for text in texts])
        answers = [len(text.answer_ids or ()) for text in texts]
        bench.max_new_tokens = min(NEW_TOKENS, *answers)
        kwargs["eos_token_id"] = None
    if len(texts) > 1:
        # Rows then stay where they are: a forced text belongs to a row.
        kwargs["return_dict_in_generate"] = True
    prompts = [text.prompt_ids for text in texts]
    entry, _ = bench.measure(name, prompts, None, methods, **kwargs)
    return entry


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _write(run: Run, options: argparse.Namespace) -> None:
    """Writes the report, and all samples beside it: what was measured is kept."""
    about = run.about["machine"]
    name = re.sub(r"[^a-z0-9]+", "-", str(about.get("gpu", "small")).lower()).strip("-")
    (options.out / f"{name}.md").write_text(gpu_report(run), encoding="utf-8")
    samples = json.dumps(asdict(run), indent=1)
    (options.out / f"{name}.json").write_text(samples, encoding="utf-8")


def _say(what: str) -> None:
    print(f"gpu_bench: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
