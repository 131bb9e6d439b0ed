"""Every reason not to draft for a call, in the order in which they are asked.

They concern the call, its configuration, its cache, the model and the probe. The version of
transformers comes first, see `version.py`: this file cannot be loaded under another version.

Some refuse the call, by a [`RefusedCallError`] before any forward pass that says what to do
instead: it asks for more than a single text, or drafts would silently change the text. With all
others it decodes plainly, and says why once. `caller` is the name that messages use for the
feature: `candidate_generator`, `knn_lm`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from transformers import (
    Cache,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerationConfig,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from .drafting.contract import Drafter
from .drafting.tree import MOST_NODES
from .foreign_code import foreign_code
from .kernels.compilation import drafting_kernels
from .messages import check_count
from .text_config import (
    attends_locally,
    readable_ids,
    text_config,
    text_tokenizer,
    vocab_size_of,
)
from .transformers_names import (
    CACHE_NAMES,
    PREFILL_ARGUMENTS,
    experts_implementation,
    foreign_loop,
    foreign_step,
    is_compiled,
    is_pipeline_stage,
    is_synced,
    mask_length,
)
from .verification.caches import crosses_images, find_cache, has_static_layers
from .verification.finding import Finding
from .verification.model_memo import memo_of
from .verification.ranks import Ranks

logger = logging.getLogger("hf_refspec")

VERIFICATIONS = ("auto", "tree", "chain", "reproducible")
REPRODUCIBLE = VERIFICATIONS[-1]
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


_BY_ROW = (
    "PEFT's hooks (`adapter_names`, `task_ids`, activated LoRA) know rows by their number, which "
    "differs in passes over drafts: pass one prompt at a time"
)
_ACTIVATED = (
    "activated LoRA is applied to as many of the last tokens of each pass as follow its invocation "
    "in the prompt, and a draft may have more"
)


class RefusedCallError(ValueError):
    """A call that cannot be lossless with drafts; nothing has been done yet."""


@dataclass(frozen=True)
class Reason:
    """Why nothing is drafted."""

    kind: Literal["call", "configuration", "cache", "model", "probe", "draft"]
    text: str


CHANGED = Reason(
    "model",
    "a logits processor, a criterion or the streamer changed the model in the middle of the call, "
    "and nothing was drafted after that",
)


# --- refusals, before `generate` has prepared a call


def check_call(model: PreTrainedModel, kwargs: dict[str, Any], caller: str) -> None:
    """Refuses models and arguments that `generate` would use or drop before the decoding loop.

    The tokenizer, which it drops, shows whether the call's datastores are for this model."""
    for text in chain(_of_decoder(model, caller), _of_call(model, kwargs, caller)):
        raise RefusedCallError(text)
    generator = kwargs.get("candidate_generator")
    if generator != "auto":  # the default has no datastore
        _check_datastores(model, generator, kwargs.get("tokenizer"))


def _check_datastores(model: PreTrainedModel, generator: Any, tokenizer: Any) -> None:
    """Warns, once for each, of datastores that were made with another tokenizer than the call's.

    If the call has none, they are compared with the one that is stored with the model on this
    machine, unless that has the same name. No datastore is refused: the text is the same, and the
    user may have extended the tokenizer."""
    sources = generator.sources if isinstance(generator, Drafter) else [generator]
    stores = [getattr(source, "store", source) for source in sources]
    if all(store is None or isinstance(store, (Drafter, str)) for store in stores):
        return
    from .store.datastore import Datastore
    from .store.files import DatastoreError
    from .store.names import local_tokenizer
    from .store.stored_tokenizer import public_name

    memo = memo_of(model)
    known = text_tokenizer(tokenizer)
    known = known if getattr(known, "is_fast", False) else None
    for store in stores:
        if not isinstance(store, Datastore):
            continue
        key = ("datastore", store.config.fingerprint, known is None)
        if key in memo:
            continue
        memo[key] = True
        compared = known
        if known is None and store.config.tokenizer != public_name(model):
            compared = local_tokenizer(getattr(model, "name_or_path", ""))
        try:
            if compared is not None:
                store.check_tokenizer(compared)
        except DatastoreError as error:
            logger.warning("hardly any draft of this datastore will be accepted: %s", error)


