"""Verification: one forward pass of the target model over rows and their drafts.

A [`Verifier`] lives for one call of `generate`. Each step it takes the rows and a draft tree for
each, returns the target's logits after the last token of each row and after every draft node, and
then receives the accepted nodes. The first pass, with nothing cached, is the prefill.

It is of a [`Kind`], which combines a layout of passes and entries, the way the cache keeps the
accepted tokens and drops the others:

| kind | drafts | rows | layout | entries |
| --- | --- | --- | --- | --- |
| [`TREE`] | trees | any number | packed or side by side, `layouts.py` | `entries.py` |
| [`STATIC`] | trees | any number | one of a few widths, `slots.py` | `slots.py` |
| [`REPRODUCIBLE`] | chains | any number | one width | `slots.py` |
| [`CHAIN`] | chains | one | in order, `in_order.py` | cropped, `in_order.py` |
| [`RECURRENT`] | chains | one | the same | running state, `in_order.py` |
| [`PLAIN`] | none | one | the same | any |

The model itself decides which kinds are exact, see `probe.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..drafting.contract import States
from ..drafting.tree import DraftTree
from ..transformers_names import SHARED_KV, cache_name, shared_layers
from .caches import (
    can_be_cropped,
    find_cache,
    fresh_kwargs,
    is_static,
    keeps_text,
    may_hold_state,
)
from .entries import Entries, InPlaceEntries
from .in_order import CroppedEntries, OrderedInputs, RunningState, causal_pass
from .layouts import tree_pass
from .passes import (
    FixedTokens,
    Inputs,
    MaskedInputs,
    Pass,
    PassResult,
    Prefill,
    TokenSequence,
    hidden_states_of,
    run_prompts,
)
from .slots import WIDTHS, SlottedEntries, fixed_width_pass

# A pass of this width costs up to 1.3 plain steps in bfloat16 on a CPU, and 1.06 on an H100; wider
# ones take longer drafts, and every pass without a draft costs as much.
_REPRODUCIBLE_WIDTH = 16


@dataclass(frozen=True)
class Kind:
    """A kind of verifier."""

    # As `DraftStats.verification` names it; some are values of `verification=` too.
    name: str
    # One forward pass: `(model, pass, entries, inputs) -> PassResult`.
    layout: Callable[..., PassResult]
    # Keeps the keys and values of a call: `(model, generation_config, model_kwargs) -> Entries`.
    entries: Callable[..., Entries]
    inputs: type[Inputs]  # the arguments of passes
    # True if it may be tried at all with a model and its keyword arguments.
    supports: Callable[[PreTrainedModel, dict[str, Any]], bool]
    takes_trees: bool = False  # true if drafts may branch
    # The tokens of a row that a pass is padded to, where the cache has room; none if to any number.
    # With widths all rows stay to the end of the call.
    widths: tuple[int, ...] = ()


TREE = Kind("tree", tree_pass, InPlaceEntries, MaskedInputs, keeps_text, takes_trees=True)

STATIC = Kind(
    "static",
    fixed_width_pass,
    partial(SlottedEntries, widths=WIDTHS),
    MaskedInputs,
    is_static,
    takes_trees=True,
    widths=WIDTHS,
)

# In bfloat16 a pass over several tokens rounds otherwise than one over a single token, so that
# drafts may change a near-tie. They cannot if all passes have one shape, and attention sums in one
# order: rows of a matrix product of one shape do not depend on each other, and masked slots add
# exact zeros. Attention sums over slots, so that drafts are chains: in a chain each token is in
# the slot that it keeps, in a tree it may not be. Where tokens choose among experts, what others
# choose changes the shapes, except with transformers' `experts_implementation="batched_mm"`. The
# probe compares the bits.
REPRODUCIBLE = Kind(
    "reproducible",
    fixed_width_pass,
    partial(SlottedEntries, widths=(_REPRODUCIBLE_WIDTH,)),
    MaskedInputs,
    is_static,
    widths=(_REPRODUCIBLE_WIDTH,),
)

CHAIN = Kind("chain", causal_pass, CroppedEntries, OrderedInputs, can_be_cropped)

RECURRENT = Kind("chain", causal_pass, RunningState, OrderedInputs, may_hold_state)

# For models that cannot take several tokens after a cached prefix. Speculative retrieval runs on
# them as well: when more than one token is pending, the whole text runs again, as in a call of its
# own.
PLAIN = Kind("plain", causal_pass, Entries, OrderedInputs, lambda _model, _model_kwargs: True)


class Verifier:
    """Forward passes of one target model over the same rows, with the cache kept in step.

    Attributes:
        kind ([`Kind`]): The layout of passes, and the way in which keys and values are kept.
        model_kwargs (`dict`): The keyword arguments that `generate` prepared for the prompt.
        entries ([`Entries`]): Keeps keys and values.
        rounds_prompts (`bool`): True if the products of prompts may be rounded otherwise than in
            the model's own calls.
        inputs ([`Inputs`], *optional*): The arguments of passes after the prefill.
        cached (`list[int]`): The tokens of each row that the cache holds; the others are pending
            and run in the next pass. Empty before the prefill.
    """

    def __init__(
        self,
        kind: Kind,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        rounds_prompts: bool = False,
    ) -> None:
        self.kind = kind
        self.rounds_prompts = rounds_prompts
        self.model = model
        self.generation_config = generation_config
        self.model_kwargs = dict(model_kwargs)
        self.entries = kind.entries(model, generation_config, self.model_kwargs)
        self.inputs: Inputs | None = None
        self.cached: list[int] = []
        self._last: Pass | None = None  # until `keep` has received the accepted nodes

    def forward(
        self,
        rows: Sequence[TokenSequence],
        drafts: Sequence[DraftTree | None] | None = None,
        least_tokens: int = 0,
    ) -> PassResult:
        """One forward pass over the pending tokens and the draft of each of R rows, by default
        none; see [`Pass`]. The first pass, the prefill, has no drafts; later ones have its rows,
        without what [`select`] drops and with what [`join`] adds."""
        began = perf_counter()
        if self.entries.cache is None:  # the state is not in a cache
            outputs = self.model(input_ids=rows[0].ids, use_cache=False, return_dict=True)
            return PassResult(outputs.logits[0, -1:], [0], len(rows[0]), began=began)
        if self.kind is PLAIN and self.cached and len(rows[0]) - self.cached[0] > 1:
            self._begin_again(rows[0])
        if not self.cached:
            return replace(self._prefill(rows), began=began)
        if drafts is None:
            drafts = [DraftTree.empty()] * len(rows)
        pass_ = Pass(rows, drafts, self.cached, least_tokens)
        self.entries.before(pass_)
        try:
            result = self.kind.layout(self.model, pass_, self.entries, self.inputs)
        except BaseException:  # ctrl-C in the middle of a pass, a user's hook
            self.entries.undo()
            raise
        self._last = pass_
        return replace(result, began=began)

    def keep(self, paths: Sequence[list[int] | None]) -> None:
        """Keeps in the cache each row's pending tokens and the nodes of its path, and nothing of a
        row whose path is `None`. A prefill is kept as it is."""
        if self._last is not None:
            self.cached = self.entries.keep(self._last, paths)
            self._last = None

    def states(
        self, row: TokenSequence, result: PassResult, draft: DraftTree, path: Sequence[int]
    ) -> States | None:
        """The hidden states that a pass returned of the tokens that are kept; `None` for several
        rows."""
        if len(self.cached) > 1:
            return None
        assert self.inputs is not None and result.hidden_states is not None
        length = len(row) - 1  # the last token has not run
        states = States(result.hidden_states, self.inputs.last_position(0, length))
        pending = len(states) - len(draft)
        tokens = [*range(pending), *(pending + node for node in path)]
        kept = torch.tensor(tokens, device="cpu")
        hidden_states = tuple(
            layer if layer is None else layer[:, kept.to(layer.device, non_blocking=True)]
            for layer in states.hidden_states
        )
        shared = shared_layers(self.model) if self.model_kwargs.get(SHARED_KV) else {}
        layers = self.entries.keys_and_values() if shared else []
        shared_kv = {name: layers[layer] for name, layer in shared.items()} or None
        return replace(states, hidden_states=hidden_states, shared_kv=shared_kv)

    def mark(self) -> Callable[[], None]:
        """A function that goes back to the present, any number of times, as the rows have done."""
        entries = self.entries
        cached = self.cached
        model_kwargs = self.model_kwargs
        inputs = copy(self.inputs)
        restore_entries = entries.mark()

        def go_back() -> None:
            self.entries = entries
            self.cached = cached
            self.model_kwargs = model_kwargs
            self.inputs = copy(inputs)
            self._last = None
            restore_entries()

        return go_back

    def finish(self, ids: torch.Tensor, own_lengths: Sequence[int]) -> None:
        """Leaves the cache as plain decoding would: with all of the returned ids `(R, length)` but
        the last column. The first ids of each row are its own, the others padding. It takes one
        more pass where some of them are not cached."""
        rows = [FixedTokens(row[None, :-1]) for row in ids]
        length = ids.shape[1] - 1
        cached = self.entries.lengths_to_finish(self.cached, length)
        self.cached = [min(n, own, length) for n, own in zip(cached, own_lengths, strict=True)]
        is_whole = [cached == length for cached in self.cached]
        if not all(is_whole):
            self.forward(rows)
            self.keep([None if whole else [] for whole in is_whole])
        self.entries.close(self.cached)

    def abandon(self) -> None:
        """Ends a call after an exception: the cache then holds a prefix of each row alone."""
        if self._last is not None:
            self.keep([[]] * len(self._last.rows))
        if len(self.cached) > 1 and self.inputs is not None:
            # They may differ in length, except their prompts.
            self.cached = [self.inputs.prompt_length] * len(self.cached)
        self.entries.close(self.cached)

    def select(self, rows: list[int]) -> None:
        """Keeps some of the rows; the others leave the cache and all later passes."""
        assert self.inputs is not None
        self.cached = [self.cached[i] for i in rows]
        self.entries.select(rows)
        self.inputs.select(rows)

    def join(self, other: Verifier) -> None:
        """Adds the only row of another verifier of this kind, which has prefilled it."""
        assert self.inputs is not None and other.inputs is not None
        self.cached = [*self.cached, *other.cached]
        self.entries.join(other.entries)
        self.inputs.join(other.inputs)

    def _begin_again(self, row: TokenSequence) -> None:
        """Replaces the cache by an empty one, without the padding and other arguments of the call:
        the next pass is a prefill of the present row."""
        mask = torch.ones_like(row.ids)
        self.model_kwargs = fresh_kwargs(self.model, self.model_kwargs, mask)
        self.entries = self.kind.entries(self.model, self.generation_config, self.model_kwargs)
        self.cached = []

    def _prefill(self, rows: Sequence[TokenSequence]) -> PassResult:
        """Runs the prompts through the model as `generate` does."""
        input_ids = torch.cat([row.ids for row in rows])  # (R, n)
        count, length = input_ids.shape
        kwargs = self.model_kwargs
        self.entries.before_prefill(count)
        prompts = [*range(count)]  # of each row
        if count > 1 and self.entries.joins:
            prompts = _distinct_prompts(input_ids, kwargs)
        is_shared = len({*prompts}) < count
        if is_shared:  # a prompt that several rows have runs once
            first = torch.tensor([prompts.index(i) for i in range(max(prompts) + 1)], device="cpu")
            for name in ("attention_mask", "position_ids"):
                if (value := kwargs.get(name)) is not None and value.shape[-2] == count:
                    kwargs = {**kwargs, name: value.index_select(-2, first.to(value.device))}
            input_ids = input_ids[first.to(input_ids.device)]
        outputs = run_prompts(
            self.model, input_ids, self.generation_config, kwargs, self.rounds_prompts
        )
        cache = find_cache(outputs)
        if cache is not None and cache is not self.entries.cache:
            self.model_kwargs = {**self.model_kwargs, cache_name(outputs): cache}
            self.entries.replace(cache)
        prefill = Prefill(self.model, self.model_kwargs, outputs, length, prompts)
        self.cached = [length] * count
        self.inputs = self.kind.inputs(prefill)
        self.entries.begin(prefill)
        logits = outputs.logits[:, -1].clone()  # a view would keep the prompts'
        if is_shared:
            logits = logits[torch.tensor(prompts, device="cpu").to(logits.device)]
        return PassResult(
            logits=logits,
            roots=[*range(count)],
            pass_tokens=input_ids.numel(),
            hidden_states=hidden_states_of(outputs, slice(None)),
        )


def _distinct_prompts(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """For each of the rows `(R, n)` the number of its prompt, in the order of their first rows.
    Prompts are the same if their ids, mask and positions are."""
    mask = model_kwargs.get("attention_mask")
    parts = [input_ids, None if mask is None else mask != 0, model_kwargs.get("position_ids")]
    of_rows = []
    for part in parts:
        if part is not None:
            per_row = part.movedim(-2, 0).flatten(1)  # some models have several positions a token
            per_row = per_row.expand(len(input_ids), -1).numpy(force=True)
            of_rows.append([row.tobytes() for row in per_row])
    numbers: dict[tuple[bytes, ...], int] = {}
    return [numbers.setdefault(prompt, len(numbers)) for prompt in zip(*of_rows, strict=True)]
