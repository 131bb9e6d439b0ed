"""A retriever that fails, stalls or returns what it may not is one clear error."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from walks import Vectors, Walk, assert_no_search_goes_on, generated

from hf_refspec.ralm.checked_search import RetrievalError
from hf_refspec.ralm.engine import generate_speculatively
from hf_refspec.ralm.options import Speculation
from hf_refspec.retrieval.retrieved import Retrieved


class Disturbed(Vectors):
    """Calls something before its n-th search returns, and so many times."""

    def __init__(self, at: int, times: int, disturb):
        super().__init__()
        self.at, self.times, self.disturb = at, times, disturb

    def search(self, queries, k):
        found = super().search(queries, k)
        if self.at <= self.searches < self.at + self.times:
            self.disturb()
        return found


def fail():
    raise ConnectionError("gone")


@pytest.mark.parametrize("speculation", [None, *map(Speculation.parse, ("", "psa"))])
@pytest.mark.parametrize("at", [1, 3])
def test_a_search_that_fails_is_tried_once_more(speculation, at):
    plain, _ = generated(None, Vectors())
    assert generated(speculation, Disturbed(at, 1, fail))[0] == plain
    text = Walk(20, 0)
    with pytest.raises(
        RetrievalError, match=r"Disturbed\.search raised ConnectionError 2.*gone"
    ) as e:
        generate_speculatively(text, Disturbed(at, 2, fail), speculation, k=1)
    assert isinstance(e.value.__cause__, ConnectionError)
    assert text.steps == text.committed == plain[: len(text.steps)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_search_that_stalls_is_tried_once_more_and_leaves_no_thread(asynchronous):
    speculation = Speculation(asynchronous=asynchronous, timeout=0.1)
    plain, _ = generated(None, Vectors())
    released, text = threading.Event(), Walk(20, 0)
    assert generated(speculation, Disturbed(3, 1, lambda: released.wait(10)))[0] == plain
    with pytest.raises(RetrievalError, match=r"time limit of 0\.1 seconds"):
        generate_speculatively(text, Disturbed(3, 2, lambda: released.wait(10)), speculation, k=1)
    assert text.steps == text.committed == plain[: len(text.steps)]
    released.set()
    assert_no_search_goes_on()


class FailingScore(Vectors):
    def score(self, query, ids):
        if threading.current_thread().name != "retrieval":
            raise KeyError("unknown id")
        return super().score(query, ids)


def test_a_score_that_fails_is_named():
    with pytest.raises(RetrievalError, match=r"FailingScore.score raised KeyError 2 times"):
        generated(Speculation(), FailingScore())


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

    for speculation in (None, Speculation()):
        with pytest.raises(RetrievalError, match=rf"Wrong.search.*{message}"):
            generated(speculation, Wrong())


def test_too_few_passages_are_named_where_there_are_more():
    class Few(Vectors):
        def search(self, queries, k):
            found = super().search(queries, k)
            return [Retrieved(f.ids[:n], f.scores[:n]) for f in found for n in [5 - self.searches]]

    with pytest.raises(RetrievalError, match="3 of 4 passages"):
        generated(Speculation(stride=2), Few(), k=4)
    small = Vectors(entries=3)  # which has no more
    assert generated(Speculation(), small, k=5)[0] == generated(None, small, k=5)[0]