def _of_decoder(model: PreTrainedModel, caller: str) -> Iterator[str]:
    """Models without a single decoder to verify with, or without transformers' own decoding loop.

    This package cannot know what another loop does besides choosing tokens."""
    if is_pipeline_stage(model):
        yield (
            f"`{caller}` cannot be combined with pipeline parallelism: a process has the cache of "
            "its own layers only. Load the model with `tp_size` or `device_map`, or leave it out."
        )
    if model.config.is_encoder_decoder:
        yield (
            f"`{caller}` needs a decoder-only model, but {type(model).__name__} is an "
            "encoder-decoder model. Leave the argument out for it."
        )
    # The loop of this package replaces transformers'; it calls the other methods of generation
    # itself, or `generate` has called them before.
    if (name := foreign_loop(model)) is not None:
        yield (
            f"`{caller}` needs transformers' own decoding loop, but the `{name}` of "
            f"{type(model).__name__} is the model's or another library's. Leave the argument "
            "out for it."
        )


def setting(name: str, model: PreTrainedModel, kwargs: dict[str, Any]) -> Any:
    """The value that a call of `generate` gives to a field of its generation config.

    It comes from a keyword, a generation config, or the model's own; `None` where it is unset."""
    value = kwargs.get(name)
    for config in (kwargs.get("generation_config"), model.generation_config):
        value = getattr(config, name, None) if value is None else value
    return value


def _of_call(model: PreTrainedModel, kwargs: dict[str, Any], caller: str) -> Iterator[str]:
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
        otherwise = ' (draft nodes a step) or "auto"'
        check_count("`max_draft_tokens`", max_draft_tokens, otherwise, least=0, most=MOST_NODES)
    if verification not in VERIFICATIONS:
        raise ValueError(
            f"`verification` must be one of {', '.join(map(repr, VERIFICATIONS))}, but is "
            f"{verification!r}."
        )


# --- refusals, once `generate` has prepared it


def check_prepared(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    caller: str,
) -> None:
    """Refuses what cannot be lossless, from the arguments as `generate` has prepared them."""
    for text in chain(
        _of_configuration(generation_config, input_ids, model_kwargs),
        _of_cache(generation_config, find_cache(model_kwargs), caller),
        _of_steps(model, model_kwargs),
    ):
        raise RefusedCallError(f"`{caller}` cannot be combined with {text}.")


