"""A retriever that fails, or returns something invalid, raises one clear error."""

from __future__ import annotations

import numpy as np
import pytest
from walks import Vectors, Walk, assert_no_search_goes_on, generated

from hf_refspec.ralm.checked_search import RalmError
from hf_refspec.ralm.engine import generate_with_retrieval
from hf_refspec.ralm.options import RalmSpeculation
from hf_refspec.retrieval.retriever import Retrieved


class Failing(Vectors):
    """A retriever whose n-th search fails."""

    def __init__(self, at: int):
        super().__init__()
        self.at = at

    def search(self, queries, k):
        found = super().search(queries, k)
        if self.searches == self.at:
            raise ConnectionError("gone")
        return found


@pytest.mark.parametrize("speculation", [None, *map(RalmSpeculation.parse, ("", "psa"))])
@pytest.mark.parametrize("at", [1, 3])
def test_a_search_that_fails_is_named_and_leaves_what_is_verified(speculation, at):
    plain, _ = generated(None, Vectors())
    text = Walk(20, 0)
    with pytest.raises(RalmError, match=r"Failing\.search raised ConnectionError: gone") as e:
        generate_with_retrieval(text, Failing(at), speculation, k=1)
    assert isinstance(e.value.__cause__, ConnectionError)
    assert text.steps == text.committed == plain[: len(text.steps)]
    assert_no_search_goes_on()


def one(ids, scores):
    return Retrieved(np.array(ids), np.array(scores, dtype=np.float32))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "must return a list"),
        ([], "returned 0 answers"),
        ([one([1], [1.0])] * 2, "returned 2 answers"),
        ([([1], [1.0])], "must return a list of Retrieved"),
        ([one([], [])], "knowledge base empty"),
        ([one([1, 2], [1.0])], "shape"),
        ([one([-1], [1.0])], "no passage's"),
        ([one([1.5], [1.0])], "no passage's"),
        ([one([4, 4], [1.0, 1.0])], "twice"),
        ([one([4], [np.nan])], "not finite"),
        ([one([4], [np.inf])], "not finite"),
    ],
)
def test_answers_that_cannot_be_are_named(answer, message):
    class Wrong(Vectors):
        def search(self, queries, k):
            return answer

    for speculation in (None, RalmSpeculation()):
        with pytest.raises(RalmError, match=rf"Wrong.search.*{message}"):
            generated(speculation, Wrong())


def test_too_few_passages_are_named_where_there_are_more():
    class Few(Vectors):
        def search(self, queries, k):
            found = super().search(queries, k)
            return [Retrieved(f.ids[:n], f.scores[:n]) for f in found for n in [5 - self.searches]]

    with pytest.raises(RalmError, match="3 of the 4 passages"):
        generated(RalmSpeculation(stride=2), Few(), k=4)
    small = Vectors(entries=3)  # which has no more
    assert generated(RalmSpeculation(), small, k=5)[0] == generated(None, small, k=5)[0]
