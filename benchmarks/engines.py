"""Tokens per second of the engines that a user of CPUs can choose between, with one model.

    python benchmarks/engines.py MODELS [--model NAME] [--dtype bfloat16] [--quantised] [--warm]

transformers decodes plainly, with its own prompt look-up and with `"auto"` of this package,
OpenVINO GenAI and llama.cpp plainly and with their own look-up: the same ids of the same prompts,
greedily, with two threads. Each lives in a process of its own, and they answer a prompt by turns.
For each kind of prompts processes start anew, so that their first calls count; with `--warm` they
answer all kinds, after prompts that do not count. No process has a prompt twice: OpenVINO and
llama.cpp keep what they have read. Ids are compared with those of transformers' plain decoding;
with `--quantised`, weights in 8 bits, with the same engine's plain ones. The package depends on no
other engine; those without their package or their form of the model in MODELS are skipped:

    pip install openvino-genai openvino-tokenizers torchao  # the last for --quantised
    CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python gguf
    optimum-cli export openvino --model NAME --task text-generation-with-past \\
        --weight-format fp32 MODELS/openvino-fp32           # and int8
    python llama.cpp/convert_hf_to_gguf.py NAME --outtype f32 \\
        --outfile MODELS/f32.gguf                           # and bf16, q8_0

`optimum-intel[openvino]` supports older versions of transformers, and may need an environment of
its own; llama.cpp's sources are `vendor/llama.cpp` in llama-cpp-python's source package.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
from suites import chat_ids, json_lines, table
from transformers import GenerationConfig

from hf_refspec import default_model, warmup
from hf_refspec.apps.shared.loading import load_tokenizer
from hf_refspec.apps.shared.prompts import user, with_document

THREADS = 2
LONGEST = 2048  # tokens of a prompt and its answer
BENCHMARKS = Path(__file__).parent
ROWS = {"edits": "edit", "code": "completion", "chat": "question"}  # of guard.jsonl
BEFORE = {"edits": "Return this code with the edit done.\n\n", "code": "Continue this code.\n\n"}
PAGES = ("choosing", "lossless", "limits", "faq")
PAGE = 3000  # characters that are read of a page
ABOUT_PAGES = "List what this page advises or promises, in its own words."
SHORT = {"float32": "f32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Setting:
    """One of [`ENGINES`], the model in its form, how it computes, and the ids that end a text."""

    engine: str
    model: str
    dtype: str
    quantised: bool
    ends: tuple[int, ...]
    drafts: bool


@dataclass(frozen=True)
class Answer:
    """An engine's ids, the seconds of the call and of its first token, the model's passes."""

    ids: list[int]
    seconds: float
    first: float
    passes: int


Ask: TypeAlias = Callable[[list[int], int], Answer]  # a prompt's ids, the most tokens to write
Prompts: TypeAlias = dict[str, list[list[int]]]  # by kind
Answers: TypeAlias = dict[Setting, list[Answer]]


def transformers(setting: Setting) -> Ask:
    """`generate`: plain, with transformers' look-up, or with `"auto"`."""
    import torch
    from transformers import AutoModelForCausalLM, BatchEncoding

    from hf_refspec.apps.bench.measure import BY_NAME, LOOK_UP_TOKENS
    from hf_refspec.apps.shared.comparison import decode

    class Streamer(list[float]):  # the times of the prompt and of tokens
        def put(self, _: object) -> None:
            self.append(perf_counter())

        def end(self) -> None:
            pass

    options: dict[str, Any] = {"dtype": setting.dtype}
    if setting.quantised:
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        options["quantization_config"] = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(setting.model, **options)
    method: dict[str, Any] = {"prompt_lookup_num_tokens": LOOK_UP_TOKENS} if setting.drafts else {}
    if setting.engine == "auto":
        method = {"candidate_generator": BY_NAME["auto"]()}

    def ask(prompt: list[int], tokens: int) -> Answer:
        ids = torch.tensor([prompt])
        inputs = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        options = {"max_new_tokens": tokens, "do_sample": False, "streamer": Streamer()}
        began = perf_counter()
        call = decode(model, inputs, **options, **method)
        return Answer(call.ids, call.seconds, options["streamer"][1] - began, call.passes)

    return ask