def _of_steps(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> Iterator[str]:
    """Arguments of the forward pass that the probe lacks, prepared outside of transformers.

    They may differ from step to step. Transformers' own models pass them on unchanged or decode
    plainly (Mllama, Idefics)."""
    method = foreign_step(model)
    others = [n for n, value in model_kwargs.items() if value is not None and n not in _KNOWN]
    if method and others:
        yield (
            f"`{others[0]}`: the `{method}` of {type(model).__name__} may change it at each step, "
            "and drafts skip steps. Leave one of them out"
        )


def _of_configuration(
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
    if input_ids.numel() == 0:
        yield "`input_ids` with no token: pass a prompt"
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.ndim < 2:
        yield (
            f"`position_ids` of shape {tuple(positions.shape)}: pass `(rows, length)`, or leave "
            "them out"
        )
    if rows > 1 and config.eos_token_id is not None and (config.pad_token_id or 0) < 0:
        yield (
            f"`pad_token_id={config.pad_token_id}` and `input_ids` with {rows} rows: the model "
            "would read it after rows that end early. Pass a token's id"
        )
    if not config.use_cache:
        yield "`use_cache=False`: verification continues from the cache. Pass `use_cache=True`"
    outputs = (*FURTHER_OUTPUTS, "output_scores", "output_logits")
    for name in outputs if config.return_dict_in_generate else ():
        if getattr(config, name) and name in FURTHER_OUTPUTS:
            yield f"`{name}=True`: not supported yet. Run the model over the returned ids"
        elif getattr(config, name) and rows > 1:
            yield (
                f"`{name}=True` and `input_ids` with {rows} rows: plain decoding goes on to score "
                "rows that have ended. Pass one prompt at a time"
            )


def _of_cache(config: GenerationConfig, cache: Any, caller: str) -> Iterator[str]:
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
            f"`verification={REPRODUCIBLE!r}` needs a static cache, but the cache is a "
            f"{type(cache).__name__}. Leave it and `cache_implementation` out, or pass a "
            "`StaticCache`."
        )
    if generation_config.cache_implementation is None:
        mask = model_kwargs.get("attention_mask")
        seen = mask_length(generation_config) if mask is None else mask.shape[1]
        cached = 0 if seen == input_ids.shape[1] else int(cache.get_seq_length())
        # Ended rows of a batch keep their last token in a slot after the text.
        needed = generation_config.max_length + cached + (len(input_ids) > 1)
        length = max(layer.max_cache_len for layer in cache.layers)
        if length < needed:
            raise RefusedCallError(
                f"`verification={REPRODUCIBLE!r}` needs a `StaticCache` with a "
                f"`max_cache_len` of {needed} or more, but it has {length} (or layers that keep "
                "no more). Pass a longer one, or leave it out."
            )


# --- plain decoding


def why_plain(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    processors: Sequence[Any],
    model_kwargs: Mapping[str, Any],
) -> Reason | None:
    """Why drafts could change the text of a call that is not refused, if they could."""
    if model_kwargs.get("output_attentions"):
        return Reason(
            "call", "`output_attentions=True` may change how the model attends; leave it out"
        )
    rows = len(input_ids)
    for processor in processors if rows > 1 else ():
        if not fits_single_rows(processor, rows):
            return Reason(
                "call",
                f"a {type(processor).__name__} may know the {rows} rows by their number, and rows "
                "with drafts differ in length; pass one prompt at a time",
            )
    is_static = isinstance(find_cache(model_kwargs), StaticCache)
    mask = model_kwargs.get("attention_mask") if attends_locally(text_config(model)) else None
    if is_static and mask is not None and mask.ndim == 2 and not bool(mask[:, -1].all()):
        return Reason(
            "cache",
            "a prompt is padded on the right, and attention to nothing but padding depends on the "
            "length of the static cache; pad on the left",
        )
    return None


def why_unread(
    model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]
) -> str | None:
    """Why no pass of a call can return hidden states to draft from, if so: other sources draft."""
    if len(input_ids) > 1:
        return "several rows are decoded together; pass one prompt at a time"
    if isinstance(find_cache(model_kwargs), StaticCache):
        return "passes in a static cache have one shape; pass a `DynamicCache`"
    if not Ranks.of(model).alone:
        return "the model is split over several processes"
    if any(parameter.is_meta for parameter in model.parameters()):
        return "some layers are offloaded; load the model onto its devices whole"
    return None


def fits_single_rows(processor: Any, rows: int) -> bool:
    """True if a logits processor returns the same scores for each of several rows alone.

    This holds for transformers' own (no subclass of them) and this package's. Others may know the
    rows by their number."""
    kind = type(processor)
    if kind is EncoderRepetitionPenaltyLogitsProcessor:
        # It holds a prompt of several sequences once.
        return len(processor.encoder_input_ids) == rows
    return kind is not UnbatchedClassifierFreeGuidanceLogitsProcessor and (
        knows_one_row(processor) or is_of_transformers(processor)
    )


def knows_one_row(processor: Any) -> bool:
    """True if a logits processor says that a copy of it may be asked about one row of several."""
    return getattr(type(processor), "knows_one_row", False)


def is_known(member: Any) -> bool:
    """True if a processor, a criterion or a streamer is one of transformers' or of this package."""
    return is_of_transformers(member) or type(member).__module__.startswith(f"{__package__}.")


def is_of_transformers(member: Any) -> bool:
    """True if a processor or a criterion is one of transformers' own."""
    return type(member).__module__.startswith("transformers.generation.")


