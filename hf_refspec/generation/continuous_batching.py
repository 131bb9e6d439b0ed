"""Drafts for `generate_batch`: transformers' continuous batching, whose passes then verify trees,
or chains where attention takes no mask.

The classes of transformers behind it are private and change. All that depends on them stands in
this file, and `continuous_shape.py` lists it.

A pass is scheduled as ever. Only then is a draft appended to each request that decodes, within what
the pass has left, so that no draft takes a place, a token or a block of the cache from another
request or a prompt. The pass yields logits at every node. The tokens that the target chose are
emitted one after another, and the request's position goes back by the others: the next pass writes
over them. The most probable path of a draft comes first, so that its nodes mostly stand in place;
tokens of another path run again. A draft never reaches the last token of a page, so that what
completes a page, which other requests may then share, is never a rejected token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from transformers import PreTrainedModel

from ..drafting.drafter import Drafter, Sampling, checked_draft
from ..drafting.observation import Observation
from ..drafting.stats import SpeculationStats
from ..drafting.top_tokens import top_tokens
from ..drafting.tree import DraftTree
from ..text_config import context_length, text_config
from .budget import make_budget
from .default_drafter import DrafterPool

if TYPE_CHECKING:
    from ..attachment import Attachment

# Returns a drafter that no other call has, for as long as a manager runs.
Source: TypeAlias = Callable[[], AbstractContextManager[Drafter]]


class _Recording:
    """A model of which the logits are kept."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.logits = torch.empty(0)

    def __call__(self, **inputs: Any) -> Any:
        output = self._model(**inputs)
        self.logits = output.logits[0]
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@dataclass
class _Request:
    """A request from its first token on.

    Attributes:
        drafter: Its own.
        call: Ends the drafter's call.
        seen: How many tokens of prompt and output the drafter knows.
        output: Those of them that came since it began.
    """

    drafter: Drafter
    call: ExitStack
    seen: int
    output: list[int] = field(default_factory=list)


@dataclass
class _Part:
    """A request's part of a pass that chooses a token for it, or several.

    Attributes:
        future: What transformers has scheduled, and
        state: the request's state there.
        request: `None` before its first token.
        draft: What was drafted, and
        verified: the part of it that is verified, and
        path: the nodes of that which were accepted, once known.
        emitted: The tokens that the pass yielded.
    """

    future: Any
    state: Any
    request: _Request | None
    draft: DraftTree = field(default_factory=DraftTree.empty)
    verified: DraftTree = field(default_factory=DraftTree.empty)
    path: list[int] | None = None
    emitted: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    stands_still = False

    def __len__(self) -> int:
        return _length(self.state)

    @property
    def drafter(self) -> Drafter:
        assert self.request is not None  # it decodes
        return self.request.drafter

    @property
    def decodes(self) -> bool:
        """Whether it goes on by its last token, which was scheduled, and may have a draft."""
        began = self.request is not None and not self.state.is_cpu_offloaded
        return began and _goes_on(self.state)


