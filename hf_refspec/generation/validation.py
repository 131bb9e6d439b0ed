"""Refuses calls that cannot be lossless, before any forward pass, and says what to do instead.

`caller` is the name that messages use for the feature: `candidate_generator`, `knn_lm`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel, QuantizedCache, StaticCache

from ..transformers_names import (
    CACHE_NAMES,
    PREFILL_ARGUMENTS,
    foreign_loop,
    foreign_step,
    is_pipeline_stage,
    is_synced,
    mask_length,
)
from ..verification.caches import find_cache, has_static_layers
from ..verification.choice import RefusedCallError
from ..verification.model_memo import memo_of
from ..verification.ranks import Ranks
from ..verification.verifier import REPRODUCIBLE

VERIFICATIONS = ("auto", "tree", "chain", REPRODUCIBLE.name)
# Arguments that ask a forward pass for more than logits.
FURTHER_OUTPUTS = ("output_attentions", "output_hidden_states")
# Arguments of a forward pass that a probe passes as well, that only prefills have, or that do not
# change logits.
_KNOWN = {
    *CACHE_NAMES,
    *("attention_mask", "position_ids", "use_cache", "logits_to_keep"),
    *("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"),
    *PREFILL_ARGUMENTS,
    *FURTHER_OUTPUTS,
}


def check_generates(model: Any) -> None:
    """Refuses anything but a model, or what wraps one as PEFT does."""
    if not hasattr(model, "generate") or not hasattr(model, "config"):
        raise TypeError(
            f"model must be a transformers model with generate(), but is {model!r}; load it by "
            "AutoModelForCausalLM.from_pretrained(name)"
        )


def check_model(model: PreTrainedModel, caller: str) -> None:
    """Refuses models that have no single decoder to verify with, or whose decoding loop is not
    transformers' own: this package cannot know what another loop does besides choosing tokens."""
    if is_pipeline_stage(model):
        raise RefusedCallError(
            f"`{caller}` cannot be combined with pipeline parallelism: a process has the cache of "
            "its own layers only. Load the model with `tp_size` or `device_map`, or leave it out."
        )
    if model.config.is_encoder_decoder:
        raise RefusedCallError(
            f"`{caller}` needs a decoder-only model, but {type(model).__name__} is an "
            "encoder-decoder model. Leave the argument out for it."
        )
    # The loop of this package replaces transformers'; it calls the other methods of generation
    # itself, or `generate` has called them before.
    if (name := foreign_loop(model)) is not None:
        raise RefusedCallError(
            f"`{caller}` needs transformers' own decoding loop, but the `{name}` of "
            f"{type(model).__name__} is the model's or another library's. Leave the argument "
            "out for it."
        )


def check_steps(model: PreTrainedModel, model_kwargs: dict[str, Any], caller: str) -> None:
    """Refuses arguments of the forward pass that the probe lacks, if they are prepared by methods
    from outside transformers: they may differ from step to step. Transformers' own models pass them
    on unchanged or decode plainly (Mllama, Idefics)."""
    method = foreign_step(model)
    others = [n for n, value in model_kwargs.items() if value is not None and n not in _KNOWN]
    if method and others:
        raise RefusedCallError(
            f"`{caller}` cannot be combined with `{others[0]}`: the `{method}` of "
            f"{type(model).__name__} may change it at each step, and drafts skip steps. Leave one "
            "of them out."
        )


def setting(name: str, model: PreTrainedModel, kwargs: dict[str, Any]) -> Any:
    """The value that a call of `generate` gives to a field of its generation config: by keyword, in
    a generation config, or by the model's own; `None` where it is unset."""
    value = kwargs.get(name)
    for config in (kwargs.get("generation_config"), model.generation_config):
        value = getattr(config, name, None) if value is None else value
    return value


def check_call(model: PreTrainedModel, kwargs: dict[str, Any], caller: str) -> None:
    """Refuses arguments that `generate` would use or drop before the decoding loop. The tokenizer,
    which it drops, shows whether the call's datastores are for this model."""
    for why in _refusals_of_call(model, kwargs, caller):
        raise RefusedCallError(why)
    generator = kwargs.get("candidate_generator")
    if generator != "auto":  # the default has no datastore
        from ..drafting.candidates import check_datastores  # loaded only where something drafts

        check_datastores(generator, model, kwargs.get("tokenizer"), memo_of(model))


def _refusals_of_call(model: PreTrainedModel, kwargs: dict[str, Any], caller: str) -> Iterator[str]:
    retrieves = caller != "candidate_generator"
    if kwargs.get("assistant_model") is not None:
        yield (
            f"`assistant_model` cannot be combined with `{caller}`: both draft. Leave one of them "
            "out; `drafter | rs.DraftModel(assistant)` drafts from both."
        )
    if retrieves and is_synced(model, kwargs.get("synced_gpus")):
        yield (
            f"`synced_gpus=True` cannot be combined with `{caller}`: the processes would retrieve "
            "at different times and wait for each other. Leave one of them out."
        )
    if retrieves and not Ranks.of(model).alone:
        yield (
            f"A model that is split over several processes cannot be combined with `{caller}`: "
            "each would speculate by its own clock. Load it in one process, with `device_map`."
        )
    if setting("token_healing", model, kwargs):
        yield (
            f"`token_healing=True` cannot be combined with `{caller}`: transformers drops the "
            "tokenizer for it. Call `model.heal_tokens(input_ids, tokenizer)` before."
        )
    if setting("cache_implementation", model, kwargs) == "paged":
        yield (
            f"`cache_implementation='paged'` cannot be combined with `{caller}`: it batches "
            "continuously with a loop of its own. Leave one of them out."
        )