def why_unverifiable(
    model: PreTrainedModel,
    rows: int,
    model_kwargs: Mapping[str, Any],
    verification: str,
    trusts_code: bool = False,
) -> Reason | None:
    """The reason why nothing can be verified in the model's present state, which no probe shows.

    With `trusts_code` code of others is ignored."""
    code = None if trusts_code else foreign_code(model)
    if code is not None:
        return Reason(
            "model",
            f"{code}, which may act by the call, the pass or the length of the text: remove it, or "
            'pass `verification="tree"` if it only observes (timing, recording) or treats all '
            "tokens alike",
        )
    if is_compiled(model):
        return Reason(
            "model",
            "`torch.compile` was given it or some of its modules, and drafts would compile many "
            "more graphs: leave it uncompiled, or pass `cache_implementation='static'`, for which "
            "`generate` compiles passes itself",
        )
    checkpoints = (getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if model.training and any(checkpoints):  # its layers run without the cache
        return Reason(
            "model",
            "gradient checkpointing is at work, which drops the cache: call "
            "`model.gradient_checkpointing_disable()` or `model.eval()`",
        )
    if crosses_images(text_config(model), model_kwargs):
        text = "some of its layers attend to images alone, which probes do not have"
        return Reason("model", text)
    emitted = vocab_size_of(model)
    if (read := readable_ids(model)) < emitted:
        return Reason(
            "model",
            f"it may emit {emitted} ids and its embedding has {read}, so that it cannot read each "
            f"draft: call `model.resize_token_embeddings({emitted})`",
        )
    if (text_of_adapters := _of_adapters(model, rows)) is not None:
        return Reason("model", text_of_adapters)
    if verification == REPRODUCIBLE and _routes_by_token(model):
        return Reason(
            "model",
            "drafts change how many tokens each of its experts runs over; load it with "
            '`experts_implementation="batched_mm"`',
        )
    return None


def _of_adapters(model: PreTrainedModel, rows: int) -> str | None:
    """Why PEFT's hooks of this call do not let drafts be verified, if so."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            function = hook.func if isinstance(hook, partial) else hook
            if not (getattr(function, "__module__", None) or "").startswith("peft."):
                continue
            if rows > 1:
                return _BY_ROW
            # No offset: the tokens that invoke it are not in the prompt.
            if any(getattr(hook, "keywords", {}).get("alora_offsets") or ()):
                return _ACTIVATED
    return None


def _routes_by_token(model: PreTrainedModel) -> bool:
    """True if tokens choose among experts, so that shapes depend on what other tokens choose.

    Few texts show it: where no expert gets more tokens than without a draft, the bits are the
    same."""
    config = text_config(model)
    counts = (value for name, value in vars(config).items() if "expert" in name)
    mixture = any(isinstance(value, int) and value > 1 for value in counts)
    return mixture and experts_implementation(config) != "batched_mm"


def why_inexact(findings: Sequence[tuple[str, Finding]], rows: int, cache: Cache | None) -> Reason:
    """Why no verifier was found, by the finding of each kind, and what to do.

    Two kinds may have the same name."""
    failures = {finding.failure for _, finding in findings}
    if len(failures) == 1 and (failure := failures.pop()) is not None:
        return Reason("probe", failure)
    if findings:
        found = "; ".join(f"{name}: {finding}" for name, finding in findings)
        return Reason(
            "probe",
            f"several tokens in one pass have other logits than one after another ({found})",
        )
    if cache is None:
        return Reason(
            "cache", "it keeps its cache in a form of its own, which drafts cannot be taken out of"
        )
    if isinstance(cache, StaticCache):
        text = "no verifier supports the layers of its static cache: pass a `DynamicCache`"
        return Reason("cache", text)
    if rows > 1:
        return Reason(
            "model",
            f"its attention or cache does not let {rows} rows be verified together: pass one "
            "prompt at a time",
        )
    return Reason("cache", f"no verifier supports its {type(cache).__name__}")


def why_refused(finding: Finding, boundary: int | None) -> Reason:
    """The reason why drafts end in the middle of a call, found by a probe that crosses a length.

    Without a `boundary` it was the first probe of the model."""
    if finding.failure is not None:
        return Reason("probe", finding.failure)
    if boundary is None:
        text = f"trees of drafts fail a probe, and the next call tries chains ({finding})"
        return Reason("probe", text)
    return Reason("probe", f"drafts were found inexact at the length of the text ({finding})")


def why_undrafted(max_draft_tokens: int | str, waited: bool, offered: bool) -> Reason:
    """The reason why a call that could have verified drafts has verified none.

    It may have `waited` for kernels until its end; a draft may have been `offered`."""
    if max_draft_tokens == 0:
        return Reason("draft", "`max_draft_tokens=0`")
    if waited:
        return Reason("draft", drafting_kernels.why_unready)
    if not offered:
        return Reason("draft", "the drafter found nothing to draft")
    text = "no draft was expected to pay; `max_draft_tokens=8` verifies drafts anyway"
    return Reason("draft", text)
