"""The probe: which way of verifying drafts is exact, asked of the model itself.

No list of model names: a tiny draft is verified, and its logits are compared with those of the same
tokens one after another. What is found is remembered for each model, attention implementation,
dtype and device.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from .drafting.tree import ROOT, DraftTree
from .verification import (
    CACHE_NAMES,
    ChainVerification,
    RecurrentVerification,
    TreeVerification,
    Verification,
    new_cache,
)

logger = logging.getLogger("hf_refspec")

_WAYS: tuple[type[Verification], ...] = (TreeVerification, ChainVerification, RecurrentVerification)
_probed: WeakKeyDictionary[PreTrainedModel, dict[tuple, bool]] = WeakKeyDictionary()

# Ids that every vocabulary has. The distractors are siblings of the path's tokens, and differ.
_VOCABULARY = 16
_PROMPT = [5, 1, 6, 2, 7, 3, 8, 4]
_PATH = [1, 2, 3, 4]
_DISTRACTORS = [5, 6, 7, 8, 9, 10, 11, 12]
_OTHER_DISTRACTORS = [13, 12, 15, 14, 11, 9, 10, 8]


def select_verification(
    model: PreTrainedModel,
    requested: str,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    drafts: bool = True,
) -> Verification | None:
    """The first way that suits this call's cache and that the probe finds exact.

    Args:
        model (`PreTrainedModel`): The target model.
        requested (`str`): `"auto"`, or `"tree"` or `"chain"` to allow only that.
        generation_config (`GenerationConfig`): The call's own.
        model_kwargs (`dict`): Keyword arguments of the forward pass.
        drafts (`bool`, *optional*, defaults to `True`): Whether anything will be drafted. If not,
            every way takes the steps of plain decoding and there is nothing to probe.

    Returns:
        [`Verification`] or `None` where drafts cannot be verified exactly: the caller should then
        decode plainly.

    Raises:
        ValueError: If the way that was asked for is not exact on this model.
    """
    for way in _WAYS:
        if requested not in ("auto", way.name) or not way.supports(model, model_kwargs):
            continue
        if not drafts or is_exact(way, model, model_kwargs):
            return way(model, generation_config, model_kwargs)
    if requested != "auto":
        raise ValueError(
            f"`verification={requested!r}` is not exact on {type(model).__name__} with this cache "
            "and attention implementation. Pass `verification='auto'` to let the model decide."
        )
    return None


def is_exact(way: type[Verification], model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether verified drafts give the logits of plain decoding; probed once."""
    if _is_random(model):
        return False
    key = (way, model.config._attn_implementation, model.dtype, model.device.type)
    results = _probed.setdefault(model, {})
    if key not in results:
        try:
            results[key] = _probe(way, model, model_kwargs)
        except torch.OutOfMemoryError:
            raise  # says nothing about the model
        except Exception as error:  # whatever a model raises at inputs that it cannot take
            logger.debug("%s on %s: %r", way.__name__, type(model).__name__, error)
            results[key] = False
    return results[key]


def _is_random(model: PreTrainedModel) -> bool:
    """Whether dropout is at work: then no two passes agree."""
    dropouts = (module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))
    config = model.config.get_text_config(decoder=True)
    return model.training and (
        any(p > 0 for p in dropouts) or getattr(config, "attention_dropout", 0.0) > 0
    )