def openvino(setting: Setting) -> Ask:
    """OpenVINO GenAI; five draft tokens after three equal ones, as in its samples."""
    import openvino
    import openvino_genai

    precision = SHORT[setting.dtype]
    options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": THREADS}
    options |= {} if setting.quantised else {"KV_CACHE_PRECISION": precision}  # else 8 bits
    options |= {"prompt_lookup": True} if setting.drafts else {}
    pipeline = openvino_genai.LLMPipeline(setting.model, "CPU", **options)
    config = openvino_genai.GenerationConfig(stop_token_ids=set(setting.ends))
    if setting.drafts:
        config.num_assistant_tokens, config.max_ngram_size = 5, 3

    def ask(prompt: list[int], tokens: int) -> Answer:
        config.max_new_tokens, began = tokens, perf_counter()
        result = pipeline.generate(openvino.Tensor(np.array([prompt], np.int64)), config)
        seconds, metrics = perf_counter() - began, result.perf_metrics
        passes = 1 + len(metrics.raw_metrics.m_durations)  # the prompt's is not among them
        return Answer(list(result.tokens[0]), seconds, metrics.get_ttft().mean / 1000, passes)

    return ask


def llama_cpp(setting: Setting) -> Ask:
    """llama.cpp; two draft tokens, as llama-cpp-python advises for CPUs."""
    from gguf import GGMLQuantizationType
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    class Counted(Llama):
        passes = 0

        def eval(self, tokens: Sequence[int]) -> None:
            self.passes += 1
            super().eval(tokens)

    cache = int(GGMLQuantizationType[SHORT[setting.dtype].upper()])
    options = {} if setting.quantised else {"type_k": cache, "type_v": cache}  # else float16
    if setting.drafts:
        options |= {"draft_model": LlamaPromptLookupDecoding(num_pred_tokens=2), "logits_all": True}
    threads = {"n_threads": THREADS, "n_threads_batch": THREADS}
    model = Counted(setting.model, n_ctx=LONGEST, verbose=False, **threads, **options)

    def ask(prompt: list[int], tokens: int) -> Answer:
        ids: list[int] = []
        times: list[float] = []
        before = model.passes
        began = perf_counter()
        for token in model.generate(prompt, temp=0):
            ids.append(token)
            times.append(perf_counter() - began)
            if token in setting.ends or len(ids) == tokens:
                break
        return Answer(ids, times[-1], times[0], model.passes - before)

    return ask


# What loads an engine; its packages and the names of its models, without and with 8 bits.
HF = transformers, ("transformers", "torchao"), ("", "")
OPENVINO = openvino, ("openvino-genai",) * 2, ("openvino-fp32", "openvino-int8")
LLAMA = llama_cpp, ("llama-cpp-python",) * 2, ("{}.gguf", "q8_0.gguf")
ENGINES = {"transformers": HF, "transformers-look-up": HF, "auto": HF, "openvino": OPENVINO}
ENGINES |= {"openvino-look-up": OPENVINO, "llama.cpp": LLAMA, "llama.cpp-look-up": LLAMA}


