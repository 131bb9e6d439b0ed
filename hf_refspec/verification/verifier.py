"""Verification: one forward pass of the target model over rows and their drafts.

A [`Verifier`] lives for one call of `generate`. Each step it takes the rows and a draft tree for
each, returns the target's logits after the last token of each row and after every draft node, and
then receives the accepted nodes. The first pass, with nothing cached, is the prefill.

What differs between kinds of verifiers stands in `kinds.py`: how a pass is laid out, and how the
cache keeps the accepted tokens and drops the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..drafting.tree import DraftTree
from ..transformers_names import cache_name, prefill
from .caches import find_cache, fresh_kwargs
from .inputs import Inputs
from .kinds import Kind
from .passes import FixedTokens, Pass, PassResult, TokenSequence
from .prompt_logits import last_token, records_prompt


class Verifier:
    """Forward passes of one target model over the same rows, with the cache kept in step.

    Attributes:
        kind ([`Kind`]): How passes are laid out and entries kept.
        model_kwargs (`dict`): The keyword arguments that `generate` prepared for the prompt.
        entries ([`Entries`]): Keeps keys and values.
        inputs ([`Inputs`], *optional*): The arguments of passes after the prefill.
        cached (`list[int]`): How many tokens of each row the cache holds; the others are pending
            and run in the next pass. Empty before the prefill.
    """

    def __init__(
        self,
        kind: Kind,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.kind = kind
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
        drafts: Sequence[DraftTree],
        padded_size: Callable[[int], int] = int,
        records: bool = False,
    ) -> PassResult:
        """One forward pass over the pending tokens and the draft of each of R rows; see [`Pass`].
        The first pass, the prefill, has no drafts, and later ones have its rows, but for those that
        [`select`] drops and [`join`] adds."""
        if self.entries.cache is None:  # the state is not in a cache
            outputs = self.model(input_ids=rows[0].ids, use_cache=False, return_dict=True)
            return PassResult(outputs.logits[0, -1:], [0], len(rows[0]))
        if not self.kind.takes_several_tokens and self.cached and len(rows[0]) - self.cached[0] > 1:
            self.begin_again(rows[0])
        if not self.cached:
            return self._prefill(rows, records)
        now = Pass(rows, drafts, self.cached, records, padded_size)
        self.entries.before(now)
        try:
            result = self.kind.layout(self.model, now, self.entries, self.inputs)
        except BaseException:  # ctrl-C in the middle of a pass, a user's hook
            self.entries.undo()
            raise
        self._last = now
        return result

    def keep(self, paths: Sequence[list[int] | None]) -> None:
        """Keeps in the cache each row's pending tokens and the nodes of its path, and nothing of a
        row whose path is `None`. A prefill is kept as it is."""
        if self._last is not None:
            self.cached = self.entries.keep(self._last, paths)
            self._last = None

    def mark(self) -> Callable[[], None]:
        """A function that goes back to the present, any number of times; the rows have done so, or
        do so before the next pass."""
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
            restore_entries()

        return go_back

    def crop(self, length: int) -> bool:
        """Drops all but the first `length` tokens of a single row; returns `False` if its cache
        cannot be cropped."""
        if not self.entries.crop(length, self.cached[0] - length):
            return False
        self.cached = [length]
        return True

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
            self.forward(rows, [DraftTree.empty()] * len(rows))
            self.keep([None if whole else [] for whole in is_whole])
        self.entries.close(self.cached)

    def abandon(self) -> None:
        """Ends a call after an exception: the cache then holds a prefix of each row and nothing
        else."""
        if self._last is not None:
            self.keep([[]] * len(self._last.rows))
        if len(self.cached) > 1 and self.inputs is not None:
            # They may differ in length, but for their prompts.
            self.cached = [self.inputs.prompt_length] * len(self.cached)
        self.entries.close(self.cached)

    def select(self, rows: list[int]) -> None:
        """Goes on with some of the rows; the others leave the cache and all later passes."""
        assert self.inputs is not None
        self.cached = [self.cached[i] for i in rows]
        self.entries.select(rows)
        self.inputs.select(rows)

    def join(self, other: Verifier) -> None:
        """Adds the only row of another verifier of this kind, which has prefilled it."""
        assert self.inputs is not None
        self.cached = [*self.cached, *other.cached]
        self.entries.join(other.entries)
        self.inputs.join(other.inputs)

    def begin_again(self, row: TokenSequence) -> None:
        """Replaces the cache by an empty one, without padding or what else the call gave: the next
        pass is a prefill of the row as it is now."""
        if self.entries.cache is not None:
            mask = torch.ones_like(row.ids)
            self.model_kwargs = fresh_kwargs(self.model, self.model_kwargs, mask)
            self.entries = self.kind.entries(self.model, self.generation_config, self.model_kwargs)
            self.cached = []

    def _prefill(self, rows: Sequence[TokenSequence], records: bool) -> PassResult:
        """Runs the prompts through the model as `generate` does."""
        input_ids = torch.cat([row.ids for row in rows])  # (R, n)
        count, length = input_ids.shape
        kwargs = self.model_kwargs
        states: list[torch.Tensor] = []
        if records and records_prompt(self.model, kwargs):
            kwargs = {**kwargs, "logits_to_keep": last_token(states)}
        self.entries.before_prefill(count)
        of_row = torch.arange(count)  # the prompt of each row
        shared = None
        if count > 1 and self.entries.joins:
            shared = _shared_prompts(input_ids, kwargs)
        if shared is not None:  # a prompt that several rows have runs once
            first, of_row = shared
            for name in ("attention_mask", "position_ids"):
                if (value := kwargs.get(name)) is not None and value.shape[-2] == count:
                    kwargs = {**kwargs, name: value.index_select(-2, first.to(value.device))}
            input_ids = input_ids[first.to(input_ids.device)]
        outputs = prefill(self.model, input_ids, self.generation_config, kwargs)
        cache = find_cache(outputs)
        if cache is not None and cache is not self.entries.cache:
            self.model_kwargs = {**self.model_kwargs, cache_name(outputs): cache}
            self.entries.cache = cache
        self.cached = [length] * count
        self.inputs = self.kind.inputs(self.model, self.model_kwargs, outputs, count, length)
        prompts = of_row.tolist()
        self.entries.begin(length, self.model_kwargs, prompts)
        logits = outputs.logits[:, -1].clone()  # a view would keep the prompts'
        if shared is not None:
            logits = logits[of_row.to(logits.device)]
        roots = [*range(count)]
        return PassResult(logits, roots, input_ids.numel(), prompts=prompts, states=states)


def _shared_prompts(
    input_ids: torch.Tensor, model_kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The rows `(m,)` that stand for the different ones among prompts `(R, n)`, on the host, and
    for each row the index of its prompt among these; `None` if all differ. Prompts are the same if
    their ids, mask and positions are."""
    parts = [input_ids]
    for name in ("attention_mask", "position_ids"):
        if (value := model_kwargs.get(name)) is not None:
            per_row = value.movedim(-2, 0).flatten(1)  # some models have several positions a token
            parts.append(per_row.expand(len(input_ids), -1))
    prompts = torch.cat(parts, dim=1)
    found, of_row = prompts.unique(dim=0, return_inverse=True)
    if len(found) == len(prompts):
        return None
    of_row = of_row.cpu()
    numbers = of_row.tolist()
    return torch.tensor([numbers.index(prompt) for prompt in range(len(found))]), of_row