def check_options(max_draft_tokens: Any, verification: Any) -> None:
    """Refuses values of the options that a speculative call adds to `generate`."""
    if max_draft_tokens != "auto":
        if isinstance(max_draft_tokens, bool) or not isinstance(max_draft_tokens, int):
            raise TypeError(
                f'`max_draft_tokens` must be an int (draft nodes a step) or "auto", but is '
                f"{max_draft_tokens!r}."
            )
        if max_draft_tokens < 0:
            raise ValueError(
                f"`max_draft_tokens` must be 0 (plain decoding) or more, but is {max_draft_tokens}."
            )
    if verification not in VERIFICATIONS:
        raise ValueError(
            f"`verification` must be one of {', '.join(map(repr, VERIFICATIONS))}, but is "
            f"{verification!r}."
        )


def check_request(
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    caller: str,
) -> None:
    """Refuses what cannot be lossless, from the arguments as `generate` has prepared them."""
    for why in itertools.chain(
        _refusals_of_config(generation_config, input_ids, model_kwargs),
        _refusals_of_cache(generation_config, find_cache(model_kwargs), caller),
    ):
        raise RefusedCallError(f"`{caller}` cannot be combined with {why}.")


def _refusals_of_config(
    config: GenerationConfig, input_ids: torch.Tensor, model_kwargs: dict[str, Any]
) -> Iterator[str]:
    mode = config.get_generation_mode().value
    rows = len(input_ids)
    # Report the user's argument first; beams are already rows.
    if config.num_beams > 1:
        yield (
            f"`num_beams={config.num_beams}`: beam search keeps several texts, a draft continues "
            "one. Pass `num_beams=1`"
        )
    if config.prompt_lookup_num_tokens is not None:
        yield (
            f"`prompt_lookup_num_tokens={config.prompt_lookup_num_tokens}`: both draft. Leave one "
            "of them out (`hf_refspec.ReferenceCopy()` looks up in the prompt)"
        )
    if mode not in ("greedy_search", "sample"):
        yield (
            f"the generation mode {mode!r} of the generation config. Only greedy search and "
            "sampling are lossless"
        )
    if model_kwargs.get("inputs_embeds") is not None:
        yield (
            "`inputs_embeds`, which models such as BLIP-2 pass by themselves: drafts are looked up "
            "by token id. Pass `input_ids` to the language model, or leave the drafter out"
        )
    if input_ids.shape[1] == 0:
        yield "`input_ids` with no token: pass a prompt"
    if not config.use_cache:
        yield "`use_cache=False`: verification goes on from the cache. Pass `use_cache=True`"
    outputs = (*FURTHER_OUTPUTS, "output_scores", "output_logits")
    for name in outputs if config.return_dict_in_generate else ():
        if getattr(config, name) and name in FURTHER_OUTPUTS:
            yield f"`{name}=True`: not supported yet. Run the model over the returned ids"
        elif getattr(config, name) and rows > 1:
            yield (
                f"`{name}=True` and `input_ids` with {rows} rows: plain decoding goes on to score "
                "rows that have ended. Pass one prompt at a time"
            )


def _refusals_of_cache(config: GenerationConfig, cache: Any, caller: str) -> Iterator[str]:
    implementation = config.cache_implementation
    if implementation == "quantized" or isinstance(cache, QuantizedCache):
        yield (
            "a quantized cache: it rounds tokens in groups, and a draft changes the groups. Use "
            "the default cache"
        )
    if not isinstance(cache, Cache) or not has_static_layers(cache):
        return
    named = f"a {type(cache).__name__}"
    if implementation is not None:
        named = f"`cache_implementation={implementation!r}`"
    if getattr(cache, "offloading", False):
        yield (
            f"{named}: its layers are offloaded, and come and go while a pass runs. Pass "
            "`cache_implementation='static'`"
        )
    if caller != "candidate_generator" or not isinstance(cache, StaticCache):
        yield (
            f"{named}: a static cache cannot go back to before rejected tokens or a retrieval. "
            "Leave it out, or pass a `DynamicCache`"
        )


def check_reproducible(
    input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> None:
    """Refuses caches in which passes cannot all have one shape."""
    cache = find_cache(model_kwargs)
    if not isinstance(cache, StaticCache):
        raise RefusedCallError(
            f"`verification={REPRODUCIBLE.name!r}` needs a static cache, but the cache is a "
            f"{type(cache).__name__}. Leave it and `cache_implementation` out, or pass a "
            "`StaticCache`."
        )
    if generation_config.cache_implementation is None:
        mask = model_kwargs.get("attention_mask")
        seen = mask_length(generation_config) if mask is None else mask.shape[1]
        cached = 0 if seen == input_ids.shape[1] else int(cache.get_seq_length())
        # Ended rows of a batch keep their last token in a slot behind the text.
        needed = generation_config.max_length + cached + (len(input_ids) > 1)
        length = max(layer.max_cache_len for layer in cache.layers)
        if length < needed:
            raise RefusedCallError(
                f"`verification={REPRODUCIBLE.name!r}` needs a `StaticCache` with a "
                f"`max_cache_len` of {needed} or more, but it has {length} (or layers that keep "
                "no more). Pass a longer one, or leave it out."
            )
