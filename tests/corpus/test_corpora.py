"""The beginning of a corpus."""

from __future__ import annotations

import datasets

from hf_refspec.store.datastore import Datastore


def test_the_first_tokens_of_a_corpus(tmp_path, tokenizer):
    rows = datasets.Dataset.from_dict({"text": ["abcd", "efg", "hij", "k"]})
    for most, count in ((1, 1), (5, 1), (6, 2), (9, 2), (10, 3), (100, 4)):
        store = Datastore.build(rows, tokenizer, tmp_path / str(most), max_tokens=most)
        assert store.documents == count
