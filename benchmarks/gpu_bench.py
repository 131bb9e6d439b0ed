"""What drafts are worth on one GPU, eager and compiled: `scripts/gpu_bench`.

A Llama of the shape of Llama 3.1 8B with random weights in bfloat16 writes recorded answers; then a
trained model writes freely, where one is at hand; each one text at a time and four at a time.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_refspec.apps.bench import suites
from hf_refspec.apps.bench.measure import Bench
from hf_refspec.apps.bench.methods import (
    DEFAULT,
    LOOK_UP,
    PLAIN,
    Method,
    compiled_methods,
    default_drafter,
    static_options,
    transformers_methods,
)
from hf_refspec.apps.bench.models import random_model
from hf_refspec.apps.bench.registry import Job
from hf_refspec.apps.bench.report import write_report
from hf_refspec.apps.bench.results import new_results
from hf_refspec.apps.bench.run import measure_suite
from hf_refspec.apps.bench.suites import RecordedAnswer, answered, chat_prompt
from hf_refspec.apps.bench.summary import Entry
from hf_refspec.apps.shared.loading import load_model, load_tokenizer
from hf_refspec.extras import require
from hf_refspec.generation.warmup import warmup
from hf_refspec.hook import install
from hf_refspec.smollm2 import default_model

HERE = Path(__file__).parent
NODES: tuple[int | str, ...] = ("auto", 64)
ROWS = (1, 4)
VOCABULARY = 128_256  # of Llama 3.1
# Shorter answers are left out, as the first passes of a call say little.
NEW_TOKENS, FEWEST_TOKENS, WARM_UP_TOKENS = 96, 48, 32
QUESTIONS = 8  # of a suite, at most
SECONDS = 420  # for all questions but the first
# The fractions of the time after which each model is done with each number of rows.
RANDOM, TRAINED = (0.45, 0.7), (0.85, 1.0)


class Text(NamedTuple):
    """A prompt, and what the model is forced to write; `None` where it writes freely."""

    prompt_ids: list[int]
    answer_ids: list[int] | None


class ForcedLlama(LlamaForCausalLM):
    """A Llama that writes the texts that it is given, whatever its weights.

    With a logits processor, see [`~bench.forced_text.ForcedText`], tokens are chosen one by one,
    each with a wait for the GPU: here `generate` is as fast as with a trained model.
    """

    MOST_ROWS, MOST_TOKENS = 8, 8192
    # Added to the logit of the next token, whose probability is then like a trained model's.
    STRENGTH = 14.0

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        texts = torch.full((self.MOST_ROWS, self.MOST_TOKENS), -1)
        self.register_buffer("texts", texts, persistent=False)

    def force(self, texts: list[list[int]]) -> None:
        """Has row i of later calls write `texts[i]`, which begins with its prompt."""
        self.texts.fill_(-1)
        for row, text in zip(self.texts, texts, strict=False):
            row[: len(text)] = torch.tensor(text)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """After each token that the text has at that position, raises the logit of the next one."""
        outputs = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            logits_to_keep=logits_to_keep,
            **{**kwargs, "return_dict": True},
        )
        logits, kept = outputs.logits, outputs.logits.shape[1]
        if position_ids is None:
            return outputs
        texts = self.texts[: len(logits)]
        places = position_ids[:, -kept:].expand(len(logits), kept)
        on_text = texts.gather(1, places) == input_ids[:, -kept:]
        following = texts.gather(1, (places + 1).clamp(max=self.MOST_TOKENS - 1))
        bonus = self.STRENGTH * (on_text & (following >= 0))
        logits = logits.scatter_add(
            2, following.clamp(min=0)[..., None], bonus[..., None].to(logits.dtype)
        )
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)


def gpu_methods(static: dict[str, Any], rows: int = 1) -> list[Method]:
    """Eager, compiled and reproducible decoding, plain and drafted, of so many rows."""
    methods = [
        *transformers_methods(),
        *(Method(DEFAULT, nodes, default_drafter()) for nodes in NODES),
        *compiled_methods(static, NODES),
    ]
    return [each for each in methods if rows == 1 or each.name != LOOK_UP]  # it takes one row


def main(arguments: list[str] | None = None) -> int:
    """Measures and writes the report; returns 1 if nothing was measured, 2 for bad options."""
    began = perf_counter()
    options = _options(arguments)
    try:
        tokenizer = _check(options)
        results = new_results(options.out, {"small": options.small}, options.device)
    except (ImportError, OSError, ValueError) as error:
        print(f"gpu_bench: {error}", file=sys.stderr)
        return 2
    install()
    transformers.logging.set_verbosity_error()
    warmup()
    left_out: list[str] = []
    try:
        ends = [began + part * SECONDS for part in RANDOM]
        _measure_random_model(options, tokenizer, results, left_out, ends)
        ends = [began + part * SECONDS for part in TRAINED]
        _measure_trained_model(options, results, left_out, ends)
    except KeyboardInterrupt:
        left_out.append("stopped by ctrl-C")
    results["settings"]["left out"] = "; ".join(left_out) or "nothing"
    print(write_report(results, options.out))
    return 0 if any(suite["entries"] for suite in results["suites"].values()) else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_bench", description="Measures on one NVIDIA GPU."
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="the data files, llama2-tokenizer among them")
    add("--out", type=Path, help="a new folder; default: benchmarks/<name of the GPU>")
    add("--model", help="a trained model that writes freely; default: the default model")
    add("--small", action="store_true", help="a tiny model, on the CPU if there is no GPU")
    return parser.parse_args(arguments)


def _check(options: argparse.Namespace) -> PreTrainedTokenizerBase:
    """Checks the options, sets their defaults, and loads the tokenizer of the recorded texts."""
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cpu" and not options.small:
        raise ValueError(
            "torch sees no GPU; check the driver and that torch has CUDA, or try it with --small"
        )
    require("matplotlib", "this benchmark", "bench")
    if options.out is None:
        gpu = torch.cuda.get_device_name() if options.device == "cuda" else "small"
        options.out = HERE / re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return load_tokenizer(str(options.data / "llama2-tokenizer"))


def _measure_random_model(
    options: argparse.Namespace,
    tokenizer: PreTrainedTokenizerBase,
    results: dict[str, Any],
    left_out: list[str],
    ends: list[float],
) -> None:
    if options.small:
        size, dtype, vocab_size = "tiny", torch.float32, len(tokenizer)
    else:
        size, dtype, vocab_size = "8B", torch.bfloat16, max(VOCABULARY, len(tokenizer))
    texts = _recorded(options.data, tokenizer, left_out)
    model = random_model(size, vocab_size, options.device, dtype, ForcedLlama)
    for rows, end in zip(ROWS, ends, strict=True):
        bench = Bench(model, tokenizer, list, False, NEW_TOKENS)
        measure(bench, f"random {size}", texts, rows, end, results, left_out, options.out)


def _measure_trained_model(
    options: argparse.Namespace, results: dict[str, Any], left_out: list[str], ends: list[float]
) -> None:
    dtype = torch.float32 if options.small else torch.bfloat16
    try:
        if options.small and options.model is None:
            raise OSError("with --small one must be named with --model")
        name = options.model or default_model()
        if options.model is None and not Path(name).is_dir():
            raise OSError("it is not on this machine; name a folder with --model")
        model, tokenizer = load_model(name, options.device, dtype), load_tokenizer(name)
    except (OSError, ValueError, ImportError) as error:
        left_out.append(f"a trained model: {str(error).partition(chr(10))[0]}")
        return
    texts: dict[str, list[Text]] = {}
    rag, questions = options.data / "llma_rag.jsonl", options.data / "spec_bench_questions.jsonl"
    if rag.exists():
        texts["rag"] = [Text(each.prompt_ids, None) for each in suites.llma_rag(rag, tokenizer)]
    if questions.exists():
        asked = suites.taking_turns(suites.spec_bench(questions))
        texts["spec-bench"] = [Text(chat_prompt(q.turns[:1], tokenizer), None) for q in asked]
    for rows, end in zip(ROWS, ends, strict=True):
        bench = Bench(model, tokenizer, list, False, NEW_TOKENS)
        measure(bench, Path(name).name, texts, rows, end, results, left_out, options.out)


def _recorded(
    data: Path, tokenizer: PreTrainedTokenizerBase, left_out: list[str]
) -> dict[str, list[Text]]:
    """The recorded answers of each suite that are long enough."""

    def spec_bench(path: Path) -> list[RecordedAnswer]:
        questions = suites.taking_turns([q for q in suites.spec_bench(path) if q.answers])
        return [
            RecordedAnswer(chat_prompt(q.turns[:1], tokenizer), answered(q, 0, tokenizer))
            for q in questions
        ]

    sources: dict[str, tuple[str, Any]] = {
        "rag": ("llma_rag.jsonl", partial(suites.llma_rag, tokenizer=tokenizer)),
        "humaneval": ("HumanEval.jsonl.gz", partial(suites.humaneval, tokenizer=tokenizer)),
        "no-overlap": ("", lambda _: suites.random_texts(tokenizer)),
        "spec-bench": ("spec_bench_questions.jsonl", spec_bench),
    }
    texts = {}
    for name, (file, read) in sources.items():
        path = data / file
        if not path.exists():
            left_out.append(f"{name}: {path.name} is missing")
            continue
        # Without the end of the text, so that all rows of a batch reach the same length.
        answers = (Text(each.prompt_ids, each.answer_ids[:-1]) for each in read(path))
        texts[name] = [each for each in answers if len(each.answer_ids or ()) >= FEWEST_TOKENS]
    return texts


def measure(
    bench: Bench,
    model: str,
    texts: dict[str, list[Text]],
    rows: int,
    end: float,
    results: dict[str, Any],
    left_out: list[str],
    folder: Path,
) -> None:
    """Measures texts of each suite in batches until `end`, each suite for as long as the others."""
    batches = {name: _batches(each, rows) for name, each in texts.items()}
    batches = {name: each for name, each in batches.items() if each}
    about = f"{model}, {rows} {'texts' if rows > 1 else 'text'} at a time"
    if not batches or perf_counter() > end:
        left_out.append(f"{about}: {'the time was up' if batches else 'there are no texts'}")
        return
    every = [text for each in batches.values() for batch in each for text in batch]
    longest = max(len(text.prompt_ids) for text in every)
    static = static_options(longest + NEW_TOKENS, bench.model.device.type)
    methods = gpu_methods(static, rows)
    half = (perf_counter() + end) / 2
    names, reasons = warm_up(bench, methods, rows, longest, half)
    left_out += [f"{about}: {reason}" for reason in reasons]
    if PLAIN not in names:
        return
    bench.new_methods = lambda: [m for m in gpu_methods(static, rows) if _label(m) in names]
    dtype = str(bench.model.dtype).removeprefix("torch.")
    for left, (name, of_suite) in zip(range(len(batches), 0, -1), batches.items(), strict=True):
        jobs: list[Job] = [
            partial(decode, f"{name} {i}", each) for i, each in enumerate(of_suite, 1)
        ]
        until = perf_counter() + (end - perf_counter()) / left
        measure_suite(bench, jobs, name, f"{dtype}, {about}", results, folder, until)
    torch.compiler.reset()  # or torch would compile the next number of rows for any number
    gc.collect()
    torch.cuda.empty_cache()


def warm_up(
    bench: Bench, methods: list[Method], rows: int, longest: int, end: float
) -> tuple[list[str], list[str]]:
    """Calls each method until nothing is compiled or captured any more; returns the names of those
    that work, and why others are left out. After `end` no method is begun but the first."""
    vocab_size = bench.model.config.vocab_size
    # As long as the longest text, of tokens from which no table learns anything about others.
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(vocab_size // 2, vocab_size, (longest // 2 + 1,), generator=generator)
    ids = half.repeat(3)[: longest + WARM_UP_TOKENS].tolist()
    texts = [Text(ids[:longest], ids[longest:])] * rows
    names: list[str] = []
    left_out: list[str] = []
    for method in methods:
        name = _label(method)
        if names and perf_counter() > end:
            left_out.append(f"{name}: there was no time to warm it up")
            continue
        bench.methods = [method]
        try:
            if method.drafter and method.options:
                warmup(bench.model, longest + NEW_TOKENS, rows, **method.options)
            for _ in range(2):
                next(decode("warm-up", texts, bench))
        except Exception as error:  # of a compiler or driver, say: the others are still measured
            line = str(error).strip().partition("\n")[0]
            left_out.append(f"{name}: {type(error).__name__}: {line}")
        else:
            names.append(name)
    return names, left_out


def decode(name: str, texts: list[Text], bench: Bench) -> Iterator[Entry]:
    """Decodes a batch by all methods; a [`ForcedLlama`] writes its answers."""
    kwargs: dict[str, Any] = {}
    bench.max_new_tokens = NEW_TOKENS
    if isinstance(bench.model, ForcedLlama):
        bench.model.force([[*text.prompt_ids, *(text.answer_ids or ())] for text in texts])
        bench.max_new_tokens = min(NEW_TOKENS, *(len(text.answer_ids or ()) for text in texts))
        kwargs["eos_token_id"] = None
    if len(texts) > 1:
        kwargs["return_dict_in_generate"] = True  # rows keep their places, as forced texts do
    entry, _ = bench.measure(name, [text.prompt_ids for text in texts], **kwargs)
    yield entry


def _batches(texts: list[Text], rows: int) -> list[list[Text]]:
    """Full batches of so many texts."""
    starts = range(0, len(texts) - rows + 1, rows)
    return [texts[start : start + rows] for start in starts][:QUESTIONS]


def _label(method: Method) -> str:
    return f"{method.name}, {method.nodes}" if method.nodes else method.name


if __name__ == "__main__":
    sys.exit(main())
