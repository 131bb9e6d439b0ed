"""Verification: one forward pass of the target model over a draft, with the cache kept in step.

A [`Verification`] lives for one call of `generate`. Each step it takes the ids so far and a draft
tree, returns the target's logits after the last accepted token and after every draft node, and is
then told which nodes were accepted. Three ways to do it:

- [`TreeVerification`]: all branches at once, under a 4D mask that shows each node its ancestors.
- [`ChainVerification`]: one path under the model's own causal mask; what was rejected is cropped
  from the cache. It works with sliding windows, ALiBi and FlashAttention.
- [`RecurrentVerification`]: one path as well, for caches that cannot be cropped because they hold a
  running state. The state from before the draft is restored, and the accepted tokens are run again
  together with the next draft, so that a rejection costs no forward pass of its own.

Which of them is exact on a model is asked of the model itself, see `probe.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionCacheLayerMixin

from ..drafting.tree import DraftTree
from .positions import length_dependent_rope

# The names under which transformers' models take their cache.
CACHE_NAMES = ("past_key_values", "cache_params")


# Names in a configuration of what limits attention to some of the positions.
LOCAL_ATTENTION = (
    "sliding_window",
    "window_size",
    "attention_window_size",
    "attention_chunk_size",
    "index_topk",
)


def find_cache(values: Mapping[str, Any]) -> Cache | None:
    """The cache among the arguments or outputs of a forward pass, if it is a `Cache`."""
    caches = (values.get(name) for name in CACHE_NAMES)
    return next((cache for cache in caches if isinstance(cache, Cache)), None)


class Verification:
    """Forward passes of one target model during one call of `generate`, batch size 1.

    Args:
        model (`PreTrainedModel`): The target model.
        generation_config (`GenerationConfig`): The call's own; read by the prefill.
        model_kwargs (`dict`): Keyword arguments of the forward pass as `generate` prepared them.
            They always describe all ids so far, also those that the cache does not hold yet.
    """

    name: str
    takes_trees = False

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.model = model
        self.generation_config = generation_config
        self.model_kwargs = model_kwargs
        cache = find_cache(model_kwargs)
        assert cache is not None, "select_verification() asks supports() first"
        self.cache = cache
        # Tokens at the end of the ids that the cache does not hold: the last one, or more of them
        # where a recurrent state had to be restored.
        self.pending = 1
        # The position of the last token. It is not the length: padding has no position, and a
        # given cache may hold tokens that the ids lack.
        self.last_position = 0
        # Whether the model has begun a new cache in the middle of the text. It may then do so at
        # every step, as Phi-3 does in transformers 5.17, and nothing can be drafted any more.
        self.restarted = False

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        """Whether this way may be tried at all with this model and this cache."""
        raise NotImplementedError

    def prefill(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Runs the prompt, `(1, prompt_length)`, through the model as `generate` does.

        Returns:
            `torch.Tensor` of shape `(1, vocab_size)`: the logits after the last token.
        """
        outputs = self.model._prefill(input_ids, self.generation_config, self.model_kwargs)
        self.model_kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self.model_kwargs
        )
        self._adopt_cache(outputs)
        self.last_position = self._position_after_prefill(input_ids)
        return outputs.logits[0, -1:].clone()  # not a view, which would hold on to the prompt's

    def _position_after_prefill(self, input_ids: torch.Tensor) -> int:
        if (position_ids := self.model_kwargs.get("position_ids")) is not None:
            return int(position_ids[..., -1].max())
        if _holds_running_state(self.cache):
            return input_ids.shape[1]
        return self.cache.get_seq_length()

    def verify(self, input_ids: torch.Tensor, draft: DraftTree) -> torch.Tensor:
        """One forward pass over the pending tokens and the draft.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): Prompt and all emitted tokens.
            draft ([`DraftTree`]): T nodes.

        Returns:
            `torch.Tensor` of shape `(1 + T, vocab_size)`: row 0 after the last emitted token, row
            1 + i after node i.
        """
        outputs = self.model(**self._model_inputs(input_ids, draft), return_dict=True)
        self.restarted |= self._adopt_cache(outputs)
        return outputs.logits[0, -1 - len(draft) :]

    def commit(self, draft: DraftTree, path: list[int]) -> None:
        """Keeps the nodes of `path` in the cache, drops the others, and counts one token more: the
        one that the target chose after them."""
        self._keep(draft, path)
        self.model_kwargs = self._extended_kwargs(len(path) + 1)
        self.last_position += len(path) + 1

    def abandon(self, draft: DraftTree, path: list[int]) -> None:
        """Leaves a cache that holds a prefix of the text and nothing else: an exception has ended
        the call after the nodes of `path` were accepted."""
        self._keep(draft, path)

    def finish(self, input_ids: torch.Tensor) -> None:
        """Leaves the cache as plain decoding would: with all tokens but the last."""

    def _keep(self, draft: DraftTree, path: list[int]) -> None:
        raise NotImplementedError

    def _adopt_cache(self, outputs: Mapping[str, Any]) -> bool:
        """Goes on with the cache that the model gives back, and says whether it is another: some
        models begin a new one where the text outgrows their rotary embedding (Phi-3)."""
        cache = find_cache(outputs)
        if cache is None or cache is self.cache:
            return False
        name = next(name for name in CACHE_NAMES if outputs.get(name) is cache)
        self.cache = cache
        self.model_kwargs = {**self.model_kwargs, name: cache}
        return True

    def _extended_kwargs(self, num_new_tokens: int) -> dict[str, Any]:
        """The keyword arguments (attention mask, position ids, token types) for that many more
        tokens than now."""
        if num_new_tokens == 0:
            return self.model_kwargs
        kwargs = self.model._update_model_kwargs_for_generation(
            {}, dict(self.model_kwargs), num_new_tokens=num_new_tokens
        )
        if (token_types := self.model_kwargs.get("token_type_ids")) is not None:
            # Plain decoding repeats the last type; the method above would repeat the last k types.
            repeated = token_types[:, -1:].expand(-1, num_new_tokens)
            kwargs["token_type_ids"] = torch.cat([token_types, repeated], dim=-1)
        return kwargs

    def _model_inputs(self, input_ids: torch.Tensor, draft: DraftTree) -> dict[str, Any]:
        if len(draft):
            tokens = torch.from_numpy(draft.tokens)[None].to(input_ids.device, non_blocking=True)
            input_ids = torch.cat([input_ids, tokens], dim=-1)
        model_inputs = self.model.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=self.pending + len(draft),
            **self._extended_kwargs(len(draft)),
        )
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = 1 + len(draft)
        return model_inputs


