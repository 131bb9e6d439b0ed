"""What drafts gain on one GPU, in eight minutes: `scripts/gpu_bench --help`."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import torch
import transformers
from suites import (
    SIZES,
    RecordedAnswer,
    humaneval,
    llma_rag,
    random_model,
    random_texts,
    recorded_turns,
    spec_bench,
    table,
)
from transformers import (
    BatchEncoding,
    CompileConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

import hf_refspec as rs
from hf_refspec.apps.bench.measure import LOOK_UP, LOOK_UP_TOKENS, taking_turns
from hf_refspec.apps.shared.comparison import UNDRAFTED, Comparison
from hf_refspec.apps.shared.loading import load_tokenizer
from hf_refspec.drafting.auto import default_sources

VOCABULARY = 128_256  # of Llama 3.1
# Shorter answers are left out: the first passes of a call say little.
NEW_TOKENS, FEWEST_TOKENS = 96, 48
SUITES = "rag", "humaneval", "spec-bench"
FIRST_TEXTS = 2  # of each suite, before anything else is measured
ROWS = 4
WIDTHS = (1, 8, 16, 32, 64)  # the tokens of a pass
TIMED_PASSES = 10
SECONDS = 470
TEST_SECONDS, LAST_WORDS = 120, 15
TESTS_FOLDER = Path(__file__).parents[1] / "tests"
TESTS = ["test_on_a_gpu.py", "test_calls_on_a_gpu.py"]
COLUMNS = ["texts", "method", "tokens/s", "speed-up", "MAT", "equal texts"]
Texts: TypeAlias = dict[str, list[RecordedAnswer]]  # of each suite
Methods: TypeAlias = dict[str, dict[str, Any]]
ABOUT = """Measures on one GPU, and ends in time with the figures that it has.

In this order: the tests of what holds on a GPU; a random Llama of the shape of Llama 3.1 8B in
bfloat16 writes recorded answers (questions about documents, code, chat), plainly, with prompt
look-up, with "auto" and with 64 nodes, two texts of each; the milliseconds of a pass over 1, 8, 16,
32 and 64 tokens; the same passes compiled over a static cache, then a text of each; sampling, and
four rows of one text; then further texts while time is left. Each figure is written to report.md as
soon as it is there.

