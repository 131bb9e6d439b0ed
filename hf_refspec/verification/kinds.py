"""The kinds of verifiers: each a layout of passes and a way to keep entries, where it can be used.

| kind | drafts | rows | cache |
| --- | --- | --- | --- |
| [`TREE`] | trees | any number | of text or sliding windows, in place |
| [`STATIC`] | trees | any number | static, passes of a few widths that can be compiled |
| [`REPRODUCIBLE`] | chains | any number | static, passes of one width |
| [`CHAIN`] | chains | one | cropped |
| [`RECURRENT`] | chains | one | running state |
| [`PLAIN`] | none | one | any |

The model itself decides which of them is exact, see `probe.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import (
    GenerationConfig,
    PreTrainedModel,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..text_config import text_config
from ..transformers_names import USUAL_ARGUMENTS, belongs_to_caller, keeps_state_in_modules
from .caches import (
    caches_images,
    find_cache,
    has_static_layers,
    holds_running_state,
    new_cache,
)
from .entries import CroppedEntries, Entries, RunningState
from .in_place import InPlaceEntries, fits_in_place
from .inputs import Inputs, MaskedInputs, OrderedInputs, attends_packed, takes_masks
from .layouts import branching, in_order, is_unpackable, padded
from .passes import PassResult
from .slots import WIDTHS, SlottedEntries, has_begun

# A pass of this width costs up to 1.3 plain steps in bfloat16 on a CPU, and 1.06 on an H100; wider
# ones take longer drafts, and every pass without a draft costs as much.
_REPRODUCIBLE_WIDTH = 16


@dataclass(frozen=True)
class Kind:
    """A kind of verifier.

    Attributes:
        name (`str`): As `DraftStats.verification` names it; some are values of `verification=` too.
        layout (`Callable`): One forward pass: `(model, pass, entries, inputs) -> PassResult`.
        entries (`Callable`): What keeps keys and values of a call: `(model, generation_config,
            model_kwargs) -> Entries`.
        inputs (`type`): The arguments of passes.
        supports (`Callable`): Whether it may be tried at all with this model and this cache:
            `(model, model_kwargs) -> bool`.
        takes_trees (`bool`): Whether drafts may branch.
        takes_several_tokens (`bool`): Whether a pass may run several tokens behind the cached ones.
        drops_rows (`bool`): Whether rows can leave.
        same_bits (`bool`): Whether logits are the same bit by bit with drafts and without.
        widths (`tuple[int, ...]`, *optional*): The tokens of a row that a pass is padded to, where
            the cache has room.
    """

    name: str
    layout: Callable[..., PassResult]
    entries: Callable[[PreTrainedModel, GenerationConfig, dict[str, Any]], Entries]
    inputs: type[Inputs]
    supports: Callable[[PreTrainedModel, dict[str, Any]], bool]
    takes_trees: bool = False
    takes_several_tokens: bool = True
    drops_rows: bool = True
    same_bits: bool = False
    widths: tuple[int, ...] | None = None


def _keeps_text(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Needs a cache whose layers keep the text or a sliding window, see also [`takes_masks`].

    The configuration is asked too: a model with chunked attention may be given a cache that keeps
    everything, and would still need another mask; and where rotary frequencies depend on the length
    of the text, some models count the nodes of a tree as that (Phi-3).
    """
    cache = find_cache(model_kwargs)
    return (
        cache is not None
        and takes_masks(model, model_kwargs)
        and fits_in_place(cache)
        and fits_in_place(new_cache(model))
    )


def _in_place(
    model: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Entries:
    is_usual = model_kwargs.keys() <= USUAL_ARGUMENTS
    by_row = (model_kwargs.get(name) for name in ("attention_mask", "position_ids"))
    has_several_rows = any(value is not None and value.shape[-2] > 1 for value in by_row)
    packs = (
        (is_usual or not has_several_rows) and attends_packed(model) and not is_unpackable(model)
    )
    return InPlaceEntries(model, model_kwargs, packs)


def _is_static(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Needs a cache that keeps the whole text or has not begun, see also [`takes_masks`]."""
    cache = find_cache(model_kwargs)
    if not isinstance(cache, StaticCache) or not takes_masks(model, model_kwargs):
        return False
    layers = {type(layer) for layer in cache.layers}
    if has_begun(cache) or not layers <= {StaticLayer, StaticSlidingWindowLayer}:
        return layers == {StaticLayer}
    # A given cache whose layers all keep a window does not say how many tokens are to fit.
    window = getattr(text_config(model), "sliding_window", None)
    return not belongs_to_caller(cache) or not all(
        layer.is_sliding and layer.max_cache_len == window for layer in cache.layers
    )


def _can_be_cropped(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    cache = find_cache(model_kwargs)
    # A stateful model with another kind of cache keeps its state somewhere else.
    return (
        cache is not None
        and not has_static_layers(cache)
        and not holds_running_state(cache)
        and not keeps_state_in_modules(model)
        and not caches_images(text_config(model), model_kwargs)
    )


def _may_hold_a_state(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    # A cache of the model's own kind may hold a state without saying so.
    cache = find_cache(model_kwargs)
    return cache is not None and not has_static_layers(cache)


def _of_type(entries: type[Entries]) -> Callable[..., Entries]:
    return lambda model, generation_config, model_kwargs: entries(find_cache(model_kwargs))


TREE = Kind("tree", branching, _in_place, MaskedInputs, _keeps_text, takes_trees=True)

STATIC = Kind(
    "static",
    padded,
    partial(SlottedEntries, widths=WIDTHS),
    MaskedInputs,
    _is_static,
    takes_trees=True,
    drops_rows=False,
    widths=WIDTHS,
)

# In bfloat16 a pass over several tokens rounds otherwise than one over a single token, so that
# drafts may change a near-tie. Not so if all passes have one shape, and attention sums in one
# order: rows of a matrix product of one shape do not depend on each other, and masked entries add
# exact zeros. Attention sums over slots, so that drafts are chains: in a chain each token stands
# in the slot that it keeps, in a tree it may not. Where tokens choose among experts, what others
# choose changes the shapes, except with transformers' `experts_implementation="batched_mm"`. The
# probe compares the bits.
REPRODUCIBLE = Kind(
    "reproducible",
    padded,
    partial(SlottedEntries, widths=(_REPRODUCIBLE_WIDTH,), same_bits=True),
    MaskedInputs,
    _is_static,
    drops_rows=False,
    same_bits=True,
    widths=(_REPRODUCIBLE_WIDTH,),
)

CHAIN = Kind("chain", in_order, _of_type(CroppedEntries), OrderedInputs, _can_be_cropped)

RECURRENT = Kind("chain", in_order, _of_type(RunningState), OrderedInputs, _may_hold_a_state)

# For models that cannot take several tokens behind a cache. Speculative retrieval runs on them as
# well: when more than one token is pending, the whole text runs again, as in a call of its own.
PLAIN = Kind(
    "plain",
    in_order,
    _of_type(Entries),
    OrderedInputs,
    lambda model, model_kwargs: True,
    takes_several_tokens=False,
)