def worker(setting: Setting) -> None:
    """Answers the prompts of the standard input; what engines print goes to the standard error."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        ask = ENGINES[setting.engine][0](setting)
        print("loaded", file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps(asdict(ask(*json.loads(line)))), file=out, flush=True)


def measured(settings: list[Setting], asked: Prompts, tokens: int) -> dict[str, Answers]:
    """The answers of new processes, one for each setting, kind after kind."""
    order, pipe = random.Random(0), subprocess.PIPE
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
    pipes: Any = {"stdin": pipe, "stdout": pipe, "text": True, "env": environment}
    with ExitStack() as stack:
        engines = {}
        for setting in settings:
            command = [sys.executable, __file__, "--worker", json.dumps(asdict(setting))]
            engines[setting] = stack.enter_context(subprocess.Popen(command, **pipes))

        def answers(prompts: list[list[int]]) -> Answers:
            found: Answers = {setting: [] for setting in settings}
            for prompt in prompts:
                for setting in order.sample(settings, len(settings)):
                    print(json.dumps([prompt, tokens]), file=engines[setting].stdin, flush=True)
                    found[setting].append(Answer(**json.loads(engines[setting].stdout.readline())))
                    print(setting.engine, found[setting][-1], file=sys.stderr)
            return found

        for engine in engines.values():
            engine.stdout.readline()  # it is loaded
        return {kind: answers(prompts) for kind, prompts in asked.items()}


def messages(model: str) -> Prompts:
    """The ids of a message of the user each, by kind."""
    rows, tokenizer = json_lines(BENCHMARKS / "guard.jsonl"), load_tokenizer(model)
    texts = {
        kind: [BEFORE.get(kind, "") + row["prompt"] for row in rows if row["kind"] == named]
        for kind, named in ROWS.items()
    }
    pages = [(BENCHMARKS.parent / "docs" / f"{name}.md").read_text()[:PAGE] for name in PAGES]
    texts["documents"] = [with_document(page, ABOUT_PAGES) for page in pages]
    return {kind: [chat_ids([user(t)], tokenizer) for t in texts[kind]] for kind in texts}


def rate(answers: list[Answer], of: str) -> float:
    """The tokens of several calls together, per second or pass."""
    return sum(len(each.ids) for each in answers) / sum(getattr(each, of) for each in answers)


def row(found: dict[str, Answers], setting: Setting, plain: Setting) -> list[str]:
    """A line of the table."""
    family, settings = ENGINES[setting.engine], next(iter(found.values()))
    own = [each for each in settings if each.quantised and ENGINES[each.engine] is family]
    cells, pairs = [], []
    for answers in found.values():
        mine, once = rate(answers[setting], "seconds"), rate(answers[plain], "seconds")
        cells.append(f"{mine:.1f}, {mine / once:.2f}x, {rate(answers[setting], 'passes'):.2f}")
        wanted = answers[own[0] if setting.quantised else plain]
        pairs += zip(answers[setting], wanted, strict=True)
    first = statistics.median(answer.first for answer, _ in pairs)
    equal = sum(answer.ids == other.ids for answer, other in pairs)
    name = setting.engine + ", int8" * setting.quantised
    return [name, *cells, f"{first:.2f} s", f"{equal} of {len(pairs)}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("models", type=Path, help="the folder of other engines' forms of the model")
    add("--model", help="a folder; default SmolLM2-135M-Instruct")
    add("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    add("--dtype", choices=SHORT, default="float32")
    add("--quantised", action="store_true", help="compare weights in 8 bits")
    add("--warm", action="store_true", help="measure processes that have answered before")
    add("--prompts", type=int, default=3, choices=(1, 2, 3), help="of each kind")
    add("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()
    model = args.model or default_model()
    ends = GenerationConfig.from_pretrained(model).eos_token_id
    ends = tuple(ends if isinstance(ends, list) else [ends])
    plain = Setting("transformers", model, args.dtype, False, ends, False)
    settings = {plain: None}
    for engine in args.engines:
        package, form = (names[args.quantised] for names in ENGINES[engine][1:])
        path = args.models / form.format(SHORT[args.dtype]) if form else Path(model)
        try:
            path.stat(), print(engine, package, version(package))
        except (OSError, PackageNotFoundError) as error:
            print(f"{engine} is skipped: {error}")
            continue
        drafts = engine.endswith("look-up")
        settings[Setting(engine, str(path), args.dtype, args.quantised, ends, drafts)] = None
    warmup()  # kernels are compiled once, not by each process
    asked = messages(model)
    unasked = [prompt for prompts in asked.values() for prompt in prompts[3:]]
    asked = {kind: prompts[: args.prompts] for kind, prompts in asked.items()}
    found: dict[str, Answers] = {}
    for kinds in [{"": unasked, **asked}] if args.warm else [{kind: asked[kind]} for kind in asked]:
        found |= measured(list(settings), kinds, args.max_new_tokens)
    found.pop("", None)
    rows = [row(found, setting, plain) for setting in settings]
    print(table([args.dtype, *found, "first token", "equal ids"], rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Setting(**json.loads(sys.argv[2])))
    else:
        main()
