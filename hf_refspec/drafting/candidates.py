"""transformers' candidate generators as drafters: prompt look-up, assistants, a user's own; and
those that read the target's hidden states (multi-token prediction layers, the assistants of Gemma
4, DFlash).

A source that reads hidden states names in `observed_outputs` what it needs. The call asks for it in
every pass (`Request.pass_kwargs`), `Verifier.states` cuts it to the accepted tokens, and the loop
hands it to `Drafter.observe` as `Observation.states`.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import takewhile
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.generation import CandidateGenerator, PromptLookupCandidateGenerator
from transformers.utils import ModelOutput

from ..transformers_names import SHARED_KV, Choose, choose_by, forget_columns, mtp_layers
from .calibration import Calibration
from .contract import Call, Drafter, Observation, States
from .draft_model import SIBLINGS, DraftedPath, drawn_scores
from .payoff import ModelDrafts
from .top_tokens import top_tokens
from .tree import DraftTree


class CandidateChain(Drafter):
    """Drafts the candidates of a `CandidateGenerator` (prompt look-up, an assistant, your own).

    Its candidates are verified as a chain against the target's own choice, sampled or greedy. The
    logits that it may return serve as estimates of what will be accepted."""

    decides_length = True
    _of_a_call = (*Drafter._of_a_call, "_ids", "_drafted")

    def __init__(self, generator: CandidateGenerator) -> None:
        self.generator = generator

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._ids = torch.from_numpy(prompt_ids)[None]
        self._drafted: DraftTree | None = None

    def draft(self, budget: int, call: Call) -> DraftTree:
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        # An assistant may sample, or have dropout; look-up draws nothing, other threads may.
        draws = not isinstance(self.generator, PromptLookupCandidateGenerator)
        with torch.random.fork_rng(devices, enabled=draws):
            candidate_ids, logits = self.generator.get_candidates(self._ids)
        tokens = candidate_ids[0, self._ids.shape[1] :][:budget]
        probs = None
        if logits is not None and logits.shape[1] >= len(tokens):  # (1, m, vocab_size)
            all_probs = logits[0, : len(tokens)].float().softmax(dim=-1)
            chosen = all_probs.gather(1, tokens[:, None].to(logits.device))[:, 0].nan_to_num(0.0)
            probs = chosen.cumprod(dim=0).clamp(max=1.0).numpy(force=True)
        self._drafted = DraftTree.chain(tokens.numpy(force=True), probs)
        return self._drafted

    def observe(self, observation: Observation) -> None:
        tokens = observation.tokens
        logits = observation.logits
        self._ids = torch.cat([self._ids, torch.from_numpy(tokens)[None]], dim=-1)
        if self._drafted is not None and logits is not None:
            # As if its T candidates had been verified alone: logits (1, 1 + T, vocab_size), and how
            # many candidates were right.
            path = observation.verified.along(self._drafted.tokens.tolist())
            scores = logits[[0, *(1 + node for node in path)]][None]
            pairs = zip(self._drafted.tokens[: len(path)], tokens[:-1], strict=False)
            right = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            self.generator.update_candidate_strategy(self._ids, scores, right)
        self._drafted = None


class HiddenStateDrafts(ModelDrafts):
    """Drafts by a `CandidateGenerator` that reads the target's hidden states: its candidates, each
    with the next best tokens as siblings.

    It reads the hidden states of accepted tokens alone, and after steps without it all that it has
    missed at once. With `max_draft_tokens="auto"` it runs while more tokens per second are expected
    with it. In a blend it drafts after the cheap sources, which continue what it drafted.

    Each text gets a fresh copy of the generator, which shares its modules. It chooses greedily; in
    a sampled call it draws with the random numbers that the target is about to use.

    Args:
        generator (`CandidateGenerator`): One with `requires_model_outputs`, as transformers makes
            it for `use_mtp=True`, for the assistants of Gemma 4 or `speculation_type="dflash"`.

    Raises:
        ValueError: If `generator` does not say what it reads, by `model_kwargs_overrides`.
    """

    _first: int | None  # the first token whose states it has had
    _read: int  # the end of the tokens whose states it has had
    _running: CandidateGenerator | None  # the copy of this text
    _columns: int  # the states that the copy has read
    _unread: list[States]  # those that the copy is to read next
    _again: int  # how many of these, from the first on, it has read before
    _of_a_call = (
        *ModelDrafts._of_a_call,
        *("_first", "_read", "_running", "_columns", "_unread", "_again"),
    )

    def __init__(self, generator: CandidateGenerator) -> None:
        if not hasattr(generator, "model_kwargs_overrides"):
            raise ValueError(
                f"`candidate_generator` is a {type(generator).__name__}, which drafts from the "
                "target model's hidden states, but does not say from which: give it "
                '`model_kwargs_overrides`, such as {"output_hidden_states": True}.'
            )
        self.generator = generator
        self.observed_outputs = dict(generator.model_kwargs_overrides)
        self._depth = 4  # the tokens of its last draft, at first a guess
        parts = (part for module in self.shared() for part in module.modules())
        embeddings = (part.weight.device for part in parts if isinstance(part, nn.Embedding))
        self._device = next(embeddings, torch.device("cpu"))
        super().__init__()

    def shared(self) -> list[Any]:
        return [m for m in vars(self.generator).values() if isinstance(m, nn.Module)]

    def draft(self, budget: int, call: Call) -> DraftTree:
        self._known = call.known
        self._speed = call.speed
        depth = min(budget, call.depth)
        if not self._unread or depth == 0:
            return DraftTree.empty()
        known = np.bincount(call.known.depths(), call.known.probs, 1 + self._depth)
        missed = 1.0 - known[1 : 1 + self._depth].clip(max=1.0)  # by the others, at each depth
        if not self._payoff.pays(call.speed, call.known.probs, missed, depth=self._depth):
            return DraftTree.empty()
        tokens, logits = self._candidates(call)
        self._depth = max(len(tokens), 1)
        tokens = tokens[:depth]
        self._tree = _with_siblings(tokens, logits, call.known)
        path = self._tree.along(tokens.tolist()) if call.chain else []
        return self._cut(budget, call, path, self._tree.probs)

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        states = observation.states
        if states is not None and self._first is None:  # a given cache may hold the first tokens
            self._first = self._read = max(len(self._ids) - 1 - len(states), 0)
        count = len(self._ids) - 1 - self._read  # the last token has not run
        if states is None or not 0 <= count <= len(states):
            self._forget_states()  # it begins anew in the middle, where a pass returns states again
        else:
            # Of the keys, which may be copies of the whole text, the last are valid.
            self._unread = [replace(part, shared_kv=None) for part in self._unread]
            self._unread.append(states.last(count))
            self._read += count

    def _forget_call(self) -> None:
        super()._forget_call()
        self._forget_states()

    def _forget_states(self) -> None:
        self._first = self._running = None
        self._read = self._columns = self._again = 0
        self._unread = []

    def _candidates(self, call: Call) -> tuple[np.ndarray, torch.Tensor | None]:
        """The generator's next tokens, int64 of shape `(m,)`, and their logits or scores
        `(1, m, tokens)`, if it returns any."""
        began = perf_counter()
        states = States.joined(self._unread)
        assert states is not None and self._first is not None
        length = states.position + 2  # of the text: the last token has no state yet
        ids = self._ids[self._first :]
        if SHARED_KV in self.observed_outputs:  # they cover the whole cache: ids too
            ids = np.pad(self._ids, (max(length - len(self._ids), 0), 0))
        input_ids = torch.from_numpy(ids)[None].to(self._device)
        begins = self._columns <= self._again
        if begins:
            shared = {id(module): module for module in self.shared()}
            self._running = copy.deepcopy(self.generator, shared)
            self._columns = self._again = 0
        else:
            forget_columns(self._running, self._again)
        generator: Any = self._running
        choose_by(generator, self.generator, _chooser(call), len(ids))
        device = next(layer.device for layer in states.hidden_states if layer is not None)
        positions = torch.arange(length - len(ids), length, device=device)[None]
        outputs = ModelOutput(hidden_states=states.hidden_states, shared_kv_states=states.shared_kv)
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        # Other threads may draw meanwhile: the generator's state is kept only for dropout.
        draws = any(module.training for top in self.shared() for module in top.modules())
        with torch.random.fork_rng(devices, enabled=draws):
            for is_first in (True, False) if begins else (False,):
                candidate_ids, logits = generator.get_candidates(
                    input_ids,
                    model_kwargs={"position_ids": positions, "attention_mask": None},
                    model_outputs=None if is_first else outputs,
                    is_first_iteration=is_first,
                    n_last_matches=0 if is_first else len(states) - 1,
                )
        self._columns += len(states) - self._again
        self._again = min(len(states), max(mtp_layers(generator) - 1, 0))
        self._unread = [states.last(self._again)] if self._again else []
        if call.speed is not None:
            self._payoff.record_pass(len(states), perf_counter() - began, of_prompt=begins)
        tokens = candidate_ids[0, len(ids) :].numpy(force=True)
        return tokens, None if logits is None else logits[:, : len(tokens), : self._vocab_size]


def _chooser(call: Call) -> Choose | None:
    """For sampled calls what returns the scores whose argmax is drawn; `None` for greedy ones."""
    if call.sampling is None or call.sampling.top_k == 1:
        return None
    return lambda place, logits: drawn_scores(logits[None], place, call)[0]


def _with_siblings(chain: np.ndarray, logits: torch.Tensor | None, known: DraftTree) -> DraftTree:
    """A chain `(m,)` as a tree, with the next best tokens by logits `(1, m, tokens)` beside its
    own; the chain alone if there are none."""
    if logits is None or len(chain) == 0:
        return DraftTree.chain(chain)
    top = top_tokens(logits.float(), SIBLINGS)
    path = DraftedPath(known, chain[:-1].tolist())
    path.extend(top.tokens[0], top.probs[0], Calibration())
    return path.tree
