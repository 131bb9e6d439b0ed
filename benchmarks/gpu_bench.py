"""What drafts gain on one GPU, eager and compiled: `scripts/gpu_bench`.

A Llama of the shape of Llama 3.1 8B with random weights in bfloat16 writes recorded answers; then a
trained model, if there is one, writes freely, one text and four texts at a time.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import torch
import transformers
from suites import (
    RecordedAnswer,
    chat_ids,
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
from hf_refspec.apps.bench.measure import LOOK_UP, LOOK_UP_TOKENS
from hf_refspec.apps.bench.prompts import taking_turns
from hf_refspec.apps.shared.comparison import PLAIN, Comparison, decode, rate
from hf_refspec.apps.shared.loading import load_model, load_tokenizer
from hf_refspec.drafting.candidates import default_sources

VOCABULARY = 128_256  # of Llama 3.1
# Shorter answers are left out: the first passes of a call say little.
NEW_TOKENS, FEWEST_TOKENS, WARM_UP_TOKENS = 96, 48, 32
BATCHES = 8  # of a suite, at most
COLUMNS = ["texts", "method", "tokens/s", "speed-up", "MAT", "equal texts"]
Texts: TypeAlias = dict[str, list[RecordedAnswer]]  # of each suite
SECONDS = 420  # for all texts but the first of each suite


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
        if position_ids is None:
            return outputs
        logits, kept = outputs.logits, outputs.logits.shape[1]
        places = position_ids[:, -kept:].expand(len(logits), kept)
        on_text = self.text[places] == input_ids[:, -kept:]
        following = self.text[(places + 1).clamp(max=self.MOST_TOKENS - 1)]
        bonus = self.STRENGTH * (on_text & (following >= 0))
        logits = logits.scatter_add(
            2, following.clamp(min=0)[..., None], bonus[..., None].to(logits.dtype)
        )
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)


def static_options(length: int, device: str) -> dict[str, Any]:
    """The arguments of `generate` for compiled passes over a cache of one length, so that no text
    causes another compilation."""
    static: dict[str, Any] = {"cache_implementation": "static", "max_cache_len": length}
    if device == "cpu":  # where `generate` does not compile by default
        config: Any = CompileConfig(mode="default")
        config._compile_all_devices = True
        static["compile_config"] = config
    return static


def gpu_methods(static: dict[str, Any], rows: int = 1) -> dict[str, dict[str, Any]]:
    """Eager decoding, and of one row compiled and reproducible decoding, plain and drafted."""

    def drafted(nodes: int | str, **options: Any) -> dict[str, Any]:
        drafter = rs.Blend(default_sources())
        return {"candidate_generator": drafter, "max_draft_tokens": nodes, **options}

    methods = {PLAIN: {}, "auto": drafted("auto"), "64 draft tokens": drafted(64)}
    if rows > 1:
        return methods
    reproducible = {**static, "verification": "reproducible"}
    return {
        **methods,
        LOOK_UP: {"prompt_lookup_num_tokens": LOOK_UP_TOKENS},
        f"{PLAIN}, compiled": static,
        "auto, compiled": drafted("auto", **static),
        "64 draft tokens, compiled": drafted(64, **static),
        f"{PLAIN}, reproducible": reproducible,
        "auto, reproducible": drafted("auto", **reproducible),
    }


def batch_of(model: Any, texts: list[RecordedAnswer]) -> tuple[BatchEncoding, dict[str, Any]]:
    """The inputs of a call for some prompts, padded on the left, and its options. A [`ForcedLlama`]
    writes the answer to the only one; other models write freely."""
    longest = max(len(text.prompt_ids) for text in texts)
    padding = [longest - len(text.prompt_ids) for text in texts]
    ids = [[0] * most + text.prompt_ids for most, text in zip(padding, texts, strict=True)]
    mask = [[0] * most + [1] * (longest - most) for most in padding]
    inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    options = {"max_new_tokens": NEW_TOKENS}
    if isinstance(model, ForcedLlama):
        [text] = texts
        model.force(text.prompt_ids + text.answer_ids)
        new_tokens = min(NEW_TOKENS, len(text.answer_ids))
        options = {"max_new_tokens": new_tokens, "eos_token_id": None}
    return BatchEncoding(inputs).to(model.device), options


def warm_up(
    model: Any, methods: dict[str, dict[str, Any]], rows: int, longest: int, end: float
) -> tuple[list[str], list[str]]:
    """Calls each method until nothing is compiled or captured any more. Returns the names of the
    methods that work, and why others are left out; after `end` only the first is begun."""
    vocab_size = model.config.vocab_size
    # A text as long as the longest one, of tokens that teach no table anything about others.
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(vocab_size // 2, vocab_size, (longest // 2 + 1,), generator=generator)
    ids = half.repeat(3)[: longest + WARM_UP_TOKENS].tolist()
    inputs, options = batch_of(model, [RecordedAnswer(ids[:longest], ids[longest:])] * rows)
    names: list[str] = []
    left_out: list[str] = []
    for name, given in methods.items():
        if names and perf_counter() > end:
            left_out.append(f"{name}: there was no time to warm it up")
            continue
        try:
            if "candidate_generator" in given and "max_cache_len" in given:
                static = dict(given)
                del static["candidate_generator"], static["max_draft_tokens"]
                rs.warmup(model, longest + NEW_TOKENS, rows, **static)
            for _ in range(2):
                decode(model, inputs, **options, **given, do_sample=False)
        except Exception as error:  # a compiler's or driver's, say: the others are still measured
            line = str(error).strip().partition("\n")[0]
            left_out.append(f"{name}: {type(error).__name__}: {line}")
        else:
            names.append(name)
    return names, left_out


def measure(model: Any, texts: Texts, rows: int, end: float) -> tuple[list[list[Any]], list[str]]:
    """Measures texts of each suite in batches until `end`, every suite for the same time. Returns
    the rows of a table, and what was left out."""
    starts = {name: range(0, len(each) - rows + 1, rows)[:BATCHES] for name, each in texts.items()}
    batches = {
        name: [texts[name][start : start + rows] for start in of_suite]
        for name, of_suite in starts.items()
        if of_suite
    }
    if not batches or perf_counter() > end:
        return [], ["the time was up" if batches else "there are no texts"]
    longest = max(len(text.prompt_ids) for each in batches.values() for b in each for text in b)
    static = static_options(longest + NEW_TOKENS, model.device.type)
    half = (perf_counter() + end) / 2
    names, left_out = warm_up(model, gpu_methods(static, rows), rows, longest, half)
    cells: list[list[Any]] = []
    for left, (suite, of_suite) in zip(range(len(batches), 0, -1), batches.items(), strict=True):
        if PLAIN not in names:
            break
        methods = {name: gpu_methods(static, rows)[name] for name in names}
        comparison = Comparison(model, lambda methods=methods: methods, do_sample=False)
        until = perf_counter() + (end - perf_counter()) / left
        for number, batch in enumerate(of_suite):
            if number and perf_counter() > until:
                break
            inputs, options = batch_of(model, batch)
            comparison.ask(inputs, **options)
        for name, calls in comparison.calls.items():
            faster = rate(calls) / rate(comparison.calls[PLAIN])
            mat, equal = comparison.mat(name) / rows, comparison.equal(name)
            figures = f"{rate(calls):.1f}", f"{faster:.2f}x", f"{mat:.2f}"
            cells.append([suite, name, *figures, f"{equal} of {len(calls)}"])
    torch.compiler.reset()  # or torch would compile the next number of rows for any number
    gc.collect()
    torch.cuda.empty_cache()
    return cells, left_out


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


def free_texts(data: Path, tokenizer: PreTrainedTokenizerBase) -> Texts:
    """Prompts that a trained model answers."""
    asked = taking_turns(spec_bench(data / "spec_bench_questions.jsonl"))
    return {
        "rag": llma_rag(data / "llma_rag.jsonl", tokenizer),
        "spec-bench": [RecordedAnswer(chat_ids(q.until(0, []), tokenizer), []) for q in asked],
    }


def main(arguments: list[str] | None = None) -> int:
    """Measures and writes the report; returns 1 if nothing was measured, 2 for bad options."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_bench", description="Measures on one NVIDIA GPU."
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="the data files, llama2-tokenizer among them")
    add("--out", type=Path, help="a new folder; default: benchmarks/<name of the GPU>")
    add("--model", help="a trained model that writes freely; default: the default model")
    add("--small", action="store_true", help="a tiny model, on the CPU if there is no GPU")
    args = parser.parse_args(arguments)
    began = perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.small:
        print("gpu_bench: torch sees no GPU; check the driver, or try --small", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name() if device == "cuda" else "small"
    out = args.out or Path(__file__).parent / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    try:
        tokenizer = load_tokenizer(str(args.data / "llama2-tokenizer"))
        forced = recorded_texts(args.data, tokenizer)
        out.mkdir(parents=True)
    except (OSError, ValueError) as error:
        print(f"gpu_bench: {error}", file=sys.stderr)
        return 2
    transformers.logging.set_verbosity_error()
    rs.warmup()
    size, dtype = ("tiny", torch.float32) if args.small else ("8B", torch.bfloat16)
    vocab_size = len(tokenizer) if args.small else max(VOCABULARY, len(tokenizer))
    sections: list[str] = []

    def section(model: Any, about: str, texts: Texts, rows: int, part: float) -> None:
        cells, left_out = measure(model, texts, rows, began + part * SECONDS)
        title = f"## {about}, {rows} {'texts' if rows > 1 else 'text'} at a time\n"
        sections.append("\n".join([title, table(COLUMNS, cells), *left_out]))

    try:
        model = random_model(size, vocab_size, device, dtype, ForcedLlama)
        section(model, f"random {size}, recorded answers", forced, 1, 0.5)
        del model
        if args.model or not args.small:
            model = load_model(args.model or rs.default_model(), device, dtype)
            texts = free_texts(args.data, load_tokenizer(args.model))
            for rows, part in ((1, 0.8), (4, 1.0)):
                section(model, Path(args.model or rs.default_model()).name, texts, rows, part)
    except KeyboardInterrupt:
        sections.append("stopped by ctrl-C")
    versions = f"{name}, torch {torch.__version__}, transformers {transformers.__version__}"
    report = "\n".join([f"# {versions}\n", *sections])
    (out / "report.md").write_text(report, encoding="utf-8")
    print(report)
    return 0 if "| auto |" in report else 1


if __name__ == "__main__":
    sys.exit(main())
