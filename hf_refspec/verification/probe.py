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

from ..drafting.tree import ROOT, DraftTree
from .batch import BatchVerification
from .verifier import (
    CACHE_NAMES,
    ChainVerification,
    RecurrentVerification,
    TreeVerification,
    Verification,
    new_cache,
)

logger = logging.getLogger("hf_refspec")

_WAYS: tuple[type[Verification], ...] = (TreeVerification, ChainVerification, RecurrentVerification)
# What the second row of a batch says, behind padding.
_PADDING = 3
_OTHER_TEXT = [8, 3, 7, 2, 6, 1, 14, 15, 4]
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


def check_batches(model: PreTrainedModel, rows: int, model_kwargs: dict[str, Any]) -> None:
    """Refuses models that cannot verify rows of different lengths.

    A chain needs no less than a tree here: a row's holes are masked and its tokens have positions
    of their own either way.

    Raises:
        ValueError: If the probe does not find it exact on this model.
    """
    if BatchVerification.supports(model, model_kwargs) and is_exact(
        BatchVerification, model, model_kwargs
    ):
        return
    raise ValueError(
        f"`candidate_generator` cannot be combined with `input_ids` with {rows} rows on "
        f"{type(model).__name__}: rows accept different numbers of tokens, and with this model, "
        "cache and attention implementation not every row would get what it gets plainly. Pass "
        "one prompt at a time."
    )


def is_exact(
    way: type[Verification] | type[BatchVerification],
    model: PreTrainedModel,
    model_kwargs: dict[str, Any],
) -> bool:
    """Whether verified drafts give the logits of plain decoding; probed once."""
    if _is_random(model):
        return False
    key = (way, model.config._attn_implementation, model.dtype, model.device.type)
    results = _probed.setdefault(model, {})
    if key not in results:
        try:
            results[key] = (
                _probe_batch(model, model_kwargs)
                if issubclass(way, BatchVerification)
                else _probe(way, model, model_kwargs)
            )
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
    _check_vocabulary(model)
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

    return _is_within_rounding(way, model, error, rounding, leak)


def _probe_batch(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """The same for two rows, the second behind padding: they accept different numbers of tokens,
    and go on with different drafts at different positions, with holes in the second."""
    _check_vocabulary(model)
    text = torch.tensor(
        [_PROMPT + _PATH, [0] * _PADDING + _OTHER_TEXT], device=model.device
    )  # (2, 12)
    mask = torch.ones_like(text)
    mask[1, :_PADDING] = 0
    reference = _rows_one_after_another(model, model_kwargs, text, mask)  # (2, 5, vocab_size)
    at_once = model(
        text,
        attention_mask=mask,
        position_ids=(mask.cumsum(dim=-1) - 1).clamp(min=0),
        use_cache=False,
    ).logits[:, len(_PROMPT) - 1 :]

    verified = _rows_verified(model, model_kwargs, text, mask, _DISTRACTORS)
    other = _rows_verified(model, model_kwargs, text, mask, _OTHER_DISTRACTORS)
    vocab_size = reference.shape[-1]
    # What the first pass said of both rows, and the second of the rest: (5 + 1 + 5 + 3, vocab_size)
    expected = torch.cat([reference[0], reference[1], reference[0, -1:], reference[1, -3:]])
    return _is_within_rounding(
        BatchVerification,
        model,
        error=_difference(verified, expected),
        rounding=_difference(at_once.reshape(-1, vocab_size), reference.reshape(-1, vocab_size)),
        leak=_difference(other, verified),
    )


def _check_vocabulary(model: PreTrainedModel) -> None:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    if vocab_size < _VOCABULARY:
        raise ValueError(f"a vocabulary of {vocab_size} is too small to probe")


def _is_within_rounding(
    way: type[Verification] | type[BatchVerification],
    model: PreTrainedModel,
    error: float,
    rounding: float,
    leak: float,
) -> bool:
    """Whether a way is exact.

    Args:
        way (`type`): It, for the log.
        model (`PreTrainedModel`): The target model.
        error (`float`): How far its logits are off.
        rounding (`float`): How far those of the same tokens in one pass without a cache are off.
        leak (`float`): How much the other branches matter.
    """
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


def _rows_one_after_another(
    model: PreTrainedModel, model_kwargs: dict[str, Any], text: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The logits after the prompts and after each token of the paths, by the plain steps of batched
    decoding, `(2, 5, vocab_size)`."""
    length = len(_PROMPT) - 1
    kwargs = _fresh_batch_kwargs(model, model_kwargs, mask[:, :length])
    outputs = model._prefill(text[:, :length], GenerationConfig(), kwargs)
    steps = []
    for length in range(len(_PROMPT), text.shape[1] + 1):
        kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
        model_inputs = model.prepare_inputs_for_generation(
            text[:, :length], next_sequence_length=1, **kwargs
        )
        outputs = model(**model_inputs, return_dict=True)
        steps.append(outputs.logits[:, -1])
    return torch.stack(steps, dim=1)


def _rows_verified(
    model: PreTrainedModel,
    model_kwargs: dict[str, Any],
    text: torch.Tensor,
    mask: torch.Tensor,
    distractors: list[int],
) -> torch.Tensor:
    """The logits of a pass over a tree for each row, of which the first keeps three nodes of the
    path and the second keeps one; and of a pass over what is left, which for the first row is no
    draft. `(14, vocab_size)`."""
    length = len(_PROMPT) - 1
    kwargs = _fresh_batch_kwargs(model, model_kwargs, mask[:, :length])
    verification = BatchVerification(model, GenerationConfig(), kwargs)
    verification.prefill(text[:, :length])
    drafts, paths = zip(
        *(_tree(row, distractors) for row in text[:, length + 1 :].tolist()), strict=True
    )
    first = verification.verify(text[:, length].numpy(force=True), list(drafts))
    verification.commit([paths[0][:3], paths[1][:1]])
    rest = text[1, length + 2 :].tolist()
    last_tokens = np.array([_PATH[-1], rest[0]])
    second = verification.verify(last_tokens, [DraftTree.empty(), DraftTree.chain(rest[1:])])
    of_paths = [
        logits[[0, *(1 + node for node in path)]] for logits, path in zip(first, paths, strict=True)
    ]
    return torch.cat([*of_paths, second[0, :1], second[1, : len(rest)]])


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
    """The path as a chain or in a tree. And the path's nodes."""
    if not way.takes_trees:
        return DraftTree.chain(_PATH), list(range(len(_PATH)))
    return _tree(_PATH, distractors)


def _tree(path_tokens: list[int], distractors: list[int]) -> tuple[DraftTree, list[int]]:
    """A tree with all distractors before the path's first node and one before each next node. And
    the path's nodes."""
    tokens, parents, path = list(distractors), [ROOT] * len(distractors), []
    parent = ROOT
    for depth, token in enumerate(path_tokens):
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


def _fresh_batch_kwargs(
    model: PreTrainedModel, model_kwargs: dict[str, Any], mask: torch.Tensor
) -> dict[str, Any]:
    """The same for the probe's rows, of which `mask` `(2, length)` tells the padding."""
    position_ids = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    kwargs = _fresh_kwargs(model, model_kwargs)
    return {**kwargs, "attention_mask": mask, "position_ids": position_ids}
