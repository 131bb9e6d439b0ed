"""Trains multi-token prediction layers on a Llama's own greedy texts, and saves both as one model.

    python benchmarks/train_head.py --out FOLDER [--model MODEL] [--layers N] [--minutes M]

For a third of the time the model writes questions and answers them, as in `distill.py`; the hidden
states of these passes are kept. One decoder layer and a projection then learn to tell the token
after the next one from a state and the next token, and the one after that from their own state,
and so on (EAGLE, arXiv 2401.15077, in the form of DeepSeek-V3's layers). The folder holds the model
and N copies of that layer: `load_with_head` opens it, for `generate(use_mtp=True)`.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from distill import frequent_tokens
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

from hf_refspec.apps.cli.arguments import positive
from hf_refspec.apps.shared.loading import load_model, load_tokenizer
from hf_refspec.smollm2 import default_model

ROWS, QUESTION_TOKENS, ANSWER_TOKENS = 64, 48, 192
# Learning compares an answer's tokens with the frequent ones and as many others, drawn anew.
VOCABULARY, OTHERS = 4096, 1024
TEXTS_OF_A_STEP, LEARNING_RATE, TEXTS_OF_THE_FIT = 8, 1e-3, 256


class Text(NamedTuple):
    """A question in the chat template and its greedy answer, as ids `(n,)`, and the target's last
    hidden states of all of them but the last, float16 `(n - 1, hidden_size)`."""

    ids: torch.Tensor
    question_length: int
    states: torch.Tensor


def load_with_head(folder: str | Path, **options: Any) -> PreTrainedModel:
    """A Llama with the layers that this script has trained, for `generate(use_mtp=True)`."""
    config = AutoConfig.from_pretrained(folder)
    layers = range(config.num_hidden_layers, config.num_hidden_layers + config.num_mtp_layers)
    names = [rf"model\.layers\.{layer}\." for layer in layers]
    found = type("LlamaForCausalLM", (LlamaForCausalLM,), {})
    found._keys_to_ignore_on_load_unexpected = names  # where transformers looks for such layers
    return found.from_pretrained(folder, **options).eval()


@torch.no_grad()
def written(model: Any, tokenizer: Any, seconds: float) -> list[Text]:
    """Questions of the model, its greedy answers, and its states."""
    began, texts = perf_counter(), []
    states: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_hook(
        lambda module, args, output: states.append(output.to(torch.float16))
    )
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
        states.clear()
        output = model.generate(**inputs, do_sample=False, max_new_tokens=ANSWER_TOKENS)
        length = inputs["input_ids"].shape[1]
        for i, mask in enumerate(inputs["attention_mask"].bool()):
            question, answer = output[i, :length][mask], output[i, length:]
            ends = (answer == tokenizer.eos_token_id).nonzero()
            ids = torch.cat((question, answer[: int(ends[0]) + 1 if len(ends) else None]))
            own = torch.cat([states[0][i][mask], *(state[i] for state in states[1:])])
            texts.append(Text(ids, len(question), own[: len(ids) - 1].clone()))
        print(f"{len(texts)} texts, {sum(len(text.ids) for text in texts)} tokens", flush=True)
    hook.remove()
    return texts


@torch.no_grad()
def head_of(model: Any, texts: list[Text]) -> Any:
    """One layer as transformers makes it for this model. It begins as the linear function of a
    state and the next token's embedding that is closest to the next state; the rest
    has the weights of the model's last layer, whose outputs begin at 0."""
    head = MtpModel(model, 1).float()
    layer = head.layers[0]
    layer.mtp_block.load_state_dict(model.model.layers[-1].state_dict())
    layer.mtp_block.self_attn.o_proj.weight.zero_()
    layer.mtp_block.mlp.down_proj.weight.zero_()
    norm = model.model.norm.weight.float()
    layer.post_norm.weight.copy_(norm)
    inputs, outputs = [], []
    for text in texts[:TEXTS_OF_THE_FIT]:
        states = text.states.float()
        embedded = head.embed_tokens(text.ids[1:-1])
        inputs.append(torch.cat((layer.enorm(embedded), layer.hnorm(states[:-1])), dim=-1))
        outputs.append(states[1:] / norm)
    a, b = torch.cat(inputs), torch.cat(outputs)
    ridge = 1e-2 * len(a) * torch.eye(a.shape[1])
    layer.eh_proj.weight.copy_(torch.linalg.solve(a.T @ a + ridge, a.T @ b).T)
    for shared in (head.embed_tokens, head.shared_head):
        shared.requires_grad_(False)
    return head


