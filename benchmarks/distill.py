"""Distils a small draft model from a Llama's own greedy texts.

    python benchmarks/distill.py --out FOLDER [--model MODEL] [--layers N] [--minutes M]

The model writes questions (sampled, behind the beginning of its chat template) and answers them
greedily, for half of the time. A model of a few of its layers, with its embeddings, final norm and
output layer, then learns its distribution at each token of the answers. On a CPU an hour makes a
draft model of SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from fewer_layers import with_layers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_refspec.apps.cli.arguments import positive
from hf_refspec.apps.shared.loading import load_model, load_tokenizer
from hf_refspec.smollm2 import default_model

ROWS, QUESTION_TOKENS, ANSWER_TOKENS = 16, 64, 160
TEXTS_OF_A_STEP, LEARNING_RATE = 4, 5e-4


def question_start(tokenizer: PreTrainedTokenizerBase) -> str:
    """What a chat has before the user's first word."""
    chat = [{"role": "user", "content": "QUESTION"}]
    return tokenizer.apply_chat_template(chat, tokenize=False).partition("QUESTION")[0]


def written(model: Any, tokenizer: Any, seconds: float) -> list[list[int]]:
    """Questions and greedy answers of the model, as ids."""
    began, texts = perf_counter(), []
    tokenizer.padding_side = "left"
    start = tokenizer([question_start(tokenizer)] * ROWS, return_tensors="pt")
    while perf_counter() - began < seconds:
        sampled = model.generate(**start, do_sample=True, max_new_tokens=QUESTION_TOKENS)
        asked = tokenizer.batch_decode(
            sampled[:, start["input_ids"].shape[1] :], skip_special_tokens=True
        )
        chats = [[{"role": "user", "content": each.strip()}] for each in asked if each.strip()]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(chats, padding=True, **options)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=ANSWER_TOKENS)
        length = inputs["input_ids"].shape[1]
        for row, mask in zip(output, inputs["attention_mask"], strict=True):
            answer = tokenizer.decode(row[length:], skip_special_tokens=True)
            ended = tokenizer(answer, add_special_tokens=False)["input_ids"]
            texts.append(row[:length][mask.bool()].tolist() + ended)
        print(f"{len(texts)} texts, {sum(map(len, texts))} tokens", flush=True)
    return texts


def student_of(model: Any, layers: int) -> PreTrainedModel:
    """A model of layers from the first to the last, evenly, of which these alone will learn."""
    last = model.config.num_hidden_layers - 1
    places = torch.linspace(0, last, layers).round().int().tolist()
    student = copy.deepcopy(with_layers(model, places))
    student.requires_grad_(False)
    student.model.layers.requires_grad_(True)
    student.model.norm.requires_grad_(True)
    return student


def train(student: Any, teacher: Any, texts: list[list[int]], seconds: float) -> None:
    """Lets the student learn the teacher's distribution after each token."""
    learning = [each for each in student.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=LEARNING_RATE)
    began, step, rng = perf_counter(), 0, random.Random(0)
    while (spent := perf_counter() - began) < seconds:
        for group in optimizer.param_groups:  # down to a tenth
            group["lr"] = LEARNING_RATE * (1 - 0.9 * spent / seconds)
        loss, right = torch.zeros(()), 0.0
        for ids in rng.sample(texts, min(TEXTS_OF_A_STEP, len(texts))):
            inputs = torch.tensor([ids], device=teacher.device)
            with torch.no_grad():
                expected = teacher(inputs).logits[0].softmax(dim=-1)
            logits = student(inputs).logits[0]
            loss = torch.nn.functional.cross_entropy(logits, expected) / TEXTS_OF_A_STEP
            loss.backward()
            right += float((logits.argmax(-1) == expected.argmax(-1)).float().mean())
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}, {spent:.0f} s, agrees {right / TEXTS_OF_A_STEP:.2f}", flush=True)
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
    texts = written(model, tokenizer, args.minutes * 30)
    student = student_of(model, args.layers)
    train(student, model, texts, args.minutes * 30)
    student.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
