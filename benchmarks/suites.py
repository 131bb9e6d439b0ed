"""Shared by benchmarks: recorded answers of published files, random models, tables.

Run as a script it measures the README's table: the default drafter against plain decoding of
SmolLM2-135M-Instruct, in about six minutes on two cores.

    OMP_NUM_THREADS=2 python benchmarks/suites.py --data DATA
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from hf_refspec.apps.bench.measure import Chat, read_chats
from hf_refspec.apps.shared.comparison import UNDRAFTED, Comparison, Methods
from hf_refspec.apps.shared.loading import load_model, load_tokenizer
from hf_refspec.apps.shared.prompts import chat_inputs, user
from hf_refspec.drafting.auto import default_sources
from hf_refspec.drafting.blend import Blend

_CHARACTERS = 3200  # of a message: longer ones take minutes to read
CHAT = {"writing", "roleplay", "reasoning", "extraction", "stem", "humanities"}  # of Spec-Bench
RANDOM_TEXTS, RANDOM_PROMPT, RANDOM_ANSWER = 20, 512, 128
# Hidden size, intermediate size, layers, attention heads, key-value heads, as SmolLM2-135M,
# Qwen2.5-0.5B, Llama 3.2 1B and 3B, LLaMA 7B, Llama 3.1 8B, LLaMA 13B and 30B have them; embedding
# and output layers depend on the vocabulary. "tiny" is for forced texts.
SIZES = {
    "tiny": (16, 16, 1, 1, 1),
    "0.1B": (576, 1536, 30, 9, 3),
    "0.5B": (896, 4864, 24, 14, 2),
    "1B": (2048, 8192, 16, 32, 8),
    "3B": (3072, 8192, 28, 24, 8),
    "7B": (4096, 11008, 32, 32, 32),
    "8B": (4096, 14336, 32, 32, 8),
    "13B": (5120, 13824, 40, 40, 40),
    "30B": (6656, 17920, 60, 52, 52),
}


@dataclass(frozen=True)
class RecordedAnswer:
    """A prompt and the recorded answer to it, as token ids. The answer ends with EOS; `references`
    are the documents that the prompt contains."""

    prompt_ids: list[int]
    answer_ids: list[int]
    references: list[list[int]] | None = None


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, compressed if its name ends in `.gz`."""
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    return [json.loads(line) for line in content.splitlines()]


