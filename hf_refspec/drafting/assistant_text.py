"""A text as a draft model reads it."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache, DynamicLayer, PreTrainedModel

from ..transformers_names import CACHE_NAME, supports_logits_to_keep
from .token_ids import common_length


class AssistantText:
    """A text as an assistant reads it, with a key-value cache of its own.

    A pass first removes rejected tokens from the cache, and reads the tokens that are not there. It
    computes the logits of a `vocabulary` alone, ids in increasing order, if there is one."""

    pass_tokens = 0  # the number of tokens that the last pass read

    def __init__(self, assistant: PreTrainedModel, vocabulary: np.ndarray | None = None) -> None:
        self._assistant = assistant
        self._vocabulary = vocabulary
        if vocabulary is not None:
            layer = assistant.get_output_embeddings()
            ids = torch.from_numpy(vocabulary).to(layer.weight.device)
            bias = None if layer.bias is None else layer.bias.detach()[ids]
            self._output_layer = layer.weight.detach()[ids], bias
        # Without a configuration it keeps all positions, even those past a sliding window, so that
        # it can always go back.
        self._cache = DynamicCache()
        self._read = np.empty(0, dtype=np.int64)  # what the cache holds
        self._has_dropout = any(module.training for module in assistant.modules())

    @torch.no_grad()
    def read(self, ids: np.ndarray, count: int) -> torch.Tensor:
        """The logits `(1, count, vocab_size)` after each of the last `count` > 0 ids of a text,
        int64 of shape `(n,)`."""
        kept = min(common_length(self._read, ids), len(ids) - count)
        if kept < len(self._read):
            self._cache.crop(kept - len(self._read))
        self._read = ids
        self.pass_tokens = len(ids) - kept
        assistant = self._assistant
        last: dict[str, int] = {}
        if self._vocabulary is None and supports_logits_to_keep(assistant):
            last = {"logits_to_keep": count}
        model = assistant if self._vocabulary is None else assistant.base_model
        new_ids = torch.from_numpy(ids[kept:])[None]
        device = assistant.device
        if device.type == "meta":  # offloaded: its hooks move what it reads
            device = new_ids.device
        # Dropout must not use up the random numbers of a call that samples.
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices) if self._has_dropout else nullcontext():
            output = model(
                input_ids=new_ids.to(device, non_blocking=True),
                attention_mask=torch.ones((1, len(ids)), dtype=torch.int64, device=device),
                **{CACHE_NAME: self._cache},
                use_cache=True,
                return_dict=True,
                **last,
            )
        if self._vocabulary is not None:
            states = output.last_hidden_state[:, -count:].to(self._output_layer[0].device)
            return nn.functional.linear(states, *self._output_layer)
        logits: torch.Tensor = output.logits[:, -count:]
        return logits

    def keeps_keys(self) -> bool:
        """Whether the model has put the keys of each token into the cache, and nothing else."""
        layers = self._cache.layers
        attends = bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
        return attends and self._cache.get_seq_length() == len(self._read)
