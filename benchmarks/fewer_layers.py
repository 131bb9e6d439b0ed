"""A Llama with some of the layers of another one."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence

from transformers import LlamaForCausalLM


def with_layers(model: LlamaForCausalLM, layers: Sequence[int]) -> LlamaForCausalLM:
    """The model with these layers alone, before its final norm and output layer: with the first
    ones, an early exit. The weights are the model's own."""
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
