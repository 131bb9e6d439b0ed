"""Drafts from a smaller model, as far as its passes pay, beyond what other sources are sure of."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache, DynamicLayer, PreTrainedModel

from ..messages import check_ids
from ..text_config import context_length, text_config
from ..transformers_names import CACHE_NAME, supports_logits_to_keep
from .calibration import Calibration
from .contract import Call, Observation, Sampling
from .payoff import ModelDrafts
from .token_ids import Reference, common_length, to_ids
from .top_tokens import top_tokens
from .tree import ROOT, DraftTree, merged

# The tokens that each pass drafts: the best one, which the next pass continues, and its siblings,
# which cost nothing but the target's pass over them.
SIBLINGS = 4
# The most tokens that top-p may leave: sorting a whole vocabulary takes as long as a small model.
_NUCLEUS = 1024


class DraftModel(ModelDrafts):
    """Drafts by a smaller model, the assistant: a chain of its best tokens, each with the next best
    ones as siblings.

    Each token of the chain takes a forward pass of the assistant. With `max_draft_tokens="auto"` it
    runs while more tokens per second are expected with that pass; with a number of nodes, while
    its best tokens have been accepted that far. In a blend it drafts last: where the other sources
    are sure it does not run, and elsewhere it reads what they drafted and continues it.

    In a sampled call its best tokens are those that it would draw itself with the random numbers
    by which the target is about to draw.

    Forks and copies share the assistant's weights.

    Args:
        assistant (`PreTrainedModel`): A decoder-only model with a key-value cache. It may be on
            another device, and of another type.
        padded (`bool`, *optional*, defaults to `False`): True if its vocabulary may have another
            size than the target's, since the tokens are the same and only the padding differs.
        vocabulary (ids in any form, *optional*): The only tokens that it drafts, such as the most
            frequent ones of a corpus. Its output layer, the larger part of a small assistant's
            pass, is computed for them alone (FR-Spec, arXiv 2502.14856, section 3).

    Raises:
        ValueError: If `assistant` is not a decoder-only language model, or keeps anything but keys
            and values (as Mamba and its hybrids do); if `vocabulary` holds ids that are not its
            own, or its output layer is not linear. A call raises it if the target's vocabulary has
            another size, unless it is `padded`.
    """

    _text: AssistantText | None
    _of_a_call = (*ModelDrafts._of_a_call, "_text")

    def __init__(
        self,
        assistant: PreTrainedModel,
        *,
        padded: bool = False,
        vocabulary: Reference | None = None,
    ) -> None:
        text = AssistantText(assistant)
        reason: Exception | None = None
        try:
            text.read(np.zeros(2, dtype=np.int64), 1)
        except Exception as error:
            reason = error
        if reason is not None or not text.keeps_keys():
            raise ValueError(
                f"assistant is a {type(assistant).__name__}, but must be a decoder-only language "
                "model that keeps just the keys and values of each token"
            ) from reason
        self.assistant = assistant
        self.padded = padded
        self._vocabulary = None if vocabulary is None else _vocabulary_ids(assistant, vocabulary)
        super().__init__()
        self._outcomes = Calibration()  # for all that it drafted, verified or not

    def shared(self) -> list[Any]:
        return [self.assistant, self._vocabulary]

    def check(self, vocab_size: int, processors: Sequence[Any] | None = None) -> None:
        size = self._assistant_size
        if size != vocab_size and not self.padded:
            raise ValueError(
                f"assistant is a {type(self.assistant).__name__} with a vocabulary of {size}, but "
                f"the target model's has {vocab_size}. Use an assistant with the target's "
                "tokenizer; if only the padding of both vocabularies differs, pass "
                "DraftModel(assistant, padded=True). With another tokenizer, draft by "
                "AssistedCandidateGeneratorDifferentTokenizers of transformers: "
                "`drafter | generator`."
            )
        if self._vocabulary is not None:
            check_ids("vocabulary", self._vocabulary[-1], vocab_size, "leave it out")

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        super().begin(prompt_ids, vocab_size)
        self._text = AssistantText(self.assistant, self._vocabulary)

    def draft(self, budget: int, call: Call) -> DraftTree:
        known = self._known = call.known
        self._speed = call.speed
        path = DraftedPath(known)
        estimates = path.tree
        passes = 0
        longest = context_length(self.assistant)
        depth = min(budget, call.depth, (longest or sys.maxsize) - len(self._ids))
        if len(self._ids) == 0:
            depth = 0
        while max(len(path.tokens), passes) < depth and (
            call.chain or path.is_among(estimates, budget)
        ):
            probs = merged([known, estimates], len(known) + len(estimates)).probs
            if self._payoff.pays(call.speed, probs, path.missed, passes):
                best_tokens, best_probs = self._pass(path, call)
                path.extend(best_tokens, best_probs, self._outcomes)
                estimates = self._outcomes.calibrated(path.tree)
                passes += 1
            elif not path.follow():
                break
        self._tree = path.tree
        return self._cut(budget, call, path.nodes, estimates.probs)

    def _pass(self, path: DraftedPath, call: Call) -> tuple[np.ndarray, np.ndarray]:
        """The best next tokens at unread places, and their probabilities, both `(unread, k)`."""
        ids = np.concatenate((self._ids, np.array(path.tokens, dtype=np.int64)))
        ids = np.minimum(ids, self._assistant_size - 1)  # the target's vocabulary may be larger
        assert self._text is not None
        began = perf_counter()
        logits = self._text.read(ids, path.unread)[:, :, : self._vocab_size]
        if call.sampling is not None and call.sampling.top_k != 1:
            kept = slice(None) if self._vocabulary is None else self._vocabulary
            logits = drawn_scores(logits, len(path.tokens) + 1 - path.unread, call, kept)
        top = top_tokens(logits, SIBLINGS)
        if call.speed is not None:
            read = self._text.pass_tokens
            self._payoff.record_pass(read, perf_counter() - began, of_prompt=read == len(ids))
        tokens = top.tokens if self._vocabulary is None else self._vocabulary[top.tokens]
        return tokens[0], top.probs[0]

    def observe(self, observation: Observation) -> None:
        self._outcomes.record(self._tree, observation.tokens)
        super().observe(observation)

    def _forget_call(self) -> None:
        super()._forget_call()
        self._text = None

    @property
    def _assistant_size(self) -> int:
        """The size of the assistant's vocabulary."""
        size: int = text_config(self.assistant).vocab_size
        return size


