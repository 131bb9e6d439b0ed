"""How a call's cache keeps the keys and values of accepted tokens and drops the others.

[`CroppedEntries`] crops the end, [`RunningState`] restores the state from before the pass. Those
that write in place are in `in_place.py`, those of static caches in `slots.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel

from .caches import find_cache, keeps_every_position
from .passes import Pass, Prefill


class Entries:
    """A cache that is only added to: no draft was ever run over it.

    Attributes:
        cache (`Cache`, *optional*): The call's; a model may replace it.
        prior_length (`int`): The tokens before the prompt: a given cache may hold more than the
            ids.
    """

    # Whether accepted tokens run again in the next pass.
    reruns = False
    # Whether rows of other calls may join; a prompt that several rows have then runs once.
    joins = False
    # Whether a pass costs what the tokens of all rows cost together; otherwise each row costs as
    # much as the widest.
    packs = False

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: Mapping[str, Any],
        widths: Sequence[int] = (),
    ) -> None:
        """What a [`Verifier`] is given; `widths` are those of its [`Kind`]."""
        self.cache: Any = find_cache(model_kwargs)
        self.prior_length = 0

    @property
    def variant(self) -> str:
        """What the cost of a pass depends on beside the kind of verifier and the tokens."""
        return ""

    def before_prefill(self, count: int) -> None:
        """Prepares for the prompts of this number of rows."""

    def begin(self, prefill: Prefill) -> None:
        """Prepares for drafts."""

    def replace(self, cache: Cache) -> None:
        """Goes on with the cache that a model has begun in the middle of a text."""
        self.cache = cache

    def before(self, pass_: Pass) -> None:
        """Prepares for a pass."""

    def keep(self, pass_: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        """Keeps each row's pending tokens and the nodes of its path, see [`Verifier.keep`]; returns
        how many tokens of each row the cache holds then."""
        if None in paths:
            raise ValueError("the cache of this model can drop nothing of a pass")
        return pass_.cached_after(paths)

    def undo(self) -> None:
        """Removes a pass that raised from the layers that it had reached."""

    def room(self, cached: Sequence[int]) -> int:
        """The most draft nodes of a row that the next pass can take."""
        return sys.maxsize

    def select(self, rows: list[int]) -> None:
        """Drops all rows but these."""
        raise NotImplementedError(f"{type(self).__name__} keep all of their rows")

    def join(self, other: Any) -> None:
        """Adds the only row of other entries of this type, which are then empty."""
        raise NotImplementedError(f"{type(self).__name__} take no further row")

    def lengths_to_finish(self, cached: list[int], length: int) -> list[int]:
        """How much of each row stays before the last pass brings all rows to this length."""
        return cached

    def close(self, cached: list[int]) -> None:
        """Ends a call whose cache is returned: crops it to these tokens of each row and restores
        its layers."""

    def release(self) -> None:
        """Ends a call whose cache is not returned."""

    def mark(self) -> Callable[[], None]:
        """A function that goes back to the present, any number of times."""
        cache = self.cache
        if cache is None:
            return lambda: None
        states = None if keeps_every_position(cache) else snapshot(cache)
        length = 0 if states is not None else cache.get_seq_length()

        def go_back() -> None:
            self.cache = cache  # the model may have begun a new one
            if states is None:
                crop_layers(cache, length)
            else:
                restore(cache, states)

        return go_back


class CroppedEntries(Entries):
    """One row in order: the rejected tokens are cropped from the end."""

    def begin(self, prefill: Prefill) -> None:
        # Not before: a sliding window that records through the prefill would keep all of it.
        self.cache.activate_past_recording()

    def replace(self, cache: Cache) -> None:
        self.close([])
        self.cache = cache
        cache.activate_past_recording()

    def before(self, pass_: Pass) -> None:
        self._length = self.cache.get_seq_length()

    def keep(self, pass_: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        [path] = paths
        [draft] = pass_.drafts
        if path is None:
            self.undo()
        else:
            # Even if nothing is dropped: it shrinks a recording sliding window back to its size.
            self.cache.crop(len(path) - len(draft))
        return pass_.cached_after(paths)

    def undo(self) -> None:
        crop_layers(self.cache, self._length)

    def close(self, cached: list[int]) -> None:
        for layer in self.cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False


class RunningState(Entries):
    """A state that cannot be cropped (Mamba 2, linear attention). The one from before the draft is
    restored, and the accepted tokens run again together with the next draft, so that a rejection
    costs no pass of its own."""

    reruns = True

    @property
    def variant(self) -> str:
        return "running state"

    def before(self, pass_: Pass) -> None:
        self._before = snapshot(self.cache) if len(pass_.drafts[0]) else None

    def keep(self, pass_: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        [path] = paths
        [draft] = pass_.drafts
        if len(draft) == 0 or (path is not None and len(path) == len(draft)):
            return super().keep(pass_, paths)
        self.undo()
        return pass_.cached

    def undo(self) -> None:
        if self._before is not None:
            restore(self.cache, self._before)


def crop_layers(cache: Cache, length: int) -> None:
    """Crops every layer to this length, those that are longer."""
    for layer in cache.layers:
        if (excess := layer.get_seq_length() - length) > 0:
            layer.crop(-excess)


def snapshot(cache: Cache) -> list[dict[str, Any]]:
    """The state of the cache itself (some models keep positions or a state there) and of every
    layer. Keys and values grow by concatenation, so that holding on to the tensors is enough;
    running states are written in place and are copied."""
    own = {name: value for name, value in vars(cache).items() if name != "layers"}
    states = [own, *(vars(layer) for layer in cache.layers)]
    return [{name: _copied(value) for name, value in state.items()} for state in states]


def restore(cache: Cache, states: list[dict[str, Any]]) -> None:
    """Puts a cache back to where [`snapshot`] was taken, any number of times."""
    for holder, state in zip((cache, *cache.layers), states, strict=True):
        vars(holder).update({name: _copied(value) for name, value in state.items()})


def _copied(value: Any) -> Any:
    """CurrentPass states stand in dictionaries and lists."""
    if isinstance(value, dict):
        return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in value.items()}
    if isinstance(value, list):
        return [v.clone() if isinstance(v, torch.Tensor) else v for v in value]
    return value
