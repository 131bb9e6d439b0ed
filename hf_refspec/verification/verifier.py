"""Verification: one forward pass of the target model over rows and their drafts.

A [`Verifier`] lives for one call of `generate`. Each step it takes the rows and a draft tree for
each, returns the target's logits after the last token of each row and after every draft node, and
is then told which nodes were accepted. The first pass, with nothing cached, is the prefill.

- [`TreeVerifier`]: all branches at once, for any number of rows (REST, arXiv 2311.08252,
  section 3.3).
- [`StaticVerifier`]: the same in a static cache, by passes that can be compiled.
- [`ReproducibleTreeVerifier`], [`ReproducibleVerifier`]: the same bit by bit as without drafts.
- [`ChainVerifier`]: one path of one row, under the model's own causal mask.
- [`RecurrentVerifier`]: the same for caches that hold a running state.
- [`PlainVerifier`]: no draft at all.

Which of them is exact on a model is asked of the model itself, see `probe.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from ..drafting.tree import DraftTree
from ..text_config import text_config
from .cache import CACHE_NAMES, find_cache, keeps_every_position, restore, snapshot
from .prompt_states import last_token, records_prompt


class TokenSequence(Protocol):
    """What a verifier needs of a row."""

    @property
    def ids(self) -> torch.Tensor:
        """All tokens, padding among them, int64 of shape `(1, length)`."""

    def tail(self, count: int) -> np.ndarray:
        """The last `count` tokens on the host, int64 of shape `(count,)`."""

    def __len__(self) -> int: ...


class FixedTokens:
    """Tokens `(1, length)` that nothing is added to."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def tail(self, count: int) -> np.ndarray:
        return self.ids[0, len(self) - count :].numpy(force=True).astype(np.int64)

    def __len__(self) -> int:
        return self.ids.shape[1]


class StandingTokens:
    """A row that stands still: all tokens but the last, which is not to be run. The model may have
    no position for it."""

    def __init__(self, row: TokenSequence) -> None:
        self._row = row

    @property
    def ids(self) -> torch.Tensor:
        return self._row.ids[:, :-1]

    def tail(self, count: int) -> np.ndarray:
        return self._row.tail(count + 1)[:-1]

    def __len__(self) -> int:
        return len(self._row) - 1


@dataclass(frozen=True, slots=True)
class CacheMark:
    """What a verifier and its cache held, see [`Verifier.mark`].

    Attributes:
        attributes (`dict`): Of the verifier; they are replaced, never changed.
        width (`int`): The entries of a cache that can be cropped.
        layers (`list[dict]`, *optional*): The states of its layers where it cannot.
    """

    attributes: dict[str, Any]
    width: int
    layers: list[dict[str, Any]] | None


