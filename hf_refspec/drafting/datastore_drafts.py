"""Drafts from a datastore: REST, CREST, and a tree mixed from matches of several lengths."""

from __future__ import annotations

from typing import get_args

import numpy as np

from ..check_count import check_count
from ..index.mixed_trie import mixed_tree
from ..index.rest_trie import rest_tree
from ..index.suffix_array import DEPTH
from ..store.compact import CONTINUATIONS, Mode
from ..store.datastore import Datastore
from ..store.files import DatastoreError
from .drafter import Drafter, last_tokens
from .observation import Observation
from .tree import DraftTree

_MIN_MATCH = {"rest": 2, "mixed": 1}


class DatastoreDrafts(Drafter):
    """Drafts what most often followed the last tokens in a datastore.

    With a datastore's full form, the last tokens are searched in its suffix arrays, and the draft
    tree grows out of all that followed them there. With its compact form the tree was grown when
    the form was made, and is only looked up.

    Args:
        store ([`Datastore`]):
            Where to look; made with the target model's tokenizer.
        max_match (`int`, *optional*, defaults to 16):
            How many last tokens may match, 128 at most. (The compact form has its own, smaller
            number.)
        min_match (`int`, *optional*):
            How many last tokens must match; by default 1, and 2 for `mode="rest"`.
        max_continuations (`int`, *optional*):
            How many places are read: about 1000 by default, a fair sample of all that match; for
            `mode="rest"` the first 5000 of each shard.
        continuation_length (`int`, *optional*, defaults to 10):
            How far a draft goes. Where the longest match leaves no choice, a mixed tree goes
            up to 3 times as far.
        mode (`"mixed"` or `"rest"`, *optional*, defaults to `"mixed"`):
            `"rest"` is the algorithm of "REST: Retrieval-Based Speculative Decoding" (arXiv
            2311.08252, section 3), with the settings of its authors' code: the longest suffix of
            the text that occurs in the datastore, of two tokens at least, the trie of what followed
            its first places, its most frequent nodes. `"mixed"` lets shorter matches
            that are more frequent vote as well, see [`~index.mixed_trie.mixed_tree`]: a long
            match that is rare makes a poor tree. The compact form has mixed trees only; to look
            them up is the algorithm of CREST.

    Raises:
        TypeError: if `store` is no [`Datastore`].
        DatastoreError: if a file of the datastore is damaged, as far as its header tells.
        ValueError: if a number is less than 1, `max_match` is more than 128, `max_match` (or the
            longest n-gram of a compact form) less than `min_match`, or there is no such `mode` (in
            this form). `begin` raises a DatastoreError if the datastore's tokens are outside of the
            target's vocabulary, and `draft` if its files do not belong together.
    """

    _shown = (*Drafter._shown, Datastore)

    def __init__(
        self,
        store: Datastore,
        max_match: int = 16,
        min_match: int | None = None,
        max_continuations: int | None = None,
        continuation_length: int = 10,
        mode: Mode = "mixed",
    ) -> None:
        if not isinstance(store, Datastore):
            raise TypeError(
                f"store must be a Datastore, but is {store!r}; open one with "
                "Datastore.from_pretrained(repo_or_path)"
            )
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {get_args(Mode)}, but is {mode!r}")
        if mode == "rest" and store.form == "compact":
            raise ValueError('mode="rest" needs the full form of the datastore; open it with that')
        if max_continuations is None:
            max_continuations = CONTINUATIONS[mode]
        if min_match is None:
            min_match = _MIN_MATCH[mode]
        check_count("max_match", max_match)
        check_count("min_match", min_match)
        check_count("max_continuations", max_continuations)
        check_count("continuation_length", continuation_length)
        if max_match > DEPTH:
            raise ValueError(f"max_match must be at most {DEPTH}, but is {max_match}")
        if max_match < min_match:
            raise ValueError(f"max_match is {max_match}, less than min_match, {min_match}")
        if store.ngrams is not None and store.ngrams.max_ngram < min_match:
            raise ValueError(
                f"min_match is {min_match}, but the n-grams of this compact form have at most "
                f"{store.ngrams.max_ngram} tokens"
            )
        self.store = store
        self.max_match = max_match
        self.min_match = min_match
        self.max_continuations = max_continuations
        self.continuation_length = continuation_length
        self.mode = mode
        self._context = np.empty(0, dtype=np.int32)

    def check_vocabulary(self, vocab_size: int) -> None:
        if self.store.config.vocab_size > vocab_size:
            raise DatastoreError(
                f"{self.store.path} has tokens up to {self.store.config.vocab_size - 1}, outside "
                f"of the target model's vocabulary of {vocab_size}; it was made for another "
                f"tokenizer ({self.store.config.tokenizer[:100]!r}), see Datastore.retokenize"
            )

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self.check_vocabulary(vocab_size)
        self._context = self._context_after(prompt_ids, self._context[:0])

    def draft(self, budget: int) -> DraftTree:
        return self._draft(budget, self._context)

    def continue_path(self, path: np.ndarray, budget: int) -> DraftTree:
        return self._draft(budget, self._context_after(path, self._context))

    def observe(self, observation: Observation) -> None:
        self._context = self._context_after(observation.tokens, self._context)

    def _draft(self, budget: int, context: np.ndarray) -> DraftTree:
        if budget == 0 or len(context) == 0:
            return DraftTree.empty()
        with self.store.naming_damage():
            if self.store.ngrams is not None:
                return DraftTree(*self.store.ngrams.tree(context, self.min_match, budget))
            tree = rest_tree if self.mode == "rest" else mixed_tree
            limits = (budget, self.max_continuations, self.continuation_length)
            return DraftTree(*tree(self.store.shards, context, self.min_match, *limits))

    def _context_after(self, tokens: np.ndarray, before: np.ndarray) -> np.ndarray:
        """The last tokens of a text that continues."""
        context = last_tokens(before, tokens, self.max_match)
        # No match contains a token that the datastore cannot have, beyond its tokenizer's.
        foreign = np.flatnonzero(context >= self.store.config.vocab_size)
        return context[foreign[-1] + 1 :] if len(foreign) else context
