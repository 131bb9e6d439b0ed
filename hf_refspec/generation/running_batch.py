"""Texts of many users, decoded together: rows that join and leave between forward passes.

A step is: a piece of the next prompt -> the loop's own step over all rows -> rows that have ended
leave. A prompt is prefilled by itself, in pieces, so that no other text waits longer than one piece
takes; then its keys and values join the others', see `packed.py`. Rows of models that cannot be
packed keep a loop of their own, and take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from ..check_count import check_count
from ..drafting.drafter import Drafter
from ..drafting.stats import SpeculationStats
from ..verification.chain import PlainVerifier
from ..verification.choice import known_finding, select_verifier
from ..verification.packed import PackedVerifier
from ..verification.ranks import Ranks
from ..verification.reach import Reach
from ..verification.tree import TreeVerifier
from ..verification.verifier import Verifier
from .budget import make_budget
from .default_rows import default_rows
from .interruptible import Interrupted, Interruptible
from .loop import Loop
from .prefixes import CachedText, Prefixes, state_of
from .running_text import RunningText, prepare_call
from .validation import RefusedCallError, check_options


class RunningBatch:
    """Decodes texts of one model together. They join while others are decoded, and leave when they
    end; each has the logits processors, stopping criteria, streamer, random numbers and drafter of
    a call of its own, and in float32 the ids of a call of its own.

        batch = RunningBatch(model, max_rows=8)
        text = batch.add(**inputs, max_new_tokens=64)
        while not text.finished:
            batch.step()

    One thread at a time may call its methods. Where weights change, what was computed before is
    shared no more; a change of a parameter's `data` in place is not noticed: make a new batch then.

    Args:
        model ([`PreTrainedModel`]): The target model.
        max_rows (`int`, *optional*): How many texts are decoded at once. The others wait, in the
            order in which they came. By default as many as half of the free memory can hold, of
            4,096 tokens each: 16 at most on a CPU, 64 elsewhere.
        prefill_tokens (`int`, *optional*): The most tokens of a prompt that run between two steps
            of the other texts. By default 128 on a CPU, 1024 elsewhere.
        prefix_tokens (`int`, *optional*, defaults to 4096): The most tokens of texts that have
            ended whose keys and values are kept, for prompts that begin likewise (a system prompt,
            the same document). 0 shares nothing, not with texts that are running either.
        max_draft_tokens (`int` or `"auto"`, *optional*, defaults to `"auto"`): As of `generate`;
            `"auto"` chooses the best nodes of all texts together.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option has a value that it cannot have.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_rows: int | None = None,
        prefill_tokens: int | None = None,
        prefix_tokens: int = 4096,
        max_draft_tokens: int | Literal["auto"] = "auto",
    ) -> None:
        if prefill_tokens is None:
            prefill_tokens = 128 if model.device.type == "cpu" else 1024
        max_rows = default_rows(model) if max_rows is None else max_rows
        check_count("max_rows", max_rows)
        check_count("prefill_tokens", prefill_tokens)
        check_count("prefix_tokens", prefix_tokens, least=0)
        check_options(max_draft_tokens, "auto")
        self.stats = SpeculationStats()
        self._model = model
        self.max_rows = max_rows
        self._prefill_tokens = prefill_tokens
        self._max_draft_tokens = max_draft_tokens
        self._prefixes = Prefixes(prefix_tokens)
        self._waiting: deque[RunningText] = deque()
        self._prefilling: RunningText | None = None
        self._packed: list[RunningText] = []
        self._alone: list[RunningText] = []  # each with a loop of its own
        self._verifier: PackedVerifier | None = None  # of the packed ones
        self._loop: Loop | None = None  # the same

    def __len__(self) -> int:
        """How many texts are decoded or wait."""
        return self.running + self.waiting

    @property
    def waiting(self) -> int:
        """How many texts wait for room."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many texts are decoded; one whose prompt is being read among them."""
        return len(self._packed) + len(self._alone) + (self._prefilling is not None)

    @torch.no_grad()
    def add(self, *, seed: int | None = None, **arguments: Any) -> RunningText:
        """Puts a text at the end of the queue.

        Args:
            seed (`int`, *optional*): Of its random numbers: it becomes the text that
                `torch.manual_seed(seed)` and a call of its own would give. By default one that
                torch draws.
            arguments: As of `generate`, for one prompt. Each text needs a drafter of its own;
                `candidate_generator` is `"auto"` unless given.

        Returns:
            [`RunningText`]: What becomes of it.

        Raises:
            TypeError, ValueError: As of `generate`; also for several prompts, for a given
                `past_key_values`, and for a model that is split over several processes.
        """
        if arguments.get("past_key_values") is not None:
            raise ValueError(
                "`past_key_values` cannot be given for a text of a running batch: leave it out; "
                "what the prompt has in common with other texts is found"
            )
        if not Ranks.of(self._model).alone:
            raise RefusedCallError(
                "A model that is split over several processes cannot decode a running batch: each "
                "would let texts join at other times. Load it in one process, with `device_map`."
            )
        call: Any = self._model.generate(**arguments, custom_generate=prepare_call)
        kwargs = call.model_kwargs
        verifier, _ = select_verifier(self._model, "auto", 1, call.generation_config, kwargs)
        if verifier is None:
            verifier = PlainVerifier(self._model, call.generation_config, kwargs)
        packs = type(verifier) is TreeVerifier and _can_be_packed(self._model, kwargs)
        text = RunningText(call, seed, verifier, packs)
        self._waiting.append(text)
        return text

    def remove(self, text: RunningText) -> None:
        """Ends a text, wherever it is; does nothing if it has ended."""
        if text.finished:
            return
        if text in self._waiting:
            self._waiting.remove(text)
        elif text is self._prefilling:
            self._prefilling = None
        elif text in self._alone:
            self._alone.remove(text)
        else:
            self._leave([text])
        text._end()

    @torch.no_grad()
    def step(self) -> list[RunningText]:
        """Runs a piece of a prompt, if there is room for its text, and one step of all other texts.

        Returns:
            `list[RunningText]`: The texts that have ended.

        Raises:
            Whatever a forward pass, a drafter, a processor or a criterion raises. The text whose
            prompt was read then ends, or, in a pass that texts share, all of these.
        """
        ended = self._read_prompt()
        try:
            self._decode()
            ended += [text for text in (*self._packed, *self._alone) if text._row.finished]
            self._leave(ended)
        except BaseException:
            self._abandon(ended)
            raise
        _end(ended)
        return ended

    def _read_prompt(self) -> list[RunningText]:
        """Runs a piece of a prompt; the text joins the others once it has its first token. Returns
        it if it has ended."""
        if self._prefilling is None:
            if not self._waiting or self.running >= self.max_rows:
                return []
            self._prefilling = self._waiting.popleft()
        text = self._prefilling
        try:
            with nullcontext() if text.interrupted is None else Interruptible(text.interrupted):
                is_read = self._read_piece(text)
        except Interrupted:
            self._prefilling = None
            return [text]
        except BaseException:
            self._prefilling = None
            text._end()
            raise
        if not is_read:
            return []
        self._prefilling = None
        if text._row.finished:
            return [text]
        try:
            self._join(text)
        except BaseException:  # the others may hold a part of it
            self._abandon([text])
            raise
        return []

    def _read_piece(self, text: RunningText) -> bool:
        """Runs a piece of a prompt; returns whether it was the last one."""
        if text._loop is None:
            self._begin(text)
        assert text._loop is not None
        end = text._read + self._prefill_tokens
        if text._in_pieces and end < text.input_ids.shape[1]:
            text._loop.read_ahead([text._row], end)
            text._read = end
            return False
        text._loop.prefill([text._row])
        return True

    def _begin(self, text: RunningText) -> None:
        """Copies what the prompt has in common with other texts, and prepares the rest."""
        text._begin(self._model)
        verifier, kwargs = text._verifier, text._call.model_kwargs
        if text._in_pieces:
            text._state = state_of(self._model)
            found = self._prefixes.longest(text._ids, text._state, self._cached())
            entries, text._read = found
            text.shared_tokens = text._read
            for layer, states in zip(kwargs["past_key_values"].layers, entries, strict=False):
                layer.update(*states)
            # The first piece is a prompt of its own. The length of its mask says that its ids hold
            # what is cached as well.
            mask = kwargs.get("attention_mask")
            mask = torch.ones_like(text.input_ids) if mask is None else mask
            end = text._read + self._prefill_tokens
            positions = kwargs["position_ids"][..., :end]
            verifier.model_kwargs |= {"attention_mask": mask[:, :end], "position_ids": positions}
        text._loop = self._make_loop(verifier, text.stats, kwargs)

    def _make_loop(
        self, verifier: Verifier, stats: SpeculationStats, model_kwargs: dict[str, Any]
    ) -> Loop:
        most = 0 if isinstance(verifier, PlainVerifier) else self._max_draft_tokens
        kind = verifier.kind_of_pass, verifier.widths, verifier.packs
        budget = make_budget(most, Drafter(), self._model, *kind)
        reach = Reach(type(verifier), self._model, verifier.fewest_rows, model_kwargs)
        return Loop(verifier, budget, reach, stats, chains=not verifier.takes_trees)

    def _decode(self) -> None:
        """One step of all texts that have their first token."""
        if self._loop is not None and self._packed:
            rows = [text._row for text in self._packed]
            self._loop.prepare(rows)
            self._loop.step(rows)
            for text in self._packed:
                text.stats.record_rows([(len(text._row.verified), len(text._row.path or ()))])
        for text in self._alone:
            assert text._loop is not None
            text._loop.prepare([text._row])
            text._loop.step([text._row])

    def _join(self, text: RunningText) -> None:
        assert text._loop is not None
        if not text._packs:
            self._alone.append(text)
            return
        verifier, text._loop = text._loop.verifier, None
        assert isinstance(verifier, TreeVerifier)
        if self._verifier is None:
            self._verifier = PackedVerifier.of(verifier)
            self._loop = self._make_loop(self._verifier, self.stats, text._call.model_kwargs)
        else:
            self._verifier.join(verifier)
        self._packed.append(text)

    def _leave(self, texts: Sequence[RunningText]) -> None:
        """Takes texts out of all later steps; keeps what their prompts may share with others."""
        self._alone = [text for text in self._alone if text not in texts]
        kept = [i for i, text in enumerate(self._packed) if text not in texts]
        if len(kept) == len(self._packed):
            return
        for cached, text in zip(self._cached(), self._packed, strict=True):
            if text in texts:
                self._prefixes.keep(cached)
        self._packed = [self._packed[i] for i in kept]
        assert self._verifier is not None
        self._verifier.select(kept)

    def _cached(self) -> list[CachedText]:
        """The packed texts, as far as they are cached; of padded ones, which share nothing, none of
        their ids."""
        if self._verifier is None:
            return []
        rows = zip(self._packed, self._verifier.cached, self._verifier.entries.rows, strict=True)
        return [
            CachedText(text._ids[: n if text._in_pieces else 0], entries, text._state)
            for text, n, entries in rows
        ]

    def _abandon(self, ended: Sequence[RunningText]) -> None:
        """Ends all texts but those that wait, and these."""
        texts = [*self._packed, *self._alone, *([self._prefilling] if self._prefilling else [])]
        texts += [text for text in ended if text not in texts]
        self._packed, self._alone, self._prefilling = [], [], None
        self._loop = self._verifier = None
        _end(texts)


def _end(texts: Sequence[RunningText]) -> None:
    """Ends all of them, whatever a drafter or a streamer raises."""
    with ExitStack() as ending:
        for text in reversed(texts):
            ending.callback(text._end)


def _can_be_packed(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    return (
        PackedVerifier.supports(model, model_kwargs)
        and known_finding(PackedVerifier, model, PackedVerifier.fewest_rows, model_kwargs).exact
    )
