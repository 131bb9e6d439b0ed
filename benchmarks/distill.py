"""Distils a small draft model from a Llama's own greedy texts.

    python benchmarks/distill.py --out FOLDER [--model MODEL] [--layers N] [--minutes M]

For half of the time the model writes questions (sampled, behind the beginning of its chat template)
and answers them greedily. A model of a few of its layers, with its embeddings, final norm and
output layer, then learns to give the same answers. It drafts only their most frequent tokens, which
`vocabulary.npy` lists: `DraftModel(assistant, vocabulary=...)`. An hour on a CPU is enough for
SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from draft_models import with_layers
from transformers import PreTrainedModel

from hf_refspec.apps.cli.arguments import positive
from hf_refspec.apps.shared.loading import load_model, load_tokenizer
from hf_refspec.smollm2 import default_model

ROWS, QUESTION_TOKENS, ANSWER_TOKENS = 64, 64, 160
VOCABULARY = 8192
TEXTS_OF_A_STEP, LEARNING_RATE = 8, 1e-3


class Text(NamedTuple):
    """A question in the chat template, and its greedy answer behind it, as ids."""

    ids: torch.Tensor
    question_length: int


def written(model: Any, tokenizer: Any, seconds: float) -> list[Text]:
    """Questions of the model, and its greedy answers."""
    began, texts = perf_counter(), []
    tokenizer.padding_side = "left"
    chat = [{"role": "user", "content": "QUESTION"}]
    before = tokenizer.apply_chat_template(chat, tokenize=False).partition("QUESTION")[0]
    start = tokenizer([before] * ROWS, return_tensors="pt").to(model.device)
    while perf_counter() - began < seconds:
        sampled = model.generate(**start, do_sample=True, max_new_tokens=QUESTION_TOKENS)
        asked = tokenizer.batch_decode(
            sampled[:, start["input_ids"].shape[1] :], skip_special_tokens=True
        )
        chats = [[{"role": "user", "content": each.strip()}] for each in asked if each.strip()]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(chats, padding=True, **options).to(model.device)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=ANSWER_TOKENS)
        length = inputs["input_ids"].shape[1]
        for row, mask in zip(output, inputs["attention_mask"], strict=True):
            question, answer = row[:length][mask.bool()], row[length:]
            ends = (answer == tokenizer.eos_token_id).nonzero()
            answer = answer[: int(ends[0]) + 1 if len(ends) else None]
            texts.append(Text(torch.cat((question, answer)), len(question)))
        print(f"{len(texts)} texts, {sum(len(text.ids) for text in texts)} tokens", flush=True)
    return texts


def frequent_tokens(texts: list[Text], count: int) -> torch.Tensor:
    """The most frequent tokens of the answers, in the order of their ids."""
    counts = torch.cat([text.ids[text.question_length :] for text in texts]).bincount()
    frequent = counts.topk(min(count, int((counts > 0).sum()))).indices
    return frequent.sort().values


def student_of(model: Any, layers: int) -> PreTrainedModel:
    """A model of evenly chosen layers, which learn together with the norm and nothing else."""
    last = model.config.num_hidden_layers - 1
    places = torch.linspace(0, last, layers).round().int().tolist()
    student = copy.deepcopy(with_layers(model, places))
    student.requires_grad_(False)
    student.model.layers.requires_grad_(True)
    student.model.norm.requires_grad_(True)
    return student


def train(student: Any, texts: list[Text], vocabulary: torch.Tensor, seconds: float) -> None:
    """Lets the student learn those tokens of the answers that the vocabulary has."""
    learning = [each for each in student.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=LEARNING_RATE)
    head = student.lm_head.weight[vocabulary]
    places = torch.full((student.config.vocab_size,), -100, device=student.device)
    places[vocabulary] = torch.arange(len(vocabulary), device=student.device)
    began, step, rng = perf_counter(), 0, random.Random(0)
    while (spent := perf_counter() - began) < seconds:
        for group in optimizer.param_groups:  # down to a tenth
            group["lr"] = LEARNING_RATE * (1 - 0.9 * spent / seconds)
        right = asked = 0
        for ids, length in rng.sample(texts, min(TEXTS_OF_A_STEP, len(texts))):
            states = student.model(ids[None]).last_hidden_state[0, length - 1 : -1]
            logits, expected = states @ head.T, places[ids[length:]]
            loss = torch.nn.functional.cross_entropy(logits, expected, reduction="sum")
            (loss / (ANSWER_TOKENS * TEXTS_OF_A_STEP)).backward()
            right += int((logits.argmax(-1) == expected).sum())
            asked += len(expected)
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}, {spent:.0f} s, agrees {right / asked:.2f}", flush=True)
        step += 1


def main(arguments: list[str] | None = None) -> int:
    """Writes the draft model into a new folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="a new folder")
    add("--model", help="a folder or a Hub id; default: SmolLM2-135M-Instruct")
    add("--layers", type=positive, default=2, metavar="N", help="of the draft model")
    add("--minutes", type=float, default=60.0, metavar="M")
    args = parser.parse_args(arguments)
    args.out.mkdir()
    torch.manual_seed(0)
    name = args.model or default_model()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(name, device, torch.float32), load_tokenizer(name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    student = student_of(model, args.layers)
    texts = written(model.to(torch.bfloat16), tokenizer, args.minutes * 30)
    vocabulary = frequent_tokens(texts, VOCABULARY)
    train(student, texts, vocabulary, args.minutes * 30)
    student.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    np.save(args.out / "vocabulary.npy", vocabulary.numpy(force=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