It needs no network: a Python (PYTHON, default python3) whose torch sees the GPU, with this
package's dependencies and pytest, and the data files, llama2-tokenizer among them. `--device cpu
--size tiny` tries it without a GPU."""


class ForcedLlama(LlamaForCausalLM):
    """A Llama that writes the text that it is given, whatever its weights.

    A logits processor would have tokens chosen one by one, each with a wait for the GPU. Here
    `generate` is as fast as with a trained model.
    """

    MOST_TOKENS = 8192
    # Added to the logit of the next token, whose probability is then like a trained model's.
    STRENGTH = 14.0

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.register_buffer("text", torch.full((self.MOST_TOKENS,), -1), persistent=False)

    def force(self, text: list[int]) -> None:
        """Has later calls write a text, which begins with their prompt."""
        self.text.fill_(-1)
        self.text[: len(text)] = torch.tensor(text)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """After each token that the text has at that position, raises the logit of the next one."""
        outputs = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            logits_to_keep=logits_to_keep,
            **{**kwargs, "return_dict": True},
        )
        if position_ids is None:
            return outputs
        logits, kept = outputs.logits, outputs.logits.shape[1]
        places = position_ids[:, -kept:].expand(len(logits), kept)
        on_text = self.text[places] == input_ids[:, -kept:]
        following = self.text[(places + 1).clamp(max=self.MOST_TOKENS - 1)]
        bonus = self.STRENGTH * (on_text & (following >= 0))
        outputs.logits = logits.scatter_add(
            2, following.clamp(min=0)[..., None], bonus[..., None].to(logits.dtype)
        )
        return outputs


def static_options(length: int, device: str) -> dict[str, Any]:
    """The arguments of `generate` for compiled passes over a cache of one length, so that no text
    causes another compilation."""
    static: dict[str, Any] = {"cache_implementation": "static", "max_cache_len": length}
    if device == "cpu":  # where `generate` does not compile by default
        config: Any = CompileConfig(mode="default")
        config._compile_all_devices = True
        static["compile_config"] = config
    return static


def eager_methods() -> Methods:
    """Plain decoding first, and each method with a new drafter."""
    return {
        UNDRAFTED: {},
        LOOK_UP: {"prompt_lookup_num_tokens": LOOK_UP_TOKENS},
        "auto": drafting("auto"),
        "64 nodes": drafting(64),
    }


def drafting(nodes: int | str) -> dict[str, Any]:
    return {"candidate_generator": rs.Blend(default_sources()), "max_draft_tokens": nodes}


def compiled_methods(static: dict[str, Any]) -> Methods:
    """The same over a static cache; transformers' prompt look-up takes none."""
    methods = {name: {**options, **static} for name, options in eager_methods().items()}
    del methods[LOOK_UP]
    return methods


def sampling_methods() -> Methods:
    """Some text of its own: what is sampled leaves the recorded answer at times."""
    sampled = {"do_sample": True, "top_k": 0}
    return {name: {**options, **sampled} for name, options in eager_methods().items()}


def batch_methods() -> Methods:
    """Prompt look-up takes one row."""
    methods = eager_methods()
    del methods[LOOK_UP]
    return methods


def batch_of(model: Any, texts: Sequence[RecordedAnswer]) -> tuple[BatchEncoding, dict[str, Any]]:
    """The inputs of a call for some prompts, padded on the left, and its options. A [`ForcedLlama`]
    writes the answer to the first, which should be the only one or stand there several times; other
    models write freely."""
    longest = max(len(text.prompt_ids) for text in texts)
    padding = [longest - len(text.prompt_ids) for text in texts]
    ids = [[0] * most + text.prompt_ids for most, text in zip(padding, texts, strict=True)]
    mask = [[0] * most + [1] * (longest - most) for most in padding]
    inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    options = {"max_new_tokens": NEW_TOKENS}
    if isinstance(model, ForcedLlama):
        text = texts[0]
        model.force(text.prompt_ids + text.answer_ids)
        new_tokens = min(NEW_TOKENS, len(text.answer_ids))
        options = {"max_new_tokens": new_tokens, "eos_token_id": None}
    return BatchEncoding(inputs).to(model.device), options


def recorded_texts(data: Path, tokenizer: PreTrainedTokenizerBase) -> Texts:
    """The recorded answers of each suite that are long enough."""
    questions = taking_turns(
        [q for q in spec_bench(data / "spec_bench_questions.jsonl") if q.answers]
    )
    answers: Texts = {
        "rag": llma_rag(data / "llma_rag.jsonl", tokenizer),
        "humaneval": humaneval(data / "HumanEval.jsonl.gz", tokenizer),
        "no-overlap": random_texts(tokenizer),
        "spec-bench": [recorded_turns(question, tokenizer)[0] for question in questions],
    }
    return {
        # Without the end of the text.
        name: [
            RecordedAnswer(each.prompt_ids, each.answer_ids[:-1])
            for each in of_suite
            if len(each.answer_ids) > FEWEST_TOKENS
        ]
        for name, of_suite in answers.items()
    }


class WrongTokens(rs.Drafter):
    """Drafts the same number of tokens for each pass, none of which is accepted."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def draft(self, budget: int, call) -> rs.DraftTree:
        """A chain, but for the rare case that the text has one of these tokens."""
        nodes = min(self._nodes, budget)
        return rs.DraftTree.chain([2 + node for node in range(nodes)])


def pass_milliseconds(model: Any, text: RecordedAnswer, width: int, **options: Any) -> float:
    """The milliseconds of a pass over this number of tokens behind a prompt, with all that the
    host does for it."""
    drafter = WrongTokens(width - 1)
    inputs, given = batch_of(model, [text])
    given |= {"max_new_tokens": TIMED_PASSES + width, "do_sample": False, **options}
    for _ in range(2):  # the first call compiles, or probes the model
        drafted = {"candidate_generator": drafter, "max_draft_tokens": max(width - 1, 1)}
        model.generate(**inputs, **given, **drafted)
    stats = drafter.stats
    return 1000 * stats.verifying_seconds / (stats.forward_passes - 1)


class Report:
    """The figures so far. Each is printed and written into a file at once."""

    def __init__(self, path: Path, title: str) -> None:
        self._path = path
        self._sections: dict[str, str] = {"": f"# {title}\n"}

    def write(self, section: str, text: str, figure: str = "") -> None:
        """Replaces a section; prints what is new in it."""
        self._sections[section] = f"## {section}\n\n{text.strip()}\n"
        self._path.write_text("\n".join(self._sections.values()), encoding="utf-8")
        print(f"{section}: {figure or text.strip()}", flush=True)


class Bench:
    """The stages, in the order in which they are worth their time."""

    def __init__(self, report: Report, model: Any, texts: Texts, end: float) -> None:
        self._report = report
        self._model = model
        self._texts = texts
        self._end = end
        longest = max(len(text.prompt_ids) for some in texts.values() for text in some)
        self._static = static_options(longest + NEW_TOKENS + max(WIDTHS), model.device.type)
        self._comparisons: dict[tuple[str, str], Comparison] = {}

    def run(self) -> None:
        """Measures until all texts are measured or the time is up."""
        stages: list[Callable[[], None]] = [
            *(
                lambda number=number: self.texts("eager", eager_methods, number)
                for number in range(FIRST_TEXTS)
            ),
            lambda: self.passes("eager"),
            # First the passes, which compile all widths: a text should wait for none.
            lambda: self.passes("compiled", **self._static),
            lambda: self.texts("compiled", lambda: compiled_methods(self._static), 0),
            lambda: self.texts("sampled", sampling_methods, 0),
            lambda: self.texts("four rows", batch_methods, 0, ROWS),
        ]
        most = max(map(len, self._texts.values()))
        stages += [
            lambda number=number: self.texts("eager", eager_methods, number)
            for number in range(FIRST_TEXTS, most)
        ]
        for stage in stages:
            stage()

    def texts(self, about: str, methods: Callable[[], Methods], number: int, rows: int = 1) -> None:
        """One text of each suite by all methods."""
        for suite, texts in self._texts.items():
            if number >= len(texts) or perf_counter() > self._end:
                continue
            key = about, suite
            if key not in self._comparisons:
                self._comparisons[key] = Comparison(self._model, methods, do_sample=False)
            comparison = self._comparisons[key]
            inputs, options = batch_of(self._model, [texts[number]] * rows)
            if number == 0:  # the first calls compile, or probe the model
                self._try_out(about, comparison, inputs, options)
            self._ask(about, suite, comparison, inputs, options, rows)

    def _try_out(self, about: str, comparison: Comparison, inputs: Any, options: Any) -> None:
        """Calls each method until it is compiled, and leaves out those that raise."""
        for name in list(comparison.methods):
            try:
                for _ in range(2 if about == "compiled" else 1):
                    comparison.call(name, inputs, **options)
            except Exception as error:  # a compiler's or driver's, say: the others still count
                self._note(f"{about}, {name}", error)
                del comparison.methods[name], comparison.calls[name]

    def _note(self, section: str, error: Exception) -> None:
        line = str(error).strip().partition("\n")[0]
        self._report.write(section, f"{type(error).__name__}: {line}")

    def _ask(
        self, about: str, suite: str, comparison: Comparison, inputs: Any, options: Any, rows: int
    ) -> None:
        if UNDRAFTED not in comparison.methods:
            return
        comparison.ask(inputs, **options)
        last = (f"{name} {calls[-1].rate:.1f}" for name, calls in comparison.calls.items())
        figure = f"{suite}, tokens/s: {', '.join(last)}"
        cells = []
        for (of, of_suite), each in self._comparisons.items():
            for name, calls in each.calls.items() if of == about and each.prompts else ():
                total = each.total(name)
                faster = total.rate / each.total(UNDRAFTED).rate
                figures = f"{total.rate:.1f}", f"{faster:.2f}x", f"{total.mat / rows:.2f}"
                cells.append([of_suite, name, *figures, f"{each.equal(name)} of {len(calls)}"])
        self._report.write(f"recorded answers, {about}", table(COLUMNS, cells), figure)

    def passes(self, about: str, **options: Any) -> None:
        """The cost of passes, which decides how many nodes pay."""
        text = next(iter(self._texts.values()))[0]
        cells: list[list[str]] = []
        for width in WIDTHS:
            if perf_counter() > self._end:
                return
            try:
                milliseconds = pass_milliseconds(self._model, text, width, **options)
            except Exception as error:
                self._note(f"a pass, {about}, {width} tokens", error)
                return
            cells.append([str(width), f"{milliseconds:.2f}"])
            rows = table(["tokens", "milliseconds"], cells)
            self._report.write(f"a pass, {about}", rows, f"{width} tokens {milliseconds:.2f} ms")


def run_tests(report: Report, device: str, seconds: float) -> None:
    """The tests of what holds on a GPU, or as many as the time allows."""
    command = [sys.executable, "-m", "pytest", "-rf", "-p", "no:cacheprovider", "--tb=short"]
    command += [str(TESTS_FOLDER / test) for test in TESTS]
    if find_spec("xdist"):  # torch compiles in several processes
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    environment = {**os.environ, "HF_REFSPEC_DEVICE": device}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=TESTS_FOLDER.parent, env=environment, **pipes) as run:
        try:
            output, _ = run.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGINT)  # pytest then tells what has failed so far
            try:
                output, _ = run.communicate(timeout=LAST_WORDS)
            except subprocess.TimeoutExpired:
                run.kill()
                output, _ = run.communicate()
        except BaseException:
            run.kill()
            raise
    *lines, last = output.strip().splitlines() or ["no output"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    report.write("tests", "\n".join([*failed, last.strip("= ")]))


def new_bench(report: Report, args: argparse.Namespace, texts: Texts, end: float) -> Bench:
    """Builds the model on its device."""
    tokens = max(max(t.prompt_ids + t.answer_ids) for some in texts.values() for t in some)
    vocab_size = tokens + 1 if args.size == "tiny" else max(VOCABULARY, tokens + 1)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model = random_model(args.size, vocab_size, args.device, dtype, ForcedLlama)
    return Bench(report, model, texts, end)


def main(arguments: list[str] | None = None) -> int:
    """Measures and writes the report; returns 1 if nothing was measured, 2 for bad options."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_bench",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    known = os.environ.get("HF_REFSPEC_DATA")
    add("--data", type=Path, default=known, help="the data files; default: HF_REFSPEC_DATA")
    add("--out", type=Path, help="a new folder; default: benchmarks/<name of the GPU>")
    add("--device", default="cuda", help="where the model runs; default: cuda")
    add("--size", choices=SIZES, default="8B", help="of the random model; default: 8B")
    add("--seconds", type=float, default=SECONDS, help=f"of everything; default: {SECONDS}")
    args = parser.parse_args(arguments)
    end = perf_counter() + args.seconds
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_bench: torch sees no GPU; check the driver, or try --device", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    out = args.out or Path(__file__).parent / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    try:
        if args.data is None:
            raise ValueError("no data: pass --data DATA, or set HF_REFSPEC_DATA")
        tokenizer = load_tokenizer(str(args.data / "llama2-tokenizer"))
        recorded = recorded_texts(args.data, tokenizer)
        texts = {suite: recorded[suite] for suite in SUITES if recorded[suite]}
        out.mkdir(parents=True)
    except (OSError, ValueError) as error:
        print(f"gpu_bench: {error}", file=sys.stderr)
        return 2
    transformers.logging.set_verbosity_error()
    versions = f"{name}, torch {torch.__version__}, transformers {transformers.__version__}"
    report = Report(out / "report.md", versions)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)  # raises as ctrl-C does
    try:
        signal.setitimer(signal.ITIMER_REAL, args.seconds)
        rs.warmup()  # before the processes of the tests, which would each compile the kernels
        run_tests(report, args.device, min(TEST_SECONDS, args.seconds / 3))
        new_bench(report, args, texts, end).run()
    except KeyboardInterrupt:
        report.write("stopped", f"after {args.seconds + perf_counter() - end:.0f} seconds")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return 0 if "| auto |" in (out / "report.md").read_text(encoding="utf-8") else 1


if __name__ == "__main__":
    sys.exit(main())