def _probe(way: type[Verification], model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Verifies a path of four tokens, takes the last one back, and steps on from there.

    In a tree the path is hidden behind other branches. What these hold must not matter at all,
    whatever the dtype; and the logits must be those of the same tokens one after another, as nearly
    as these are when they come in one pass without a cache, which is right and rounds differently.
    """
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    if vocab_size < _VOCABULARY:
        raise ValueError(f"a vocabulary of {vocab_size} is too small to probe")
    text = torch.tensor([_PROMPT + _PATH], device=model.device)
    reference = _one_after_another(way, model, model_kwargs, text)  # (5, vocab_size)
    at_once = model(text, use_cache=False).logits[0, -len(reference) :]

    draft, path = _draft(way, _DISTRACTORS)
    verified, after = _verified(way, model, model_kwargs, text, draft, path)
    error = max(
        _difference(verified, reference),
        _difference(after, reference[-1:]),
    )
    rounding = _difference(at_once, reference)
    leak = 0.0
    if way.takes_trees:
        draft, path = _draft(way, _OTHER_DISTRACTORS)
        leak = _difference(_verified(way, model, model_kwargs, text, draft, path)[0], verified)

    eps = torch.finfo(model.dtype).eps
    layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 1)
    exact = (
        rounding <= eps**0.5  # otherwise the model does not agree with itself
        and leak <= max(3 * rounding, eps)
        and error <= max(3 * rounding, eps * layers**0.5)
    )
    logger.debug(
        "%s on %s: %.1e off, rounding alone %.1e, other branches %.1e: %s",
        way.__name__,
        type(model).__name__,
        error,
        rounding,
        leak,
        "exact" if exact else "not exact",
    )
    return exact


def _one_after_another(
    way: type[Verification],
    model: PreTrainedModel,
    model_kwargs: dict[str, Any],
    text: torch.Tensor,
) -> torch.Tensor:
    """The logits after the prompt and after each token of the path, by plain steps."""
    plain = way(model, GenerationConfig(), _fresh_kwargs(model, model_kwargs))
    plain.prefill(text[:, : len(_PROMPT) - 1])
    rows = []
    for length in range(len(_PROMPT), text.shape[1] + 1):
        rows.append(plain.verify(text[:, :length], DraftTree.empty()))
        plain.commit(DraftTree.empty(), [])
    return torch.cat(rows)


def _verified(
    way: type[Verification],
    model: PreTrainedModel,
    model_kwargs: dict[str, Any],
    text: torch.Tensor,
    draft: DraftTree,
    path: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits after the prompt and each node of the path by one pass; then, with the path's last
    node taken back so that the commit has something to drop, those of stepping on to it."""
    verification = way(model, GenerationConfig(), _fresh_kwargs(model, model_kwargs))
    verification.prefill(text[:, : len(_PROMPT) - 1])
    logits = verification.verify(text[:, : len(_PROMPT)], draft)
    verification.commit(draft, path[:-1])
    after = verification.verify(text, DraftTree.empty())
    return logits[[0, *(1 + node for node in path)]], after


def _difference(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """|logits - reference| relative to the reference's spread: the largest of the rows in float32.

    In shorter types it is the median, since in a mixture of experts rounding may send a token to
    another expert.
    """
    dtype = logits.dtype
    logits, reference = logits.float(), reference.float()
    spread = (reference - reference.mean(dim=-1, keepdim=True)).norm(dim=-1)
    differences = (logits - reference).norm(dim=-1) / spread
    return (differences.max() if dtype == torch.float32 else differences.median()).item()


def _draft(way: type[Verification], distractors: list[int]) -> tuple[DraftTree, list[int]]:
    """The path as a chain; or a tree with all distractors before the path's first node and one
    before each next node. And the path's nodes."""
    if not way.takes_trees:
        return DraftTree.chain(_PATH), list(range(len(_PATH)))
    tokens, parents, path = list(distractors), [ROOT] * len(distractors), []
    parent = ROOT
    for depth, token in enumerate(_PATH):
        if depth > 0:
            tokens.append(distractors[depth])
            parents.append(parent)
        tokens.append(token)
        parents.append(parent)
        parent = len(tokens) - 1
        path.append(parent)
    probs = np.ones(len(tokens), dtype=np.float32)
    return DraftTree(np.array(tokens), np.array(parents, dtype=np.int32), probs), path


def _fresh_kwargs(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a call with the probe's prompt, of the same kinds as this call's."""
    cache_name = next(name for name in CACHE_NAMES if model_kwargs.get(name) is not None)
    kwargs: dict[str, Any] = {"use_cache": True, cache_name: new_cache(model)}
    if "logits_to_keep" in model_kwargs:
        kwargs["logits_to_keep"] = 1
    if model_kwargs.get("position_ids") is not None:
        kwargs["position_ids"] = torch.arange(len(_PROMPT) - 1, device=model.device)[None]
    return kwargs