class AssistantText:
    """A text as an assistant reads it, with a key-value cache of its own.

    A pass first removes rejected tokens from the cache, and reads the tokens that are not there. It
    computes the logits of a `vocabulary` alone, ids in increasing order, if there is one."""

    pass_tokens = 0  # the number of tokens that the last pass read

    def __init__(self, assistant: PreTrainedModel, vocabulary: np.ndarray | None = None) -> None:
        self._assistant = assistant
        self._vocabulary = vocabulary
        if vocabulary is not None:
            layer = assistant.get_output_embeddings()
            ids = torch.from_numpy(vocabulary).to(layer.weight.device)
            bias = None if layer.bias is None else layer.bias.detach()[ids]
            self._output_layer = layer.weight.detach()[ids], bias
        # Without a configuration it keeps all positions, even those past a sliding window, so that
        # it can always go back.
        self._cache = DynamicCache()
        self._read = np.empty(0, dtype=np.int64)  # the tokens in the cache
        self._has_dropout = any(module.training for module in assistant.modules())

    @torch.no_grad()
    def read(self, ids: np.ndarray, count: int) -> torch.Tensor:
        """The logits `(1, count, vocab_size)` after the last `count` > 0 of ids, int64 `(n,)`."""
        kept = min(common_length(self._read, ids), len(ids) - count)
        if kept < len(self._read):
            self._cache.crop(kept - len(self._read))
        self._read = ids
        self.pass_tokens = len(ids) - kept
        assistant = self._assistant
        last: dict[str, int] = {}
        if self._vocabulary is None and supports_logits_to_keep(assistant):
            last = {"logits_to_keep": count}
        model = assistant if self._vocabulary is None else assistant.base_model
        new_ids = torch.from_numpy(ids[kept:])[None]
        device = assistant.device
        if device.type == "meta":  # offloaded: its hooks move what it reads
            device = new_ids.device
        # Dropout must not use up the random numbers of a call that samples.
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices) if self._has_dropout else nullcontext():
            output = model(
                input_ids=new_ids.to(device, non_blocking=True),
                attention_mask=torch.ones((1, len(ids)), dtype=torch.int64, device=device),
                **{CACHE_NAME: self._cache},
                use_cache=True,
                return_dict=True,
                **last,
            )
        if self._vocabulary is not None:
            states = output.last_hidden_state[:, -count:].to(self._output_layer[0].device)
            return nn.functional.linear(states, *self._output_layer)
        logits: torch.Tensor = output.logits[:, -count:]
        return logits

    def keeps_keys(self) -> bool:
        """True if the model has put the keys of each token into the cache, and nothing else."""
        layers = self._cache.layers
        attends = bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
        return attends and self._cache.get_seq_length() == len(self._read)