def drafted(head: Any, layers: int, text: Text) -> list[torch.Tensor]:
    """The states `(n, hidden_size)` from which each of the layers drafts, at each place of a
    text."""
    ids = text.ids[None]
    states = text.states[None].float()
    found = []
    for k in range(layers):
        ids = ids[:, 1:]
        states = states[:, : ids.shape[1]]
        places = torch.arange(k + 1, k + 1 + ids.shape[1])[None]
        states = head.forward_layer(0, states, places, None, input_ids=ids)
        found.append(states[0])
    return found


def train(
    head: Any, layers: int, texts: list[Text], tests: list[Text], seconds: float, save: Any
) -> None:
    """Lets the head learn the target's states and distributions; saves it every five minutes."""
    learning = [each for each in head.layers.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=LEARNING_RATE, betas=(0.9, 0.95))
    weight = head.shared_head.weight.detach().float()
    frequent = frequent_tokens(texts, VOCABULARY)
    scale = float(torch.cat([text.states for text in texts[:64]]).float().std())
    rng, saved = random.Random(0), 0.0
    began, step = perf_counter(), 0
    order: list[Text] = []
    while (spent := perf_counter() - began) < seconds:
        for group in optimizer.param_groups:  # up in 30 steps, then down to a twentieth
            left = 1 - 0.95 * spent / seconds
            group["lr"] = LEARNING_RATE * min(left, (step + 1) / 30)
        used = torch.cat((frequent, torch.randint(len(weight), (OTHERS,)))).unique()
        part = weight[used].to(torch.bfloat16)
        for _ in range(TEXTS_OF_A_STEP):
            if not order:
                order = rng.sample(texts, len(texts))
            text = order.pop()
            expected = text.states.to(torch.bfloat16)
            expected_logs = (expected @ part.T).float().log_softmax(dim=-1)
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.zeros(())
                for k, states in enumerate(drafted(head, layers, text)):
                    states, right = states[: len(expected) - 1 - k], expected[1 + k :].float()
                    logs = nn.functional.linear(states, part).float().log_softmax(dim=-1)
                    divergence = nn.functional.kl_div(
                        logs, expected_logs[1 + k :], reduction="sum", log_target=True
                    ) / len(logs)
                    distance = nn.functional.smooth_l1_loss(states / scale, right / scale)
                    loss = loss + 0.8**k * (divergence + distance)
            (loss / TEXTS_OF_A_STEP).backward()
        nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 50 == 0:
            print(
                f"step {step}, {spent:.0f} s, agrees {agreement(head, layers, tests)}", flush=True
            )
        if spent - saved > 300:
            saved = spent
            save()


@torch.no_grad()
def agreement(head: Any, layers: int, tests: list[Text]) -> str:
    """How often each layer drafts the answer's token, if all before it were right."""
    right, asked = [0] * layers, [0] * layers
    for text in tests:
        good = None
        for k, states in enumerate(drafted(head, layers, text)):
            first = max(text.question_length - 2 - k, 0)
            expected = text.ids[first + 2 + k :]
            same = head.shared_head(states[first : first + len(expected)]).argmax(-1) == expected
            same = same[: len(text.ids) - text.question_length - layers + 1]
            if good is None:
                good = torch.ones_like(same)
            asked[k] += int(good.sum())
            good = good & same[: len(good)]
            right[k] += int(good.sum())
    return " ".join(f"{r / max(a, 1):.3f}" for r, a in zip(right, asked, strict=True))


def save_with_head(model: Any, head: Any, layers: int, folder: Path) -> None:
    """Writes the model and its layers as DeepSeek-V3's checkpoints name them."""
    count = model.config.num_hidden_layers
    weights = dict(model.state_dict())
    weights.pop("lm_head.weight")  # the embeddings
    for k in range(layers):
        for name, weight in head.layers[0].state_dict().items():
            name = name.replace("mtp_block.", "").replace("post_norm", "shared_head.norm")
            weights[f"model.layers.{count + k}.{name}"] = weight.detach().clone()
    model.config.num_mtp_layers = layers
    model.config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main(arguments: list[str] | None = None) -> int:
    """Writes the model with its head into a new folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="a new folder")
    add("--model", help="a folder or a Hub id; default: SmolLM2-135M-Instruct")
    add("--layers", type=positive, default=3, metavar="N", help="tokens that the head drafts")
    add("--minutes", type=float, default=60.0, metavar="M")
    args = parser.parse_args(arguments)
    args.out.mkdir()
    torch.manual_seed(0)
    name = args.model or default_model()
    model, tokenizer = load_model(name, "cpu", torch.float32), load_tokenizer(name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = written(model, tokenizer, args.minutes * 20)
    torch.save(texts, args.out / "texts.pt")
    model.config.num_mtp_layers = args.layers
    head = head_of(model, texts[16:])
    model.generation_config.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)

    def save() -> None:
        save_with_head(model, head, args.layers, args.out)

    train(head, args.layers, texts[16:], texts[:16], args.minutes * 40, save)
    save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