class TreeVerification(Verification):
    """All branches of a draft tree in one forward pass (tree attention; REST, section 3.3)."""

    name = "tree"
    takes_trees = True

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        """Needs position ids, a masked attention kernel, and a cache whose entries can be moved.

        The configuration is asked too: a model with sliding windows may be given a cache that
        keeps everything, and would still need another mask; and where rotary frequencies depend on
        the length of the text, some models count the nodes of a tree as that (Phi-3).
        """
        cache = find_cache(model_kwargs)
        return (
            cache is not None
            and model_kwargs.get("position_ids") is not None
            and getattr(model.config, "_attn_implementation", None) in ("sdpa", "eager")
            and not cache.offloading
            and all_plain_attention(cache)
            and all_plain_attention(new_cache(model))
            and not _attends_locally(model)
            and not length_dependent_rope(model.config.get_text_config(decoder=True))
        )

    def _model_inputs(self, input_ids: torch.Tensor, draft: DraftTree) -> dict[str, Any]:
        model_inputs = super()._model_inputs(input_ids, draft)
        if len(draft) == 0:
            return model_inputs  # the very step of plain decoding
        position_ids = model_inputs["position_ids"]  # (..., 1 + T)
        depths = torch.from_numpy(np.concatenate(([0], draft.depths())))
        depths = depths.to(position_ids.device, non_blocking=True)
        model_inputs["position_ids"] = position_ids[..., :1] + depths
        model_inputs["attention_mask"] = self._attention_mask(
            draft, model_inputs.get("attention_mask"), position_ids.device
        )
        return model_inputs

    def _attention_mask(
        self, draft: DraftTree, padding_mask: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        """Every row sees the cache (less its padding), the root and its own ancestors.

        Returns:
            `torch.Tensor` of shape `(1, 1, 1 + T, cached + 1 + T)`.
        """
        size, cached = 1 + len(draft), self.cache.get_seq_length()
        visible = np.zeros((size, size), dtype=np.bool_)
        visible[:, 0] = True
        visible[1:, 1:] = draft.ancestors()
        if padding_mask is None:
            past = torch.ones((size, cached), dtype=torch.bool, device=device)
        else:
            past = padding_mask[:, :cached].to(device, torch.bool).expand(size, cached)
        tree = torch.from_numpy(visible).to(device, non_blocking=True)
        return attention_bias(self.model, torch.cat([past, tree], dim=-1)[None, None])

    def _keep(self, draft: DraftTree, path: list[int]) -> None:
        accepted, rejected = len(path), len(draft) - len(path)
        if rejected == 0:
            return
        if path != list(range(accepted)):
            start = self.cache.get_seq_length() - len(draft)
            _move_entries(self.cache, [start + node for node in path], start)
        self.cache.crop(-rejected)


class ChainVerification(Verification):
    """The best path of a draft in one forward pass; the rejected rest is cropped from the cache."""

    name = "chain"

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        cache = find_cache(model_kwargs)
        # A stateful model with a cache of another kind has a state that nobody here knows.
        return cache is not None and not _holds_running_state(cache) and not model._is_stateful

    def prefill(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = super().prefill(input_ids)
        # Only now: a sliding window that records through the prefill would keep all of it.
        self.cache.activate_past_recording()
        return logits

    def _keep(self, draft: DraftTree, path: list[int]) -> None:
        if not self.restarted:  # a new cache does not record what it would take to go back
            # Also with nothing to drop: it shrinks a recording sliding window back to its size.
            self.cache.crop(len(path) - len(draft))

    def abandon(self, draft: DraftTree, path: list[int]) -> None:
        super().abandon(draft, path)
        self._stop_recording()

    def finish(self, input_ids: torch.Tensor) -> None:
        self._stop_recording()

    def _stop_recording(self) -> None:
        for layer in self.cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False


class RecurrentVerification(Verification):
    """The best path of a draft, for caches that hold a running state (Mamba, linear attention)."""

    name = "chain"

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        cache = find_cache(model_kwargs)
        return cache is not None and _holds_running_state(cache)

    def verify(self, input_ids: torch.Tensor, draft: DraftTree) -> torch.Tensor:
        self._before = snapshot(self.cache) if len(draft) else []
        return super().verify(input_ids, draft)

    def _keep(self, draft: DraftTree, path: list[int]) -> None:
        if len(path) == len(draft):
            self.pending = 1
        else:
            restore(self.cache, self._before)
            self.pending += len(path) + 1

    def abandon(self, draft: DraftTree, path: list[int]) -> None:
        if len(draft):
            restore(self.cache, self._before)

    def finish(self, input_ids: torch.Tensor) -> None:
        if self.pending > 1:
            self.model_kwargs = {**self.model_kwargs, **self._without_last_token()}
            self.pending -= 1
            self.verify(input_ids[:, :-1], DraftTree.empty())
            self.pending = 1

    def _without_last_token(self) -> dict[str, torch.Tensor]:
        names = ("attention_mask", "position_ids", "token_type_ids")
        kwargs = {name: self.model_kwargs.get(name) for name in names}
        return {name: value[..., :-1] for name, value in kwargs.items() if value is not None}


def attention_bias(model: PreTrainedModel, mask: torch.Tensor) -> torch.Tensor:
    """A 4D mask, true where a query sees a key, as the model's attention takes it: eager attention
    adds it to the scores."""
    if model.config._attn_implementation == "sdpa":
        return mask
    bias = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device)
    return bias.masked_fill_(~mask, torch.finfo(model.dtype).min)


def new_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def all_plain_attention(cache: Cache) -> bool:
    """Whether every layer keeps one entry per position, `(batch, heads, length, head_dim)`."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def _attends_locally(model: PreTrainedModel) -> bool:
    """Whether the configuration says that some layer attends to some of the positions only."""
    config = model.config.get_text_config(decoder=True)
    return any(isinstance(getattr(config, name, None), int) for name in LOCAL_ATTENTION)


def _holds_running_state(cache: Cache) -> bool:
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)


def _move_entries(cache: Cache, positions: list[int], start: int) -> None:
    """Moves the cache entries of `positions` to `start`, `start` + 1, ... in every layer."""
    index = torch.tensor(positions)
    stop = start + len(positions)
    for layer in cache.layers:
        index = index.to(layer.keys.device, non_blocking=True)
        # The selection is a copy, so that it may overlap with where it goes.
        layer.keys[..., start:stop, :] = layer.keys.index_select(-2, index)
        layer.values[..., start:stop, :] = layer.values.index_select(-2, index)


def snapshot(cache: Cache) -> list[dict[str, Any]]:
    """The state of every layer. Keys and values grow by concatenation, so that holding on to the
    tensors is enough; running states are written in place and are copied."""
    return [{name: _copied(value) for name, value in vars(layer).items()} for layer in cache.layers]


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in value.items()}
    return value


def restore(cache: Cache, states: list[dict[str, Any]]) -> None:
    """Puts a cache back to where [`snapshot`] was taken."""
    for layer, state in zip(cache.layers, states, strict=True):
        vars(layer).update(state)
