"""Drafts from a smaller model, as far as its passes pay, after what other sources are sure of."""

from __future__ import annotations

import copy
from time import perf_counter
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..text_config import context_length, text_config
from .assistant_text import AssistantText
from .calibration import Calibration
from .draft_path import DraftPath
from .draft_vocabulary import DraftVocabulary
from .drafter import Drafter
from .observation import Observation
from .payoff import Payoff, Prices
from .token_ids import Reference, check_tokenizer
from .top_tokens import TopTokens
from .tree import ROOT, DraftTree, merged

# How many of the best next tokens of each pass are drafted: the best one goes on, the others stand
# beside it. They cost nothing but the target's pass over them.
_SIBLINGS = 4


class DraftModel(Drafter):
    """Drafts what a smaller model, the assistant, expects: a chain of its best tokens, and beside
    each the next best ones.

    Each token of the chain takes a forward pass of the assistant. With `max_draft_tokens="auto"` it
    goes on only while the time that the next token is expected to save is longer. In a blend it is
    asked last: where the other sources are sure it does not run at all; it reads what they drafted
    and goes on from where they no longer are.

    Forks and copies share the assistant's weights.

    Args:
        assistant (`PreTrainedModel`): A decoder-only model with a key-value cache. It may be on
            another device, and of another type.
        tokenizer, assistant_tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's and the
            assistant's, which must have the same tokens. They show that vocabularies of different
            sizes differ in padding alone.
        vocabulary (ids in any form, *optional*): The only tokens that it drafts. Its output layer
            is read for them alone, which of a small assistant is the larger part of a pass
            (FR-Spec, arXiv 2502.14856, section 3): the most frequent of a corpus, for example.

    Raises:
        TypeError: If `assistant` is no `PreTrainedModel`, or `vocabulary` holds no integers.
        ValueError: If it keeps something else than keys and values (Mamba and its hybrids), or is
            an encoder-decoder model; if the tokenizers differ, or one of them is missing; if
            `vocabulary` holds ids that are not its own, or its logits have not the order of a
            linear layer's. Without tokenizers, a call raises it if the target's vocabulary has
            another size.
    """

    costly = True
    _tree: DraftTree  # all that the assistant said of the next tokens

    def __init__(
        self,
        assistant: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
        vocabulary: Reference | None = None,
    ) -> None:
        check_tokenizer(tokenizer)
        check_tokenizer(assistant_tokenizer)
        _check_assistant(assistant)
        self.assistant = assistant
        self.tokenizer, self.assistant_tokenizer = tokenizer, assistant_tokenizer
        _check_same(tokenizer, assistant_tokenizer)
        self._vocabulary = None
        if vocabulary is not None:
            self._vocabulary = _checked_vocabulary(assistant, vocabulary)
        self.calibration = Calibration()  # its estimates are a model's own: nothing to doubt
        self._outcomes = Calibration()  # of all that it says of the next tokens, verified or not
        self._payoff = Payoff()
        self._forget_call()

    def __repr__(self) -> str:
        return f"DraftModel({type(self.assistant).__name__})"

    def __deepcopy__(self, memo: dict[int, Any]) -> DraftModel:
        tokenizers = self.tokenizer, self.assistant_tokenizer
        for shared in (self.assistant, self._vocabulary, *tokenizers):
            memo[id(shared)] = shared
        copied = type(self).__new__(type(self))
        copied.__dict__ |= copy.deepcopy(self.__getstate__(), memo)
        return copied

    def check_vocabulary(self, vocab_size: int) -> None:
        own = self._assistant_size
        if own != vocab_size and self.tokenizer is None:
            raise ValueError(
                f"assistant is a {type(self.assistant).__name__} with a vocabulary of {own}, but "
                f"the target model's has {vocab_size}; pass DraftModel(assistant, tokenizer=..., "
                "assistant_tokenizer=...)"
            )
        if self._vocabulary is not None and self._vocabulary.ids[-1] >= vocab_size:
            raise ValueError(
                f"vocabulary has the id {self._vocabulary.ids[-1]}, which the target model's, of "
                f"{vocab_size} tokens, does not have"
            )

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._forget_call()
        self._ids = prompt_ids
        self._vocab_size = vocab_size
        if self.sampling is not None and self.sampling.top_k != 1:
            self._temperature = self.sampling.temperature

    def draft(self, budget: int) -> DraftTree:
        self._grow(budget, chain=False)
        nodes = np.argsort(-self._tree.probs, kind="stable")[:budget]  # parents come first
        return self._tree.part(np.isin(np.arange(len(self._tree)), nodes))

    def draft_chain(self, budget: int) -> DraftTree:
        nodes = self._grow(budget, chain=True)
        return DraftTree.chain(self._tree.tokens[nodes], self._tree.probs[nodes])

    def observe(self, observation: Observation) -> None:
        tokens = observation.tokens
        self._outcomes.record(self._tree, tokens)
        outcome, nodes = self._outcome(tokens), len(observation.verified)
        self._payoff.record_outcome(*outcome, len(tokens), self.known.probs, nodes)
        self._ids = np.concatenate((self._ids, tokens))
        self._tree = DraftTree.empty()

    def end(self) -> None:
        self._payoff.end_text()
        self._forget_call()

    def _forget_call(self) -> None:
        self._ids = np.empty(0, dtype=np.int64)  # the text so far
        self._text = AssistantText(self.assistant, self._vocabulary)
        self._temperature = 1.0
        self._tree = self.known = DraftTree.empty()
        self.prices = self._payoff.prices = Prices()

    def _grow(self, budget: int, chain: bool) -> list[int]:
        """Drafts one path, and all that stands beside it; returns the path's nodes."""
        self._payoff.prices = self.prices
        path = DraftPath(self.known)
        depth = min(budget, self._room()) if len(self._ids) else 0
        passes = 0
        while max(len(path.tokens), passes) < depth and (chain or path.is_among(budget)):
            ids = np.concatenate((self._ids, np.array(path.tokens, dtype=np.int64)))
            ids = np.minimum(ids, self._assistant_size - 1)  # the target's may have more
            if self._payoff.pays(self._estimates(path), path.missed):
                path.extend(self._pass(ids, path.unread), self._outcomes)
                passes += 1
            elif not path.follow():
                break
        self._tree = path.tree
        return path.nodes

    def _estimates(self, path: DraftPath) -> np.ndarray:
        """Of all that others have drafted, and of what the assistant has said so far."""
        own = self._outcomes.calibrated(path.tree)
        return merged([self.known, own], len(self.known) + len(own)).probs

    def _pass(self, ids: np.ndarray, count: int) -> TopTokens:
        """The best next tokens after each of the last ids."""
        of_prompt, unread = self._text.is_new, self._text.unread(ids)
        began = perf_counter()
        limits = _SIBLINGS, self._temperature, self._vocab_size
        top = self._text.next_tokens(ids, count, *limits)
        self._payoff.record_pass(unread, perf_counter() - began, of_prompt)
        return top

    @property
    def _assistant_size(self) -> int:
        """How many tokens the assistant knows."""
        size: int = text_config(self.assistant).vocab_size
        return size

    def _room(self) -> int:
        """How many more tokens the assistant can read."""
        most = context_length(self.assistant)
        return 2**31 if most is None else most - len(self._ids)

    def _outcome(self, tokens: np.ndarray) -> tuple[int, int, int]:
        """Where no other source was right: at how many places the assistant was asked, at how many
        its tokens were accepted, and at how many the best of them."""
        mine, theirs = self._tree.children(), self.known.children()
        node: int | None = ROOT
        other: int | None = ROOT
        asked = accepted = best = 0
        for place, token in enumerate(tokens.tolist()):
            children = np.flatnonzero(self._tree.parents == node)  # the best one first
            if node is None or len(children) == 0:
                break
            node = mine.get((node, token))
            other = None if other is None else theirs.get((other, token))
            if other is None:
                right = node is not None and place < len(tokens) - 1
                asked += 1
                accepted += right
                best += right and node == children[0]
        return asked, accepted, best


