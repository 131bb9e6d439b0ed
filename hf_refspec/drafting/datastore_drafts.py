"""Drafts from a datastore: REST, CREST, and a tree mixed from matches of several lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..index.rest_trie import mixed_tree, rest_tree
from ..index.suffix_array import DEPTH
from ..messages import check_count, check_ids
from ..store.datastore import Datastore
from ..store.files import DatastoreError
from .contract import Call, LookUp
from .tree import DraftTree


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
        published (`bool`, *optional*, defaults to `False`):
            `True` is the algorithm of "REST: Retrieval-Based Speculative Decoding" (arXiv
            2311.08252, section 3), with the settings of its authors' code: it drafts what followed
            the first 5000 places of the longest match, of two tokens at least, in each shard. By
            default a fair sample of about 1000 places is read, and shorter, more frequent matches
            vote as well, since a long match that is rare makes a poor tree.

    Raises:
        DatastoreError: If the header of one of its files shows that the file is damaged.
        ValueError: If `max_match` is less than 1 (2 if `published`) or more than 128, or the
            compact form is `published`. A call raises a DatastoreError if the datastore has
            ids outside of the target's vocabulary, and `draft` if its files do not belong
            together.
    """

    _of_a_call = (*LookUp._of_a_call, "_vocab_size")

    def __init__(self, store: Datastore, max_match: int = 16, published: bool = False) -> None:
        if published and store.form == "compact":
            raise ValueError("published=True needs the full form of the datastore; open that one")
        check_count("max_match", max_match, most=DEPTH)
        self.min_match = 2 if published else 1
        if max_match < self.min_match:
            raise ValueError(f"max_match must be at least 2 for published=True, but is {max_match}")
        self.store = store
        self.max_match = self.longest_match = max_match
        self.published = published
        # Documents that are added later refuse no call: their drafts end before such an id.
        self._largest_id = store.largest_id

    def check(self, vocab_size: int, processors: Sequence[Any] | None = None) -> None:
        # A tokenizer may have more ids than its model, if no text of the datastore has them.
        made_for = f"another tokenizer ({self.store.config.tokenizer[:100]!r})"
        remedy = f"it was made for {made_for}, see Datastore.retokenize"
        check_ids(self.store.path, self._largest_id, vocab_size, remedy, DatastoreError)

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self.store.refresh()
        self._vocab_size = vocab_size
        super().begin(prompt_ids, vocab_size)

    def look_up(self, context: np.ndarray, budget: int, behind_path: bool, call: Call) -> DraftTree:
        # No match contains a token beyond the vocabulary of the datastore's tokenizer.
        foreign = np.flatnonzero(context >= self.store.config.vocab_size)
        context = context[foreign[-1] + 1 :] if len(foreign) else context
        if len(context) == 0:
            return DraftTree.empty()
        with self.store.naming_damage():
            if self.store.ngrams is not None:
                tree = self.store.ngrams.tree(context, self.min_match, budget)
            else:
                grow = rest_tree if self.published else mixed_tree
                tree = grow(self.store.shards, context, self.min_match, budget)
        return self._known(DraftTree(*tree))

    def _known(self, tree: DraftTree) -> DraftTree:
        """The nodes that the target knows: a document that was added since may have others."""
        foreign = tree.tokens >= self._vocab_size
        if not foreign.any():
            return tree
        return tree.part(np.logical_not(tree.ancestors()[:, foreign].any(axis=1)))

    def source_texts(self) -> list[tuple[str, Sequence[Any]]]:
        return [(str(self.store.path), [*self.store.shards])]

    def __repr__(self) -> str:
        options = super().__repr__().partition("(")[2]
        return f"DatastoreDrafts({self.store!r}{', ' if options != ')' else ''}{options}"
