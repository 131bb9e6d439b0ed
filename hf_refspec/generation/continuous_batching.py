"""Drafts for `generate_batch`: transformers' continuous batching, whose passes then verify chains.

The classes of transformers behind it are private and change. All that depends on them stands in
this file, and `_METHODS` and `_NAMES` list it: a transformers that differs is refused.

A pass is scheduled as ever. Only then is a chain appended to each request that decodes, within what
the pass has left, so that no draft takes a place, a token or a block of the cache from another
request or a prompt. The pass yields logits at every token of a chain. Those that the target chose
are emitted one after another, and the request's position goes back by the others: the next pass
writes over them. A draft never reaches the last token of a page, so that what completes a page,
which other requests may then share, is never a rejected token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from ..drafting.drafter import Drafter, Sampling, checked_draft
from ..drafting.observation import Observation
from ..drafting.stats import SpeculationStats
from ..drafting.top_tokens import top_tokens
from ..drafting.tree import DraftTree
from ..text_config import context_length, text_config
from ..verification.choice import RefusedCallError
from .budget import make_shared_budget
from .default_drafter import DrafterPool

if TYPE_CHECKING:
    from ..attachment import Attachment

# Returns a drafter that no other call has, for as long as a manager runs.
Source: TypeAlias = Callable[[], AbstractContextManager[Drafter]]

_PACKAGE = "transformers.generation.continuous_batching."
# The methods that this file calls or replaces, with their parameters.
_METHODS: dict[tuple[str, str, str], tuple[str, ...]] = {
    ("continuous_api", "ContinuousBatchingManager", "start"): (),
    ("continuous_api", "ContinuousBatchingManager", "is_running"): (),
    ("continuous_api", "ContinuousBatchingManager", "_create_batch_processor"): (),
    ("continuous_api", "ContinuousBatchingManager", "_run_generation_loop"): (),
    ("continuous_api", "OutputRouter", "deliver"): ("output",),
    ("scheduler", "FIFOScheduler", "schedule_batch"): ("token_budget", "cache_budget"),
    ("scheduler", "PrefillFirstScheduler", "schedule_batch"): ("token_budget", "cache_budget"),
    ("input_outputs", "ContinuousBatchingIOs", "get_model_kwargs"): ("use_padding",),
    ("input_outputs", "ContinuousBatchingIOs", "prepare_batch_update"): (),
    ("model_runner", "ModelRunner", "compute_batch"): ("model", "batch_data"),
    ("requests", "RequestState", "update_and_check_completion"): ("token_id", "logprob"),
    ("requests", "RequestState", "to_generation_output"): (),
}
# Other names that these classes define or use.
_NAMES: dict[tuple[str, str], tuple[str, ...]] = {
    ("continuous_api", "ContinuousBatchProcessor"): (
        *("inputs_and_outputs", "model_runner", "scheduler", "cb_config", "output_router"),
        *("schedule_batch", "get_model_kwargs", "compute_batch", "prepare_batch_update"),
    ),
    ("scheduler", "Scheduler"): ("active_requests", "waiting_requests"),
    ("input_outputs", "ContinuousBatchingIOs"): ("num_request_in_batch", "position_offset"),
    ("input_outputs", "PagedAttentionArgs"): ("logits_indices", "logits_processor_args"),
    ("model_runner", "ModelRunner"): ("supports_logits_to_keep",),
    ("requests", "RequestState"): (
        *("request_id", "initial_tokens", "generated_tokens", "tokens_to_process", "streaming"),
        *("position_offset", "is_cpu_offloaded", "_eos_token_ids", "_new_tokens_limit"),
    ),
    ("requests", "FutureRequestState"): ("state", "has_new_token", "query_length"),
}


def check_transformers() -> None:
    """Refuses a transformers whose continuous batching is built otherwise."""
    differing = [
        f"{name}.{method}"
        for (module, name, method), parameters in _METHODS.items()
        if _parameters(_class(module, name), method) != parameters
    ]
    for (module, name), names in _NAMES.items():
        known = _names(_class(module, name))
        differing += [f"{name}.{each}" for each in names if each not in known]
    if differing:
        raise RefusedCallError(
            "`candidate_generator` with continuous batching needs transformers 5.17 to 5.23, and "
            f"in transformers {transformers.__version__} these differ: {', '.join(differing)}. "
            "Leave it out, or call `generate`."
        )


def _class(module: str, name: str) -> Any:
    try:
        return getattr(import_module(_PACKAGE + module), name, None)
    except ImportError:
        return None


def _parameters(kind: Any, method: str) -> tuple[str, ...] | None:
    function = getattr(kind, method, None)
    return None if function is None else tuple(inspect.signature(function).parameters)[1:]


def _names(kind: Any) -> set[str]:
    methods = [inspect.unwrap(each) for each in vars(kind or object).values() if callable(each)]
    used = {name for each in methods if inspect.isfunction(each) for name in each.__code__.co_names}
    return {*dir(kind), *getattr(kind, "__annotations__", ()), *used}


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
        chain: the beginning of it that is verified.
    """

    future: Any
    state: Any
    request: _Request | None
    draft: DraftTree = field(default_factory=DraftTree.empty)
    chain: DraftTree = field(default_factory=DraftTree.empty)

    @property
    def decodes(self) -> bool:
        """Whether it goes on by its last token, which was scheduled."""
        last = self.state.generated_tokens[-1:]
        began = self.request is not None and not self.state.is_cpu_offloaded
        return began and bool(last) and self.state.tokens_to_process == last


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
    ) -> None:
        config = text_config(manager.model)
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
            self._pool, self._calibration = DrafterPool(drafter.fork()), drafter.calibration
            self._budget = make_shared_budget(self._max_draft_tokens, drafter, self._manager.model)
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
        scheduled = type(scheduler).schedule_batch(scheduler, token_budget, cache_budget)
        futures, single_tokens, tokens, reads = scheduled
        self._passed = SpeculationStats()
        for request_id in self._requests.keys() - scheduler.active_requests.keys():
            if request_id not in scheduler.waiting_requests:
                self._end(request_id)
        self._parts = [self._part(future) for future in futures or () if future.has_new_token]
        decoding = [part for part in self._parts if part.decodes]
        # Passes over single tokens may read more of the cache than others have room for.
        drafted = self._draft(decoding, token_budget - tokens) if reads <= cache_budget else 0
        only_decodes = len(decoding) == len(futures or ())
        self._pass_tokens = tokens + drafted if only_decodes else None
        self._began = perf_counter()
        return futures, single_tokens and not drafted, tokens + drafted, reads

    def _part(self, future: Any) -> _Part:
        state, request = future.state, self._requests.get(future.state.request_id)
        if request is not None and request.seen != _length(state):  # another one of that name
            self._end(state.request_id)
            request = None
        return _Part(future, state, request)

    def _draft(self, parts: list[_Part], room: int) -> int:
        """Appends chains, of `room` tokens at most together; returns of how many."""
        began = perf_counter()
        estimates = []
        for part in parts:
            assert part.request is not None  # it decodes
            part.draft = self._drafted(part.state, part.request, room)
            estimates.append(part.request.drafter.calibration.calibrated(part.draft))
        shares = self._budget.share(estimates, room, perf_counter() - began)
        for part, nodes in zip(parts, shares, strict=True):
            part.chain = part.draft.truncated(nodes)
            part.future.query_length += nodes
            part.state.tokens_to_process = part.state.tokens_to_process + part.chain.tokens.tolist()
        self._passed.drafting_seconds = perf_counter() - began
        return sum(shares)

    def _drafted(self, state: Any, request: _Request, room: int) -> DraftTree:
        request.drafter.begin_late(request.output)
        position = state.position_offset
        room = min(
            room,
            self._budget.nodes,
            self._page_size - position % self._page_size - 2,
            self._context - position - 1,
            state._new_tokens_limit - len(state.generated_tokens) - 1,  # one is the target's own
        )
        if room <= 0 or request.drafter.waits:
            return DraftTree.empty()
        if request.drafter.costly:
            request.drafter.prices = self._budget.prices
        draft = checked_draft(request.drafter, room, self._vocab_size, chain=True)
        # What ends a text is chosen without a draft: no token follows it.
        ends = np.flatnonzero(np.isin(draft.tokens, [*state._eos_token_ids]))
        return draft.truncated(int(ends[0])) if len(ends) else draft

    def _get_model_kwargs(self, use_padding: bool = False) -> dict[str, Any]:
        inputs = type(self._io).get_model_kwargs(self._io, use_padding)
        chains = {id(part.future): len(part.chain) for part in self._parts}
        rows: list[int] = []  # the tokens after which a token is chosen
        end = 0
        for future in self._io.requests_in_batch:
            end += future.query_length
            if future.has_new_token:
                rows += range(end - 1 - chains[id(future)], end)
        if rows:
            device = inputs["logits_indices"].device
            inputs["logits_indices"] = torch.tensor(rows, dtype=torch.int32, device=device)
            # Of the processors, which have one for each request.
            numbers = np.repeat(np.arange(len(chains)), [1 + nodes for nodes in chains.values()])
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
        io.num_request_in_batch = sum(1 + len(part.chain) for part in parts)
        futures, chosen, logprobs = type(io).prepare_batch_update(io)
        seconds = perf_counter() - self._began
        if self._pass_tokens is None:
            self._passed.prefill_seconds = seconds
        else:
            self._passed.verifying_seconds = seconds
            self._budget.record(self._pass_tokens, seconds)
        ends = np.cumsum([1 + len(part.chain) for part in parts]).tolist()
        rows = [
            slice(end - 1 - len(part.chain), end) for part, end in zip(parts, ends, strict=True)
        ]
        emitted = [_accepted(part.chain, chosen[at]) for part, at in zip(parts, rows, strict=True)]
        last = [at.start + len(tokens) - 1 for at, tokens in zip(rows, emitted, strict=True)]
        self._observe(parts, emitted, rows, logits)
        for part, at, tokens in zip(parts, rows, emitted, strict=True):
            self._emit(part, tokens[:-1], None if logprobs is None else logprobs[at])
        return (
            futures,
            [chosen[i] for i in last],
            None if logprobs is None else [logprobs[i] for i in last],
        )

    def _emit(self, part: _Part, tokens: list[int], logprobs: list[float] | None) -> None:
        """Emits all tokens of a pass but the last one."""
        state = part.state
        state.position_offset -= len(part.chain) - len(tokens)
        for i, token in enumerate(tokens):
            state.update_and_check_completion(token, None if logprobs is None else logprobs[i])
            if state.streaming:
                self._processor.output_router.deliver(state.to_generation_output())

    def _observe(
        self,
        parts: list[_Part],
        emitted: list[list[int]],
        rows: list[slice],
        logits: torch.Tensor,
    ) -> None:
        """Shows the drafters what was verified, and counts it."""
        began = perf_counter()
        requests = [part.request or self._begin(part.state) for part in parts]
        drafters = [request.drafter for request in requests if not request.drafter.waits]
        k = max((drafter.observed_top_k for drafter in drafters), default=0)
        top = top_tokens(logits[None], k) if k > 0 else None
        for part, request, tokens, at in zip(parts, requests, emitted, rows, strict=True):
            request.seen += len(tokens)
            request.output += tokens
            if request.drafter.waits:
                continue
            new = np.array(tokens, dtype=np.int64)
            if len(part.draft):
                request.drafter.calibration.record(part.draft, new)
            expected = () if top is None else (top.tokens[0, at], top.probs[0, at])
            request.drafter.observe(Observation(new, part.chain, logits[at], *expected))
        self._passed.record_rows(
            (len(part.chain), len(tokens) - 1) for part, tokens in zip(parts, emitted, strict=True)
        )
        self._passed.learning_seconds = perf_counter() - began
        self._count(self._passed)

    def _count(self, stats: SpeculationStats) -> None:
        self._stats += stats
        if self._attachment is not None:
            self._attachment.count(stats)

    def _begin(self, state: Any) -> _Request:
        call = ExitStack()
        drafter = call.enter_context(self._pool.drafter())
        drafter.calibration = self._calibration  # what became of all drafts corrects all estimates
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


def _accepted(chain: DraftTree, chosen: list[int]) -> list[int]:
    """The chain's tokens that the target chose, and the one that it chose after them."""
    count = 0
    while count < len(chain) and chain.tokens[count] == chosen[count]:
        count += 1
    return chosen[: count + 1]