class DraftedPath:
    """The path that an assistant drafts along, given what other sources drafted.

    Attributes:
        tree ([`DraftTree`]): All nodes that the assistant has drafted, with its own estimates.
        tokens (`list[int]`): The path's tokens. The assistant has yet to read the last one, or the
            last ones if others have drafted them.
        nodes (`list[int]`): The nodes of `tree` along the path, as far as there are any.
        prob (`float`): An estimate that the whole path is accepted.
        unread (`int`): The number of places of the path, including its beginning, where the
            assistant has drafted nothing yet.
    """

    def __init__(self, known: DraftTree, chain: Sequence[int] = ()) -> None:
        """A `chain` is tokens that the path has from the beginning, all of them unread."""
        self.tree = DraftTree.empty()
        self.tokens = [*chain]
        self.nodes: list[int] = []
        self.prob = 1.0
        self.unread = 1 + len(chain)
        self._known = known

    @property
    def missed(self) -> float:
        """An estimate that the path is accepted, and then a token that nobody else has drafted."""
        known_prob, nodes = self._known_next()
        return self.prob * (1.0 - float(self._known.probs[nodes].sum()) / known_prob)

    def is_among(self, estimates: DraftTree, count: int) -> bool:
        """True if the next node is among the `count` most probable of `estimates`."""
        probs = estimates.probs
        return not self.nodes or int((probs > probs[self.nodes[-1]]).sum()) < count

    def follow(self) -> bool:
        """Follows the best token that others have drafted. Returns false if there is none."""
        known_prob, nodes = self._known_next()
        if len(nodes) == 0:
            return False
        best = int(nodes[self._known.probs[nodes].argmax()])
        self.prob *= float(self._known.probs[best]) / known_prob
        self.tokens.append(int(self._known.tokens[best]))
        self.unread += 1
        return True

    def extend(
        self, best_tokens: np.ndarray, best_probs: np.ndarray, outcomes: Calibration
    ) -> None:
        """Adds the assistant's best next tokens and their probabilities, both `(unread, k)`, at all
        unread places. The path follows the most probable one, and so leaves what others have
        drafted where the assistant does not expect it."""
        tokens = self.tree.tokens.tolist()
        parents = self.tree.parents.tolist()
        probs = self.tree.probs.tolist()
        best = -1
        best_depth = 0
        for place in range(self.unread):
            depth = len(self.tokens) + 1 - self.unread + place
            parent = self.nodes[depth - 1] if depth > 0 else ROOT
            before = probs[parent] if depth > 0 else 1.0
            drafted = dict(zip(best_tokens[place].tolist(), best_probs[place], strict=True))
            followed = self.tokens[depth : depth + 1]  # by the path, but at its end
            for token in followed:
                drafted.setdefault(token, best_probs[place, -1])
            for token, prob in drafted.items():
                tokens.append(token)
                parents.append(parent)
                probs.append(before * min(float(prob), 1.0))
                if [token] == followed:
                    self.nodes.append(len(tokens) - 1)
                elif best < 0 or probs[-1] > probs[best]:
                    best = len(tokens) - 1
                    best_depth = depth
        self.tree = DraftTree(np.array(tokens), np.array(parents), np.array(probs))
        self.tokens = [*self.tokens[:best_depth], tokens[best]]
        self.nodes = [*self.nodes[:best_depth], best]
        self.unread = 1
        self.prob = float(outcomes.calibrated(self.tree).probs[best])
        known = self._known.along(self.tokens)
        if len(known) == len(self.tokens):
            self.prob = max(self.prob, float(self._known.probs[known[-1]]))

    def _known_next(self) -> tuple[float, np.ndarray]:
        """Other sources' estimate of the path, 1 if they lack it, and their nodes at its end."""
        known = self._known.along(self.tokens)
        if len(known) < len(self.tokens):
            return 1.0, np.empty(0, dtype=np.int64)
        end = known[-1] if known else ROOT
        prob = float(self._known.probs[end]) if known else 1.0
        return max(prob, 1e-9), np.flatnonzero(self._known.parents == end)


