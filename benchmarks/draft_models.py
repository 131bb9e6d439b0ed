"""Draft models beside and together with look-up: MAT and speed of each alone, and of both.

    python benchmarks/draft_models.py --prompts FILE [--assistants NAME ...] [--temperature T]

answers prompts (as `hf-refspec bench` reads them) by turns: plainly, by look-up, and for each
assistant by transformers' own assisted generation, `DraftModel` alone, and `DraftModel` with
look-up. An assistant is `layers-N`, the model's own first N layers as early exit; `bfloat16`, the
model itself in that type; or a folder or a Hub id of a model with the same tokenizer. With a folder
of `distill.py`, `DraftModel` drafts the tokens of `vocabulary.npy` alone.

Sampled calls (`--temperature`) have a seed for each prompt, and a table of how often the target
accepts the first token of a draft.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from hf_refspec.apps.bench.measure import read_chats, taking_turns
from hf_refspec.apps.cli.arguments import add_model, positive
from hf_refspec.apps.shared.comparison import UNDRAFTED, Comparison, Methods, figure_table
from hf_refspec.apps.shared.loading import load_model, load_tokenizer
from hf_refspec.apps.shared.prompts import chat_inputs
from hf_refspec.apps.shared.streams import Terminal
from hf_refspec.drafting.auto import default_sources
from hf_refspec.drafting.blend import Blend
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.contract import Call, Observation, Sampling
from hf_refspec.drafting.draft_model import DraftModel
from hf_refspec.generation.row import ColumnNoise
from hf_refspec.text_config import text_config

ASSISTANTS = ("layers-10", "layers-15", "layers-20", "bfloat16")


def with_layers(model: LlamaForCausalLM, layers: Sequence[int]) -> LlamaForCausalLM:
    """The model with these layers alone, and its own weights: with the first layers, an early
    exit."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[layer] for layer in layers]
    places = {layer: place for place, layer in enumerate(layers)}
    weights = {}
    for name, weight in model.state_dict().items():
        found = re.fullmatch(r"(model\.layers\.)(\d+)(\..*)", name)
        if found is None:
            weights[name] = weight
        elif int(found[2]) in places:
            weights[f"{found[1]}{places[int(found[2])]}{found[3]}"] = weight
    smaller = type(model)(config).to(model.device)
    smaller.load_state_dict(weights, assign=True)
    smaller.tie_weights()
    smaller.generation_config = copy.deepcopy(model.generation_config)
    return smaller.eval()


def assistant_of(model: Any, name: str) -> PreTrainedModel:
    """An assistant by its name."""
    if name.startswith("layers-"):
        return with_layers(model, range(int(name.removeprefix("layers-"))))
    if name == "bfloat16":
        return copy.deepcopy(model).to(torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(name, dtype=model.dtype).to(model.device).eval()


def draft_model(model: Any, name: str) -> DraftModel:
    """A drafter by its assistant's name."""
    tokens = Path(name, "vocabulary.npy")
    vocabulary = np.load(tokens) if tokens.exists() else None
    return DraftModel(assistant_of(model, name), vocabulary=vocabulary)


def _noise(noise: ColumnNoise, vocab_size: int, place: int, ahead: int) -> torch.Tensor:
    return noise.of(0, place + ahead, vocab_size)


@torch.no_grad()
def acceptance(comparison: Comparison, drafter: DraftModel, temperature: float) -> list[str]:
    """How often the first token of a draft is accepted, at each place of plain decoding's texts:
    the most probable one; in rejection sampling, in expectation; the best and any of 4 nodes."""
    model, counts, tokens = comparison.model, np.zeros(4), 0
    vocab_size, sampling = text_config(model).vocab_size, Sampling(temperature)
    for seed, (prompt, call) in enumerate(
        zip(comparison.prompts, comparison.calls[UNDRAFTED], strict=True)
    ):
        ids = torch.tensor([prompt + call.ids], device=model.device)
        target, own = (
            each(ids).logits[0, len(prompt) - 1 : -1].float().div(temperature).softmax(dim=-1)
            for each in (model, drafter.assistant)
        )
        tokens += len(call.ids)
        counts[0] += int((own.argmax(dim=-1) == ids[0, len(prompt) :]).sum())
        counts[1] += float(torch.minimum(target, own).sum())
        torch.manual_seed(seed)
        noise = ColumnNoise(1, ids.device)
        with drafter_call(drafter, [np.array(prompt)], vocab_size) as drafters:
            for place, token in enumerate(call.ids):
                options = Call(sampling, noise=partial(_noise, noise, vocab_size, place))
                draft = drafters[0].draft(4, options)
                first = draft.tokens[draft.parents < 0]
                counts[2:] += first[0] == token, token in first
                drafters[0].observe(Observation(np.array([token])))
    return [f"{each:.3f}" for each in counts / tokens]


def main(arguments: list[str] | None = None) -> int:
    """Measures all methods; returns 1 if ids differ in float32."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--prompts", type=Path, required=True, metavar="FILE")
    add_model(parser)
    add("--assistants", nargs="+", default=ASSISTANTS, metavar="NAME")
    add("--limit", type=positive, default=13, metavar="N", help="first turns; 13 by default")
    add("--max-new-tokens", type=positive, default=64, metavar="N")
    add("--temperature", type=float, metavar="T", help="samples; greedy by default")
    args = parser.parse_args(arguments)
    tokenizer = load_tokenizer(args.model)
    chats = taking_turns(read_chats(args.prompts))[: args.limit]
    model = load_model(args.model, args.device_map, args.dtype)
    drafters = {Path(name).name: draft_model(model, name) for name in args.assistants}

    def methods() -> Methods:
        found: dict[str, dict[str, Any]] = {
            UNDRAFTED: {},
            "look-up": {"candidate_generator": Blend(default_sources())},
        }
        for name, drafter in drafters.items():
            alone, other = copy.deepcopy(drafter), copy.deepcopy(drafter)
            if args.temperature is None:  # sampled, its texts are others
                assisted = {"assistant_model": drafter.assistant}
                found[f"transformers' assisted, {name}"] = assisted
            found |= {
                f"DraftModel, {name}": {"candidate_generator": alone},
                f"both, {name}": {"candidate_generator": Blend([*default_sources(), other])},
            }
        return found

    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    if args.temperature is not None:
        options |= {"do_sample": True, "temperature": args.temperature, "top_k": 0}
    comparison = Comparison(model, methods, **options)
    comparison.warm_up()
    for chat in chats:
        comparison.ask(chat_inputs(tokenizer, chat.until(0, [])).to(model.device))
    if args.temperature is not None:
        table = figure_table(
            "first token accepted", "likeliest", "rejection", "drafted", "any of 4"
        )
        for name, drafter in drafters.items():
            table.add_row(name, *acceptance(comparison, drafter, args.temperature))
        Terminal().print(table)
    return comparison.report(Terminal())


if __name__ == "__main__":
    sys.exit(main())
