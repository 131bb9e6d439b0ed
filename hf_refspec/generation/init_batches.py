"""The entry point of `generate_batch(candidate_generator=...)`, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from ..drafting.candidates import as_drafter
from ..drafting.datastore_check import check_datastores
from ..drafting.drafter import Drafter
from ..text_config import attention_windows, length_dependent_rope, text_config
from ..verification.cache import new_cache
from ..verification.chain import ChainVerifier
from ..verification.choice import RefusedCallError, known_finding
from ..verification.facts import facts_about
from ..verification.ranks import Ranks
from ..verification.tree import TreeVerifier
from .continuous_batching import BatchDrafts, Source
from .continuous_shape import check_transformers
from .default_drafter import default_drafter
from .validation import REPRODUCIBLE, check_model, check_options

if TYPE_CHECKING:
    from ..attachment import Attachment


def init_drafted(
    init: Callable[..., Any],
    model: PreTrainedModel,
    call: dict[str, Any],
    options: dict[str, Any],
    attachment: Attachment | None,
) -> Any:
    """`init_continuous_batching` with a drafter.

    Args:
        init: Transformers' own.
        model: The target model.
        call: Its arguments by name.
        options: `max_draft_tokens`, `verification` and, unless one is attached,
            `candidate_generator`.
        attachment: What is attached to the model, where the call names no drafter.

    Returns:
        The manager, whose requests are drafted for.

    Raises:
        RefusedCallError: If they cannot be.
    """
    given = options.get("candidate_generator", "auto")
    most = "auto" if options.get("max_draft_tokens") is None else options["max_draft_tokens"]
    verification = options.get("verification", "auto")
    check_options(most, verification)
    check_transformers()
    check_model(model, "candidate_generator")
    kept = getattr(model, "_cached_continuous_batching_manager", None)
    config = (kept or model).generation_config if kept else call.get("generation_config")
    config = model.generation_config if config is None else config
    batching = kept.continuous_batching_config if kept else call.get("continuous_batching_config")
    if batching is None:
        batching = getattr(config, "continuous_batching_config", None) or ContinuousBatchingConfig()
    for why in _refusals(model, config, batching, verification):
        raise RefusedCallError(f"`candidate_generator` cannot be combined with {why}.")
    if kept is None:
        model.eval()  # as the manager does
        batching = copy.copy(batching)
        batching.use_async_batching = batching.use_cuda_graph = False
        call = {**call, "continuous_batching_config": batching}
    chains = verification == "chain" or not _checked_trees(model)
    if chains and verification == "tree":
        raise RefusedCallError(
            f"`verification='tree'` is not exact on {type(model).__name__} in continuous batches "
            "with this attention implementation. Pass `verification='auto'` to let the model "
            "decide."
        )

    source: Source
    if attachment is not None:
        source = partial(attachment.drafter, model)
    elif given == "auto":
        source = partial(default_drafter, model)
    else:
        drafter = as_drafter(given)
        drafter.check_vocabulary(text_config(model).vocab_size)
        check_datastores(given, model, None, facts_about(model))
        source = partial(_given, drafter)
    manager = init(model, **call)
    BatchDrafts(manager, source, most, attachment, chains).install()
    return manager


@contextmanager
def _given(drafter: Drafter) -> Iterator[Drafter]:
    yield drafter


def _refusals(
    model: PreTrainedModel,
    config: GenerationConfig,
    batching: ContinuousBatchingConfig,
    verification: str,
) -> Iterator[str]:
    if verification == REPRODUCIBLE:
        yield (
            f"`verification={verification!r}` where batches are continuous. Pass "
            '`verification="auto"`'
        )
    if batching.use_async_batching:
        yield (
            "`use_async_batching=True`: a pass begins before the tokens of the one before are "
            "known. Leave it unset (or call `model.destroy_cached_continuous_batching_manager()`)"
        )
    if any(batching.cuda_graph_booleans):
        yield (
            f"`use_cuda_graph={batching.use_cuda_graph!r}`: drafts change the shapes of passes. "
            "Leave it unset (or call `model.destroy_cached_continuous_batching_manager()`)"
        )
    compiled = batching.varlen_compile_config or batching.decode_compile_config
    if compiled or batching.default_compile_level > 0 or hasattr(model.config, "compile_config"):
        yield "compiled passes: drafts change their shapes. Pass no compile configuration"
    if not Ranks.of(model).alone:
        yield "a model that is split over several processes where batches are continuous"
    for processor in model._get_logits_processor(config):
        supported = processor.supports_continuous_batching
        if supported is None or not (supported or batching.drop_unsupported_processors):
            yield (
                f"the logits processor {type(processor).__name__} where batches are continuous: "
                "transformers does not say that it works there. Leave it out"
            )


def _checked_trees(model: PreTrainedModel) -> bool:
    """Whether passes over trees are exact; refuses models whose passes over several tokens are
    another computation."""
    config, name = text_config(model), type(model).__name__
    if {*(attention_windows(config) or {"": 0}).values()} != {None}:
        raise RefusedCallError(
            f"{name} attends to a part of the text in some layers, of which continuous batches "
            "keep no more than plain decoding needs. Leave `candidate_generator` out for it."
        )
    if length_dependent_rope(config):
        raise RefusedCallError(
            f"The rotary frequencies of {name} depend on the length of the text, and requests of "
            "all lengths share a pass. Leave `candidate_generator` out for it."
        )
    if (config._attn_implementation or "").startswith("paged|"):
        return False  # it runs in continuous batches alone, where there is no probe
    positions = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    given = {"past_key_values": new_cache(model), "use_cache": True, "position_ids": positions}
    finding = known_finding(ChainVerifier, model, 1, given)
    if not finding.exact:
        raise RefusedCallError(
            f"{name} returns other logits for several tokens in one pass than for one after "
            f"another ({finding}). Leave `candidate_generator` out for it."
        )
    trees = TreeVerifier.supports(model, given)
    return trees and known_finding(TreeVerifier, model, 1, given).exact
