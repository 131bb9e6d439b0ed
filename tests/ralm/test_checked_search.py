"""A retriever that fails, or whose scores cannot be ranked, raises one clear error."""

import threading
from contextlib import closing

import numpy as np
import pytest

from hf_refspec.ralm.checked_search import CheckedRetriever, RalmError
from hf_refspec.ralm.options import RalmSpeculation
from hf_refspec.ralm.run import generate_with_retrieval
from hf_refspec.retrieval.retriever import Retrieved
from tests.helpers.walks import Vectors, Walk, assert_no_search_goes_on, generated


def test_as_many_searches_run_at_once_as_the_retriever_allows():
    class Together(Vectors):
        concurrent_searches = 3
        all_run = threading.Barrier(3)

        def search(self, queries, k):
            self.all_run.wait(60)
            return super().search(queries, k)

    queries = Vectors().vectors[:3]
    with closing(CheckedRetriever(Together(), 1)) as checked:
        searches = []
        for i in range(3):
            assert checked.idle == 3 - i
            searches.append(checked.begin([queries[i]], 2))
        for query, search in zip(queries, searches, strict=True):
            [found], _ = checked.finish(search)
            [alone] = Vectors().search([query], 2)
            assert found.ids.tolist() == alone.ids.tolist()
        assert checked.idle == 3
    assert_no_search_goes_on()


def test_searches_for_arrays_can_be_told_apart():
    with closing(CheckedRetriever(Vectors(), 1)) as checked:
        searches = [checked.begin([query], 1) for query in Vectors().vectors[:2]]
        searches.remove(searches[1])
    assert len(searches) == 1


class Failing(Vectors):
    """A retriever whose searches fail from the n-th on."""

    def __init__(self, at: int):
        super().__init__()
        self.at = at

    def search(self, queries, k):
        found = super().search(queries, k)
        if self.searches >= self.at:
            raise ConnectionError("gone")
        return found


@pytest.mark.parametrize("speculation", [None, *map(RalmSpeculation.parse, ("", "psa"))])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("concurrent", [1, 4])
def test_a_search_that_fails_is_named_and_leaves_what_is_verified(speculation, at, concurrent):
    plain, _ = generated(None, Vectors())
    text = Walk(20, 0)
    retriever = Failing(at)
    retriever.concurrent_searches = concurrent
    with pytest.raises(RalmError, match=r"Failing\.search raised ConnectionError: gone") as e:
        generate_with_retrieval(text, retriever, speculation, k=1)
    assert isinstance(e.value.__cause__, ConnectionError)
    assert text.steps == text.committed == plain[: len(text.steps)]
    assert_no_search_goes_on()


def one(ids, scores):
    return Retrieved(np.array(ids), np.array(scores, dtype=np.float32))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([one([], [])], "knowledge base empty"),
        ([one([4], [np.nan])], "not finite"),
        ([one([4], [np.inf])], "not finite"),
    ],
)
def test_invalid_answers_are_named(answer, message):
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