def llma_rag(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[RecordedAnswer]:
    """The prompts and answers of LLMA's files (arXiv 2304.04487, 3.1): of rag.jsonl davinci-003's.

    In cnndm.jsonl the query holds its document, and is the prompt. References end after 768 tokens,
    as in the authors' code. Where the tokenizer has a chat template, a prompt is a message of the
    user.
    """
    answers = []
    for row in json_lines(path):
        query, answer, docs = row["query"], row["result"]["text"], row["docs"]
        prompt = "docs:\n" + "\n".join(docs) + f"\nquery: {query}\nanswer:"
        prompt = query if all(doc in query for doc in docs) else prompt
        references = [ids[:768] for ids in tokenizer(docs, add_special_tokens=False)["input_ids"]]
        if tokenizer.chat_template is None:
            ids = recorded(prompt, answer, tokenizer)
            answers.append(RecordedAnswer(ids.prompt_ids, ids.answer_ids, references))
        else:
            closed = answer_ids(answer.lstrip(), tokenizer)
            answers.append(RecordedAnswer(chat_ids([user(prompt)], tokenizer), closed, references))
    return answers


def humaneval(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[RecordedAnswer]:
    """The problems of HumanEval with their canonical solutions, as REST measures (section 4.1)."""
    rows = json_lines(path)
    return [recorded(row["prompt"], row["canonical_solution"], tokenizer) for row in rows]


def mt_bench(
    path: Path, questions: Path, tokenizer: PreTrainedTokenizerBase
) -> list[RecordedAnswer]:
    """Answers to MT-bench in FastChat's form, which REST's repository has of Vicuna 7B, each turn
    behind the earlier ones. The questions are among Spec-Bench's."""
    turns = {row["question_id"]: row["turns"] for row in json_lines(questions)}
    chats = []
    for row in json_lines(path):
        answers = [text.removesuffix("</s>") for text in row["choices"][0]["turns"]]
        chats.append(Chat(turns[row["question_id"]], answers))
    return [each for chat in chats for each in recorded_turns(chat, tokenizer)]


def recorded(prompt: str, answer: str, tokenizer: PreTrainedTokenizerBase) -> RecordedAnswer:
    """Tokenizes prompt and answer as one text, as a model would have continued it."""
    prompt_ids = tokenizer(prompt, verbose=False)["input_ids"]
    ids = tokenizer(prompt + answer, verbose=False)["input_ids"]
    if ids[: len(prompt_ids)] != prompt_ids:  # a token would span the border
        ids = prompt_ids + tokenizer(answer, add_special_tokens=False)["input_ids"]
    return RecordedAnswer(prompt_ids, [*ids[len(prompt_ids) :], tokenizer.eos_token_id])


def spec_bench(path: Path) -> list[Chat]:
    """The questions of Spec-Bench (arXiv 2401.07851), with its references as `answers`, or none if
    a turn has no reference."""
    return [
        chat
        if len(chat.answers) == len(chat.turns) and all(map(str.strip, chat.answers))
        else Chat(chat.turns, [], category=chat.category)
        for chat in read_chats(path)
    ]


def recorded_turns(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> list[RecordedAnswer]:
    """Each turn, behind the earlier ones and their recorded answers."""
    return [
        RecordedAnswer(
            chat_ids(chat.until(turn, chat.answers), tokenizer), answer_ids(text, tokenizer)
        )
        for turn, text in enumerate(chat.answers)
    ]


def chat_ids(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a chat up to where the model answers."""
    if tokenizer.chat_template is None:
        return tokenizer("".join(f"{each['content']}\n\n" for each in messages))["input_ids"]
    return chat_inputs(tokenizer, messages)["input_ids"][0].tolist()


def answer_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of an answer, with EOS."""
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def random_texts(tokenizer: PreTrainedTokenizerBase) -> list[RecordedAnswer]:
    """Random tokens, which hardly repeat: the worst case for a drafter."""
    special = set(tokenizer.all_special_ids)
    ordinary = [token for token in range(len(tokenizer)) if token not in special]
    rng = np.random.default_rng(0)
    texts = rng.choice(ordinary, (RANDOM_TEXTS, RANDOM_PROMPT + RANDOM_ANSWER)).tolist()
    return [RecordedAnswer(ids[:RANDOM_PROMPT], ids[RANDOM_PROMPT:]) for ids in texts]


def random_model(
    size: str,
    vocab_size: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    kind: type[LlamaForCausalLM] = LlamaForCausalLM,
) -> Any:
    """A Llama of one of [`SIZES`] with random weights, always the same, created on its device."""
    hidden, intermediate, layers, heads, key_value_heads = SIZES[size]
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=2**17,
    )
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        return kind._from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def table(columns: list[Any], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def tasks(data: Path, count: int) -> dict[str, list[str]]:
    """Messages of the user for each row of the README's table, `count` of each."""
    problems = json_lines(data / "HumanEval.jsonl.gz")
    questions = spec_bench(data / "spec_bench_questions.jsonl")
    code = [f"```python\n{row['prompt']}{row['canonical_solution']}```" for row in problems]
    found = {
        "code edits": [f"Write this code again with a comment above each line:\n{c}" for c in code],
        "HumanEval": [f"Complete this function:\n{row['prompt']}" for row in problems],
        "documents": [
            "\n".join([*row["docs"], row["query"]]) for row in json_lines(data / "llma_rag.jsonl")
        ],
        "summaries": [each.turns[0] for each in questions if each.category == "summarization"],
        "chat": [each.turns[0] for each in questions if each.category in CHAT],
    }
    short = {name: [t for t in texts if len(t) <= _CHARACTERS] for name, texts in found.items()}
    return {name: texts[:: len(texts) // count][:count] for name, texts in short.items()}


def main() -> int:
    """Prints the README's table; returns 1 if a float32 text differs from plain decoding's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="see benchmarks/README.md")
    parser.add_argument("--texts", type=int, default=5, help="of each task")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()
    tokenizer = load_tokenizer()
    asked = tasks(args.data, args.texts)
    cells: dict[str, list[str]] = {name: [name] for name in asked}
    differing = 0
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(dtype=dtype, device_map="cpu")

        def methods() -> Methods:
            return {UNDRAFTED: {}, "auto": {"candidate_generator": Blend(default_sources())}}

        for name, messages in asked.items():
            comparison = Comparison(
                model, methods, do_sample=False, max_new_tokens=args.max_new_tokens
            )
            if name == next(iter(asked)):  # what it finds stays with the model
                comparison.warm_up()
            for message in messages:
                comparison.ask(chat_inputs(tokenizer, [user(message)]))
            gain = comparison.gain("auto")
            pairs = zip(comparison.calls[UNDRAFTED], comparison.calls["auto"], strict=True)
            worst = min(drafted.rate / plain.rate for plain, drafted in pairs)
            spread = f"{gain.ratio:.2f}x ({gain.low:.2f}x to {gain.high:.2f}x)"
            cells[name] += [f"{comparison.total('auto').mat:.2f}", spread, f"{worst:.2f}x"]
            print(dtype, *cells[name], file=sys.stderr, flush=True)
            if dtype == torch.float32:
                differing += len(messages) - comparison.equal("auto")
    figures = ("MAT", "speed-up (90 % interval)", "worst text")
    columns = [f"{kind}: {each}" for kind in ("float32", "bfloat16") for each in figures]
    print(table(["task", *columns], cells.values()), end="")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