class BatchDrafts:
    """Drafts for the requests of a manager, while its thread runs.

    Each method that takes the place of one of transformers' has its name behind an underscore.
    """

    def __init__(
        self,
        manager: Any,
        source: Source,
        max_draft_tokens: int | str,
        attachment: Attachment | None,
        chains: bool,
    ) -> None:
        config = text_config(manager.model)
        self._chains = chains  # whether drafts must not branch
        self._manager, self._attachment = manager, attachment
        self._source, self._max_draft_tokens = source, max_draft_tokens
        self._vocab_size = config.vocab_size
        self._context = context_length(config) or np.iinfo(np.int64).max
        self._sampling = Sampling.of(manager.generation_config)
        self._stats = SpeculationStats()  # of all passes since the start
        self._passed = SpeculationStats()  # of one
        self._requests: dict[str, _Request] = {}
        self._parts: list[_Part] = []  # of the pass
        self._pass_tokens: int | None = None  # where it prefills nothing
        self._began = 0.0
        self._logits: torch.Tensor | None = None
        self._replaced: list[tuple[Any, str]] = []

    def install(self) -> None:
        """Has the manager draft from its next start on."""
        self._replace(self._manager, "start", self._start)
        self._replace(self._manager, "_run_generation_loop", self._run_generation_loop)
        self._replace(self._manager, "_create_batch_processor", self._create_batch_processor)
        self._manager.hf_refspec_drafts = self

    def remove(self) -> None:
        """Gives transformers' objects their own methods back."""
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        del self._manager.hf_refspec_drafts

    def _replace(self, owner: Any, name: str, method: Any) -> None:
        setattr(owner, name, method)
        self._replaced.append((owner, name))

    def _start(self) -> None:
        if not self._manager.is_running():
            with ExitStack() as held:
                drafter = held.enter_context(self._source())
                held.enter_context(drafter._owned())
                self._held = held.pop_all()
            self._pool = DrafterPool(drafter.fork())
            model, kind = self._manager.model, "continuous batches"
            self._budget = make_budget(self._max_draft_tokens, drafter, model, kind, packs=True)
            self._stats = drafter.stats = SpeculationStats()
        type(self._manager).start(self._manager)

    def _run_generation_loop(self) -> None:
        try:
            type(self._manager)._run_generation_loop(self._manager)
        finally:
            for request_id in [*self._requests]:
                self._end(request_id)
            self._held.close()

    def _create_batch_processor(self) -> Any:
        processor = type(self._manager)._create_batch_processor(self._manager)
        config = vars(processor.cb_config)
        self._page_size = config["page_size" if "page_size" in config else "block_size"]  # 5.17
        self._processor = processor
        self._scheduler, self._io = processor.scheduler, processor.inputs_and_outputs
        self._chains = self._chains or self._io.attention_mask is None
        self._replace(self._scheduler, "schedule_batch", self._schedule_batch)
        self._replace(self._io, "get_model_kwargs", self._get_model_kwargs)
        self._replace(processor.model_runner, "compute_batch", self._compute_batch)
        self._replace(self._io, "prepare_batch_update", self._prepare_batch_update)
        return processor

    # A pass: scheduled, with drafts; its inputs; the model; what came of it.

    def _schedule_batch(
        self, token_budget: int, cache_budget: int
    ) -> tuple[list[Any] | None, bool, int, int]:
        scheduler = self._scheduler
        # What runs again is not known to the scheduler.
        again = sum(_behind(state) for state in scheduler.active_requests.values())
        scheduled = type(scheduler).schedule_batch(scheduler, token_budget - again, cache_budget)
        futures, single_tokens, tokens, reads = scheduled
        self._passed = SpeculationStats()
        for request_id in self._requests.keys() - scheduler.active_requests.keys():
            if request_id not in scheduler.waiting_requests:
                self._end(request_id)
        self._parts = [self._part(future) for future in futures or () if future.has_new_token]
        decoding = [part for part in self._parts if part.decodes]
        for part in self._parts:
            tokens += self._run_again(part)
        # Passes over single tokens may read more of the cache than others have room for.
        has_room = decoding and reads <= cache_budget
        drafted = self._draft(decoding, token_budget - tokens) if has_room else 0
        only_decodes = len(decoding) == len(futures or ())
        self._pass_tokens = tokens + drafted if only_decodes else None
        self._began = perf_counter()
        return futures, single_tokens and not drafted + again, tokens + drafted, reads

    def _part(self, future: Any) -> _Part:
        state, request = future.state, self._requests.get(future.state.request_id)
        if request is not None and request.seen != _length(state):  # another one of that name
            self._end(state.request_id)
            request = None
        return _Part(future, state, request)

    def _run_again(self, part: _Part) -> int:
        """Has a pass run those tokens again that do not stand in place; returns how many."""
        behind = _behind(part.state)
        if behind:
            text = part.state.initial_tokens + part.state.generated_tokens
            part.state.tokens_to_process = text[part.state.position_offset :]
            part.future.query_length += behind
        return behind

    def _draft(self, parts: list[_Part], room: int) -> int:
        """Appends drafts, of `room` nodes at most together; returns of how many."""
        began = perf_counter()
        for part in parts:
            assert part.request is not None  # it decodes
            part.draft = self._drafted(part.state, part.request, room)
        shares = self._budget.trim(parts, perf_counter() - began, room)
        for part, share in zip(parts, shares, strict=True):
            part.verified = share.best_path_first()
            part.future.query_length += len(share)
            part.state.tokens_to_process = (
                part.state.tokens_to_process + part.verified.tokens.tolist()
            )
        self._passed.drafting_seconds = perf_counter() - began
        return sum(map(len, shares))

    def _drafted(self, state: Any, request: _Request, room: int) -> DraftTree:
        request.drafter.begin_late(request.output)
        root = _length(state) - 1
        depth = min(
            self._context - root - 1,
            state._new_tokens_limit - len(state.generated_tokens) - 1,  # one is the target's own
        )
        room = min(room, self._budget.nodes, self._page_size - root % self._page_size - 2)
        if min(room, depth) <= 0 or request.drafter.waits:
            return DraftTree.empty()
        if request.drafter.costly:
            request.drafter.prices = self._budget.prices
        draft = checked_draft(request.drafter, room, self._vocab_size, chain=self._chains)
        # What ends a text is chosen without a draft: no token follows it.
        ends = np.isin(draft.tokens, [*state._eos_token_ids])
        if ends.any():
            draft = draft.part(~np.any(draft.ancestors() & ends, axis=1))
        return draft.truncated(depth)

    def _get_model_kwargs(self, use_padding: bool = False) -> dict[str, Any]:
        inputs = type(self._io).get_model_kwargs(self._io, use_padding)
        drafts = {id(part.future): part.verified for part in self._parts}
        rows: list[int] = []  # the tokens after which a token is chosen
        end = seen = 0  # the tokens so far, and what they attend to
        for future in self._io.requests_in_batch:
            end += future.query_length
            seen += future.state.position_offset
            if future.has_new_token:
                draft = drafts[id(future)]
                rows += range(end - 1 - len(draft), end)
                if not draft.is_chain:
                    _lay_out(draft, inputs, end, seen)
        if rows:
            device = inputs["logits_indices"].device
            inputs["logits_indices"] = torch.tensor(rows, dtype=torch.int32, device=device)
            # Of the processors, which have one for each request.
            sizes = [1 + len(draft) for draft in drafts.values()]
            numbers = np.repeat(np.arange(len(drafts)), sizes)
            arguments = inputs["logits_processor_args"]
            inputs["logits_processor_args"] = arguments[:, torch.from_numpy(numbers).to(device)]
        return inputs

    def _compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
        runner, recording = self._processor.model_runner, _Recording(model)
        type(runner).compute_batch(runner, recording, batch_data)
        logits = recording.logits
        if "logits_to_keep" not in batch_data:
            logits = logits[batch_data["logits_indices"]]
        self._logits = logits

    def _prepare_batch_update(self) -> tuple[list[Any], list[int], list[float] | None]:
        """Emits what was accepted but for each request's last token, which transformers emits."""
        io, parts, logits = self._io, self._parts, self._logits
        if logits is None:  # a pass that failed
            return type(io).prepare_batch_update(io)
        self._logits = None
        io.num_request_in_batch = sum(1 + len(part.verified) for part in parts)
        futures, chosen, logprobs = type(io).prepare_batch_update(io)
        seconds = perf_counter() - self._began
        if self._pass_tokens is None:
            self._passed.prefill_seconds = seconds
        else:
            self._passed.verifying_seconds = seconds
        roots = np.cumsum([0, *(1 + len(part.verified) for part in parts)]).tolist()
        rows = [slice(*each) for each in pairwise(roots)]
        nodes = []  # of each request the root and the path behind it, where tokens were chosen
        for part, at in zip(parts, rows, strict=True):
            part.path = path = part.verified.chosen_path(chosen[at])
            nodes.append([at.start, *(at.start + 1 + node for node in path)])
            part.emitted = np.array([chosen[i] for i in nodes[-1]], dtype=np.int64)
            # The next pass writes over all nodes but those that stand in place.
            in_place = next((i for i, node in enumerate(path) if i != node), len(path))
            part.state.position_offset -= len(part.verified) - in_place
        self._budget.record(parts, self._pass_tokens, seconds)
        self._observe(parts, rows, logits)
        for part, (*earlier, _) in zip(parts, nodes, strict=True):
            state = part.state
            for i in earlier:
                state.update_and_check_completion(chosen[i], logprobs and logprobs[i])
                if state.streaming:
                    self._processor.output_router.deliver(state.to_generation_output())
        last = [each[-1] for each in nodes]
        return futures, [chosen[i] for i in last], logprobs and [logprobs[i] for i in last]

    def _observe(self, parts: list[_Part], rows: list[slice], logits: torch.Tensor) -> None:
        """Shows the drafters what was verified, and counts it."""
        began = perf_counter()
        requests = [part.request or self._begin(part.state) for part in parts]
        drafters = [request.drafter for request in requests if not request.drafter.waits]
        k = max((drafter.observed_top_k for drafter in drafters), default=0)
        top = top_tokens(logits[None], k) if k > 0 else None
        for part, request, at in zip(parts, requests, rows, strict=True):
            request.seen += len(part.emitted)
            request.output += part.emitted.tolist()
            if request.drafter.waits:
                continue
            expected = () if top is None else (top.tokens[0, at], top.probs[0, at])
            seen = Observation(part.emitted, part.verified, logits[at], *expected)
            request.drafter.observe(seen)
        self._passed.record_rows((len(part.verified), len(part.emitted) - 1) for part in parts)
        self._passed.learning_seconds = perf_counter() - began
        self._count(self._passed)

    def _count(self, stats: SpeculationStats) -> None:
        self._stats += stats
        if self._attachment is not None:
            self._attachment.count(stats)

    def _begin(self, state: Any) -> _Request:
        call = ExitStack()
        drafter = call.enter_context(self._pool.drafter())
        text = np.array(state.initial_tokens + state.generated_tokens, dtype=np.int64)
        call.enter_context(drafter.session(text, self._vocab_size, self._sampling))
        request = _Request(drafter, call, _length(state))
        self._requests[state.request_id] = request
        return request

    def _end(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        self._count(SpeculationStats(sources=request.drafter.stats.sources))
        request.call.close()


def _length(state: Any) -> int:
    return len(state.initial_tokens) + len(state.generated_tokens)


def _goes_on(state: Any) -> bool:
    """Whether a request was scheduled with its last token, which the target has chosen."""
    return bool(state.generated_tokens) and state.tokens_to_process == state.generated_tokens[-1:]


def _behind(state: Any) -> int:
    """How many tokens before the last one have to run again."""
    return _length(state) - 1 - state.position_offset if _goes_on(state) else 0


def _lay_out(draft: DraftTree, inputs: dict[str, Any], end: int, seen: int) -> None:
    """Gives the nodes of a draft, which end before this token of a pass and this one of those that
    it attends to, their positions, and shows them their ancestors alone."""
    size, positions, mask = len(draft), inputs["position_ids"], inputs["attention_mask"]
    nodes, columns = slice(end - size, end), slice(seen - size, seen)
    depths = torch.from_numpy(draft.depths()).to(positions)
    positions[..., nodes] = positions[..., nodes.start - 1 : nodes.start] + depths
    hidden = torch.from_numpy(~draft.ancestors()).to(mask.device)
    among = torch.zeros_like(mask[..., nodes, columns])
    mask[..., nodes, columns] = among.masked_fill(hidden, torch.finfo(mask.dtype).min)