def drawn_scores(
    logits: torch.Tensor, place: int, call: Call, vocabulary: slice | np.ndarray = slice(None)
) -> torch.Tensor:
    """The scores whose argmax a sampled call draws at this place and the next ones, by logits
    `(1, n, tokens)` of all tokens or of a vocabulary: log-probabilities less the logarithm of the
    noise. Their softmax is the probability that each token is drawn if the target's
    log-probabilities differ from them by independent Gumbel noise."""
    assert call.sampling is not None
    scores = _drawable(logits.float(), call.sampling)
    if (noise := call.noise) is None:
        return scores
    rows = torch.stack([noise(place + i) for i in range(scores.shape[1])])[:, vocabulary]
    return scores - rows[:, : scores.shape[2]].log().clamp_min(-80).to(scores.device)


def _drawable(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Float32 logits `(1, n, tokens)` over the temperature, -inf outside of top-k and top-p."""
    logits = logits / sampling.temperature
    if sampling.top_k == 0 and sampling.top_p >= 1.0:
        return logits
    best = logits.topk(min(sampling.top_k or _NUCLEUS, logits.shape[-1])).values
    total = (best if sampling.top_k else logits).logsumexp(dim=-1, keepdim=True)
    probs = (best - total).exp()
    dropped = probs.cumsum(dim=-1) - probs > sampling.top_p
    least = best.masked_fill(dropped, torch.inf).amin(dim=-1, keepdim=True)
    return logits.masked_fill(logits < least, -torch.inf)


def _vocabulary_ids(assistant: PreTrainedModel, vocabulary: Reference) -> np.ndarray:
    """A draft vocabulary in increasing order; refuses one that the assistant cannot draft alone."""
    ids = np.unique(to_ids("vocabulary", vocabulary, None)).astype(np.int64)
    layer = assistant.get_output_embeddings()
    name = type(assistant).__name__
    divides = type(layer) is nn.Linear and not layer.weight.is_meta
    if not divides or assistant.base_model is assistant:
        raise ValueError(
            "vocabulary needs an assistant with a linear output layer, not offloaded, but "
            f"{name}'s is {layer!r}; leave it out"
        )
    if ids[-1] >= layer.out_features:
        raise ValueError(
            f"vocabulary has the id {ids[-1]}, but {name} has {layer.out_features} tokens"
        )
    return ids