class Verifier:
    """Forward passes of one target model over the same rows, with the cache kept in step.

    Args:
        model (`PreTrainedModel`): The target model.
        generation_config (`GenerationConfig`): The call's own; read by the prefill.
        model_kwargs (`dict`): Keyword arguments of the forward pass as `generate` prepared them for
            the prompt.

    Attributes:
        cached (`list[int]`): How many tokens of each row the cache holds. What a row has beyond
            them, its pending tokens, is run by the next pass. Empty before the prefill.
        cache (`Cache`): The cache; a model may replace it.
        prompt_states (`list[torch.Tensor]`, *optional*): Where there is a list, the prefill adds
            what enters the output layer, `(R, n, hidden_size)` each.
        restarted (`bool`): Whether the model has begun a new cache in the middle of the text. It
            may then do so at every step, as Phi-3 does in transformers 5.17, and nothing can be
            drafted any more.
    """

    name: str
    takes_trees = False
    most_rows = 1
    # Whether several tokens may follow what is cached.
    continues = True
    # Whether a rejection makes the next pass longer.
    reruns = False
    # Whether rows can leave, see `select`.
    drops_rows = True
    # The numbers of tokens of a row that a pass is padded to; `None` where it is not padded.
    widths: tuple[int, ...] | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.model = model
        self.vocab_size: int = text_config(model).vocab_size
        self.generation_config = generation_config
        self.model_kwargs = dict(model_kwargs)
        self.cache: Any = find_cache(model_kwargs)
        self.prompt_states: list[torch.Tensor] | None = None
        # Lists: a few numbers in each pass, for which arrays would take longer.
        self.cached: list[int] = []
        self.restarted = False
        # The position of a row's token less its index: left padding has no position, and a given
        # cache may hold tokens that the ids lack.
        self._offsets: list[int] = []
        self._prompt_length = 0
        # How many tokens of a row the last pass ran, padding among them.
        self.pass_tokens = 0
        # What the last pass ran, until `keep` is told what stays: the pending tokens of each row
        # and the drafts.
        self._pending: list[int] = []
        self._drafts: Sequence[DraftTree] = ()

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        """Whether this verifier may be tried at all with this model and this cache."""
        raise NotImplementedError

    def forward(self, rows: Sequence[TokenSequence], drafts: Sequence[DraftTree]) -> torch.Tensor:
        """One forward pass over the pending tokens of each row and its draft.

        Args:
            rows (sequence of [`TokenSequence`]): R rows, the same in each pass.
            drafts (sequence of [`DraftTree`]): One for each row, without nodes in the first pass;
                T is the number of nodes of the largest.

        Returns:
            `torch.Tensor` of shape `(R, 1 + T, vocab_size)`: 0 after the last token of the row,
            1 + i after node i of its draft. What stands past a row's own nodes means nothing.
        """
        if not len(self.cached):
            return self._prefill(rows)
        self._pending = [len(row) - n for row, n in zip(rows, self.cached, strict=True)]
        self._drafts = drafts
        self.pass_tokens = max(p + len(d) for p, d in zip(self._pending, drafts, strict=True))
        try:
            return self._run(rows, drafts)
        except BaseException:  # a key in the middle of a pass, a hook of somebody else's
            self._drafts = ()
            self._take_back()
            raise

    def keep(self, paths: Sequence[list[int] | None]) -> None:
        """Keeps what the last pass has added to the cache: each row's pending tokens and the nodes
        of its path, and nothing of a row whose path is `None`. A prefill is kept as it is."""
        if self._drafts:
            self._keep(paths)
            self.cached = [
                cached if path is None else cached + pending + len(path)
                for cached, pending, path in zip(self.cached, self._pending, paths, strict=True)
            ]
            self._drafts = ()

    def mark(self) -> CacheMark:
        """What there is now, to go [`~Verifier.roll_back`] to."""
        attributes = self._marked()
        if self.cache is None:
            return CacheMark(attributes, 0, None)
        if keeps_every_position(self.cache):
            return CacheMark(attributes, self.cache.get_seq_length(), None)
        return CacheMark(attributes, 0, snapshot(self.cache))

    def _marked(self) -> dict[str, Any]:
        names = ("cache", "cached", "restarted", "model_kwargs", "_offsets", "_prompt_length")
        return {name: getattr(self, name) for name in names}

    def roll_back(self, mark: CacheMark) -> None:
        """Goes back to a mark; the rows have done so, or do so before the next pass."""
        vars(self).update(mark.attributes)
        if mark.layers is not None:
            restore(self.cache, mark.layers)
        elif self.cache is not None and (excess := self.cache.get_seq_length() - mark.width) > 0:
            self.cache.crop(-excess)

    def crop(self, length: int) -> bool:
        """Drops all but the first `length` tokens of a single row, if its cache can be cropped, and
        says whether it could."""
        if self.cache is None or not keeps_every_position(self.cache):
            return False
        if (excess := self.cached[0] - length) > 0:
            self.cache.crop(-excess)
        self.cached = [length]
        return True

    def finish(self, ids: torch.Tensor, own: Sequence[int]) -> None:
        """Leaves the cache as plain decoding would: with all of the returned ids `(R, length)` but
        the last column, of which so many of each row are its own and not padding. It takes one more
        pass where some of them are not cached."""
        rows = [FixedTokens(row[None, :-1]) for row in ids]
        length = ids.shape[1] - 1
        self.cached = [min(n, end, length) for n, end in zip(self.cached, own, strict=True)]
        waits = [cached == length for cached in self.cached]
        if not all(waits):
            self.forward(rows, [DraftTree.empty()] * len(rows))
            self.keep([None if waiting else [] for waiting in waits])
        self._settle()

    def release(self) -> None:
        """Is told that nobody goes on with the cache."""

    def abandon(self) -> None:
        """Leaves a cache that holds a prefix of each row and nothing else: an exception has ended
        the call."""
        self.keep([[] for _ in self._drafts])
        self._settle()

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
        """What the cost of a pass depends on, beside its number of tokens."""
        return self.name

    @property
    def in_step(self) -> bool:
        """Whether the last pass ran the last token of each row and its draft, and nothing else that
        it would not have run anyway."""
        return self.reruns or max(self._pending) == 1

    def _run(self, rows: Sequence[TokenSequence], drafts: Sequence[DraftTree]) -> torch.Tensor:
        raise NotImplementedError

    def _keep(self, paths: Sequence[list[int] | None]) -> None:
        raise NotImplementedError

    def _take_back(self) -> None:
        """Takes a pass that raised out of the layers of the cache that it has reached."""

    def _settle(self) -> None:
        """Leaves the cache as it came: for whoever goes on with it."""

    def _prefill(self, rows: Sequence[TokenSequence]) -> torch.Tensor:
        """Runs the prompts through the model as `generate` does; see [`~Verifier.forward`]."""
        input_ids = torch.cat([row.ids for row in rows])
        kwargs = self.model_kwargs
        if self.prompt_states is not None and records_prompt(self.model, kwargs):
            kwargs = {**kwargs, "logits_to_keep": last_token(self.prompt_states)}
        outputs = self.model._prefill(input_ids, self.generation_config, kwargs)
        self._adopt_cache(outputs)
        count, self._prompt_length = input_ids.shape
        self.cached = [self._prompt_length] * count
        self._offsets = self._position_offsets(count)
        logits: torch.Tensor = outputs.logits[:, -1:].clone()  # a view would keep the prompts'
        self._take_up(outputs)
        return logits

    def _take_up(self, outputs: Mapping[str, Any]) -> None:
        """Makes ready for the passes after the prefill."""

    def _position_offsets(self, rows: int) -> list[int]:
        positions = self.model_kwargs.get("position_ids")
        if positions is None:
            return [0] * rows
        last = positions[..., -1].reshape(-1, positions.shape[-2]).amax(dim=0)  # of each row
        return (last.expand(rows) - (self._prompt_length - 1)).tolist()

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
