"""Drafts from a datastore: REST, CREST, and a tree mixed from matches of several lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from ..check_count import check_count
from ..index.rest_trie import mixed_tree, rest_tree
from ..index.suffix_array import DEPTH
from ..store.compact import CONTINUATIONS, Mode
from ..store.datastore import Datastore
from ..store.files import DatastoreError
from .look_up import LookUp
from .tree import DraftTree

_MIN_MATCH = {"rest": 2, "mixed": 1}
# The depth of a draft; where the longest match leaves no choice, mixed trees are 3 times as deep.
CONTINUATION_LENGTH = 10


class DatastoreDrafts(LookUp):
    """Drafts what most often followed the last tokens in a datastore.

    In a datastore's full form the last tokens are searched in its suffix arrays, and the draft tree
    grows out of all that followed them there. In its compact form the trees were grown when the
    form was made, and are only looked up.

    Args:
        store ([`Datastore`]):
            Where to look; made with the target model's tokenizer.
        max_match (`int`, *optional*, defaults to 16):
            How many of the last tokens may match, 128 at most. (The compact form has its own,
            smaller number.)
        mode (`"mixed"` or `"rest"`, *optional*, defaults to `"mixed"`):
            `"rest"` is the algorithm of "REST: Retrieval-Based Speculative Decoding" (arXiv
            2311.08252, section 3), with the settings of its authors' code: it finds the longest
            suffix of the text, of two tokens at least, that occurs in the datastore, and drafts the
            most frequent nodes of the trie of the 10 tokens behind its first 5000 places in each
            shard, less the longest paths, see [`~index.rest_trie.cut_to_choices`]. `"mixed"` lets
            shorter, more frequent matches vote as well, since a long match that is rare makes a
            poor tree, and reads a fair sample of about 1000 places, see
            [`~index.rest_trie.mixed_tree`]. The compact form has the trees that it was made with.

    Raises:
        TypeError: if `store` is no [`Datastore`].
        DatastoreError: if the header of one of its files shows that the file is damaged.
        ValueError: if `max_match` is less than 1 (2 for `mode="rest"`) or more than 128, or there
            is no such `mode` (in this form). A call raises a DatastoreError if the datastore's
            tokens are outside of the target's vocabulary, and `draft` if its files do not belong
            together.
    """

    def __init__(
        self,
        store: Datastore,
        max_match: int = 16,
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
        check_count("max_match", max_match)
        if max_match > DEPTH:
            raise ValueError(f"max_match must be at most {DEPTH}, but is {max_match}")
        self.min_match = _MIN_MATCH[mode]
        if max_match < self.min_match:
            raise ValueError(f'max_match must be at least 2 for mode="rest", but is {max_match}')
        self.store = store
        self.max_match = self.longest_match = max_match
        self.mode = mode

    def check(self, vocab_size: int, processors: Sequence[Any] | None = None) -> None:
        if self.store.config.vocab_size > vocab_size:
            raise DatastoreError(
                f"{self.store.path} has tokens up to {self.store.config.vocab_size - 1}, outside "
                f"of the target model's vocabulary of {vocab_size}; it was made for another "
                f"tokenizer ({self.store.config.tokenizer[:100]!r}), see Datastore.retokenize"
            )

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self.store.refresh()
        super().begin(prompt_ids, vocab_size)

    def look_up(self, context: np.ndarray, budget: int, behind_path: bool) -> DraftTree:
        # No match contains a token beyond the vocabulary of the datastore's tokenizer.
        foreign = np.flatnonzero(context >= self.store.config.vocab_size)
        context = context[foreign[-1] + 1 :] if len(foreign) else context
        if len(context) == 0:
            return DraftTree.empty()
        with self.store.naming_damage():
            if self.store.ngrams is not None:
                return DraftTree(*self.store.ngrams.tree(context, self.min_match, budget))
            tree = rest_tree if self.mode == "rest" else mixed_tree
            limits = (budget, CONTINUATIONS[self.mode], CONTINUATION_LENGTH)
            return DraftTree(*tree(self.store.shards, context, self.min_match, *limits))

    def source_texts(self) -> list[tuple[str, Sequence[Any]]]:
        return [(str(self.store.path), [*self.store.shards])]

    def __repr__(self) -> str:
        given = super().__repr__().partition("(")[2]
        return f"DatastoreDrafts({self.store!r}{', ' if given != ')' else ''}{given}"
