"""Verification: one forward pass of the target model over rows and their drafts.

A [`Verifier`] lives for one call of `generate`. Each step it takes the rows and a draft tree for
each, returns the target's logits after the last token of each row and after every draft node, and
then receives the accepted nodes. The first pass, with nothing cached, is the prefill.

Each combines how a pass is laid out with how its cache keeps the accepted tokens and drops the
others, see `cache.py`:

| verifier | layout | cache |
| --- | --- | --- |
| [`TreeVerifier`] | all branches at once, any number of rows (REST, arXiv 2311.08252) | in place |
| [`StaticVerifier`] | the same, padded to a few widths that can be compiled | slots |
| [`ReproducibleVerifier`] | one path at one width | slots |
| [`ChainVerifier`] | one path of one row, under the model's own causal mask | cropped |
| [`RecurrentVerifier`] | the same | running state |
| [`PlainVerifier`] | no draft at all | any |

The model itself decides which of them is exact, see `probe.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..drafting.tree import DraftTree
from ..text_config import text_config
from ..transformers_names import cache_name, next_kwargs, prefill
from .cache import Entries, FixedTokens, Pass, TokenSequence, find_cache, holds_running_state
from .prompt_states import last_token, records_prompt

# The logits `(N, vocab_size)` of all rows of a pass, and the index of each row's root in them.
PassLogits: TypeAlias = tuple[torch.Tensor, list[int]]


@dataclass(frozen=True, slots=True)
class CacheMark:
    """A snapshot of a verifier and its cache, see [`Verifier.mark`]."""

    attributes: dict[str, Any]  # replaced by later passes, never changed
    go_back: Callable[[], None]  # of the entries


class Verifier:
    """Forward passes of one target model over the same rows, with the cache kept in step, by the
    keyword arguments that `generate` prepared for the prompt."""

    name: str
    takes_trees = False
    # Whether a pass may run several tokens behind the cached ones.
    takes_several_tokens = True
    # Whether rows can leave, see `select`.
    drops_rows = True
    # Whether a pass costs what the tokens of all rows cost together; otherwise each row costs as
    # much as the widest.
    packs = False
    # Whether its logits are the same bit by bit with drafts and without.
    same_bits = False
    # The numbers of tokens of a row that a pass is padded to; `None` where it is not padded.
    widths: tuple[int, ...] | None = None
    # How its cache keeps accepted tokens and drops the others.
    entries_type: type[Entries] = Entries

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.model = model
        self.probed = True  # whether it has been found exact; until then nothing may be drafted
        self.vocab_size: int = text_config(model).vocab_size
        self.generation_config = generation_config
        self.model_kwargs = dict(model_kwargs)
        self.entries = self._entries(find_cache(model_kwargs))
        # Where it is a list, the prefill appends the inputs of the output layer to it, tensors of
        # shape (R, n, hidden_size).
        self.prompt_states: list[torch.Tensor] | None = None
        # How many tokens of each row the cache holds; the others are pending and run in the next
        # pass. Empty before the prefill. An array would take longer for a few numbers.
        self.cached: list[int] = []
        # The tokens of all rows in the last pass, including padding.
        self.pass_tokens = 0
        # The size to which a pass over this number of tokens is padded, where it `packs`.
        self.padded_size: Callable[[int], int] = int
        # Whether the last pass ran the last token of each row, its draft, and nothing else that
        # plain decoding would not have run: its time says what a pass costs.
        self.in_step = False
        # For each row, the index of its prompt among those that the prefill ran: rows may share.
        self.prompts: list[int] = []
        # A row's position of a token less its index: left padding has no position, and a given
        # cache may hold tokens that the ids lack.
        self._offsets: list[int] = []
        self._prompt_length = 0
        self._last: Pass | None = None  # until `keep` has received the accepted nodes

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        """Whether this verifier may be tried at all with this model and this cache."""
        raise NotImplementedError

    def _entries(self, cache: Any) -> Entries:
        return self.entries_type(cache)

    @property
    def cache(self) -> Any:
        """The cache; a model may replace it."""
        return self.entries.cache

    def forward(self, rows: Sequence[TokenSequence], drafts: Sequence[DraftTree]) -> PassLogits:
        """One forward pass over the pending tokens of each of R rows, the same in each pass, and
        its draft, without nodes in the first pass.

        Returns:
            The logits `(N, vocab_size)` of all rows, and for each row the index of its root: the
            logits after its last token, which those after each node of its draft follow.
        """
        if not self.cached:
            return self._prefill(rows)
        now = Pass.over(rows, drafts, self.cached)
        self.pass_tokens = now.size * len(rows)
        self.in_step = self.entries.reruns or max(now.pending) == 1
        self.entries.before(now)
        try:
            logits = self._run(now)
        except BaseException:  # ctrl-C in the middle of a pass, a user's hook
            self._last = None
            self.entries.undo()
            raise
        self._last = now
        return logits

    def keep(self, paths: Sequence[list[int] | None]) -> None:
        """Keeps in the cache each row's pending tokens and the nodes of its path, and nothing of a
        row whose path is `None`. A prefill is kept as it is."""
        if self._last is not None:
            self.cached = self.entries.keep(self._last, paths)
            self._last = None

    def mark(self) -> CacheMark:
        """A snapshot for [`~Verifier.roll_back`]."""
        names = ("entries", "cached", "model_kwargs", "_offsets", "_prompt_length")
        attributes = {name: getattr(self, name) for name in names}
        return CacheMark(attributes, self.entries.mark())

    def roll_back(self, mark: CacheMark) -> None:
        """Goes back to a mark; the rows have done so, or do so before the next pass."""
        vars(self).update(mark.attributes)
        mark.go_back()

    def crop(self, length: int) -> bool:
        """Drops all but the first `length` tokens of a single row; returns `False` if its cache
        cannot be cropped."""
        if not self.entries.crop(length, self.cached[0] - length):
            return False
        self.cached = [length]
        return True

    def finish(self, ids: torch.Tensor, own: Sequence[int]) -> None:
        """Leaves the cache as plain decoding would: with all of the returned ids `(R, length)` but
        the last column. The first `own` ids of each row are its own, the others padding. It takes
        one more pass where some of them are not cached."""
        rows = [FixedTokens(row[None, :-1]) for row in ids]
        length = ids.shape[1] - 1
        self.cached = [min(n, end, length) for n, end in zip(self.cached, own, strict=True)]
        is_whole = [cached == length for cached in self.cached]
        if not all(is_whole):
            self.forward(rows, [DraftTree.empty()] * len(rows))
            self.keep([None if whole else [] for whole in is_whole])
        self.entries.close(self.cached)

    def release(self) -> None:
        """Ends a call whose cache is not returned."""

    def abandon(self) -> None:
        """Ends a call after an exception: the cache then holds a prefix of each row and nothing
        else."""
        if self._last is not None:
            self.keep([[]] * len(self._last.rows))
        if len(self.cached) > 1:  # they may differ in length, but for their prompts
            self.cached = [self._prompt_length] * len(self.cached)
        self.entries.close(self.cached)

    def select(self, rows: list[int]) -> None:
        """Goes on with some of the rows; the others leave the cache and all later passes."""
        raise NotImplementedError(f"{type(self).__name__} takes one row")

    def last_position(self, index: int, row: TokenSequence) -> int:
        """The position of the last token of the row with this index."""
        return len(row) - 1 + self._offsets[index]

    @property
    def most_nodes(self) -> int:
        """The most draft nodes of a row that the next pass can take."""
        return sys.maxsize

    @property
    def kind_of_pass(self) -> str:
        """The kind of pass, which its cost depends on beside its number of tokens."""
        return self.name

    def _prefill(self, rows: Sequence[TokenSequence]) -> PassLogits:
        """Runs the prompts through the model as `generate` does; see [`~Verifier.forward`]."""
        input_ids = torch.cat([row.ids for row in rows])
        kwargs = self.model_kwargs
        if self.prompt_states is not None and records_prompt(self.model, kwargs):
            kwargs = {**kwargs, "logits_to_keep": last_token(self.prompt_states)}
        self.prompts = [*range(len(rows))]
        outputs = self._run_prompts(input_ids, kwargs)
        self._take_cache(outputs)
        count, self._prompt_length = input_ids.shape
        self.cached = [self._prompt_length] * count
        if (positions := self.model_kwargs.get("position_ids")) is not None:
            last = positions[..., -1].reshape(-1, positions.shape[-2]).amax(dim=0)  # of each row
            self._offsets = (last.expand(count) - (self._prompt_length - 1)).tolist()
        else:
            length = 0 if holds_running_state(self.cache) else self.cache.get_seq_length()
            self._offsets = [max(length - self._prompt_length, 0)] * count
        logits: torch.Tensor = outputs.logits[:, -1].clone()  # a view would keep the prompts'
        self._after_prefill(outputs)
        self.entries.begin(self._prompt_length)
        return logits, [*range(count)]

    def _run_prompts(self, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        """The outputs for prompts `(R, n)`, with the keyword arguments of `generate`."""
        return prefill(self.model, input_ids, self.generation_config, kwargs)

    def _after_prefill(self, outputs: Mapping[str, Any]) -> None:
        """Prepares the passes after the prefill."""
        # The arguments for one more token than the prompt, some of them from the outputs.
        self.model_kwargs = next_kwargs(self.model, outputs, self.model_kwargs)

    def _run(self, now: Pass) -> PassLogits:
        """The logits of a pass and the roots in them, see [`~Verifier.forward`]; here of one row
        whose tokens run in order, as `generate` runs them."""
        [row], [draft] = now.rows, now.drafts
        input_ids = row.ids
        if len(draft):
            tokens = torch.from_numpy(draft.tokens)[None].to(input_ids.device, non_blocking=True)
            input_ids = torch.cat([input_ids, tokens], dim=-1)
        model_inputs = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=now.size, **self._kwargs_for(input_ids.shape[1])
        )
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = 1 + len(draft)
        outputs = self.model(**model_inputs, return_dict=True)
        self._take_cache(outputs)
        return outputs.logits[0, -1 - len(draft) :], [0]

    def _kwargs_for(self, length: int) -> dict[str, Any]:
        """The keyword arguments (attention mask, position ids, token types) for this length."""
        further = length - self._prompt_length - 1
        if further == 0:
            return self.model_kwargs
        if further < 0:
            names = ("attention_mask", "position_ids", "token_type_ids")
            given = {name: self.model_kwargs.get(name) for name in names}
            cut = {name: value[..., :further] for name, value in given.items() if value is not None}
            return {**self.model_kwargs, **cut}
        kwargs = next_kwargs(self.model, {}, dict(self.model_kwargs), further)
        if (token_types := self.model_kwargs.get("token_type_ids")) is not None:
            # Plain decoding repeats the last type; the method above would repeat the last k types.
            repeated = token_types[:, -1:].expand(-1, further)
            kwargs["token_type_ids"] = torch.cat([token_types, repeated], dim=-1)
        return kwargs

    def _take_cache(self, outputs: Mapping[str, Any]) -> None:
        """Goes on with the cache that the model returned: some models begin a new one where the
        text outgrows their rotary embedding (Phi-3)."""
        cache = find_cache(outputs)
        if cache is not None and cache is not self.cache:
            self.model_kwargs = {**self.model_kwargs, cache_name(outputs): cache}
            self.entries = self._entries(cache)