def _check_same(
    tokenizer: PreTrainedTokenizerBase | None, other: PreTrainedTokenizerBase | None
) -> None:
    """Refuses two tokenizers with different tokens, and one without the other."""
    if tokenizer is None and other is None:
        return
    if tokenizer is None or other is None:
        missing = "assistant_tokenizer" if other is None else "tokenizer"
        raise ValueError(f"{missing} is missing; pass both tokenizers, or neither")
    if tokenizer.get_vocab() != other.get_vocab():
        raise ValueError(
            f"assistant_tokenizer has other tokens than tokenizer ({len(other)} and "
            f"{len(tokenizer)}); use an assistant with the target's tokenizer, or draft from "
            "transformers' AssistedCandidateGeneratorDifferentTokenizers: `drafter | generator`"
        )


def _check_assistant(assistant: PreTrainedModel) -> None:
    """Refuses what cannot draft, by a pass over two tokens."""
    if not isinstance(assistant, PreTrainedModel):
        raise TypeError(f"assistant must be a PreTrainedModel, but is {assistant!r}")
    name = type(assistant).__name__
    if assistant.config.is_encoder_decoder or not assistant.can_generate():
        raise ValueError(f"assistant must be a decoder-only language model, but is a {name}")
    text = AssistantText(assistant)
    try:
        text.read(np.zeros(2, dtype=np.int64), 1)
    except Exception as error:
        reason: Exception | None = error
    else:
        reason = None
    if reason is not None or not text.keeps_keys():
        raise ValueError(
            f"assistant is a {name}, which cannot go back in its text: it does not keep just the "
            "keys and values of each token. Use one with attention alone."
        ) from reason


def _checked_vocabulary(assistant: PreTrainedModel, tokens: Reference) -> DraftVocabulary:
    """A part of the assistant's; refuses it where the assistant's logits have another order."""
    vocabulary = DraftVocabulary(assistant, tokens)
    ids = vocabulary.ids[-2:]
    logits = AssistantText(assistant).read(ids, 1)[0, 0, vocabulary.ids].float()
    own = AssistantText(assistant, vocabulary).read(ids, 1)[0, 0].float()
    if logits[int(own.argmax())] < logits.max() - 0.01 * logits.abs().max():
        raise ValueError(
            "vocabulary needs an assistant whose logits are its output layer over its last hidden "
            f"state, which those of {type(assistant).__name__} are not; leave it out"
        )
    return vocabulary
