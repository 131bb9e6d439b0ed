"""What earlier calls said is drafted again, and only that."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

import hf_refspec as rs
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.contract import Call, Observation
from hf_refspec.drafting.session_drafts import SessionDrafts
from tests.helpers.calls import GREEDY, random_ids
from tests.helpers.drafters import drafted as drafted_after
from tests.helpers.trees import nodes_of

drafted = partial(drafted_after, budget=16, vocab_size=1000)  # without an output: nothing is kept


def speak(cache: SessionDrafts, prompt, output) -> None:
    """A call as the loop makes it."""
    with drafter_call(cache, [np.array(prompt, dtype=np.int64)], 1000):
        for token in output:
            cache.draft(4, Call())
            cache.observe(Observation(np.array([token])))


def test_a_finished_call_is_remembered():
    cache = SessionDrafts()
    speak(cache, [1, 2, 3], [4, 5, 6])
    assert len(cache) == 1
    assert drafted(cache, [9, 4, 5]).tokens.tolist() == [6]
    assert drafted(cache, [9, 2, 3]).tokens.tolist() == [4, 5, 6]
    assert len(drafted(cache, [7, 7])) == 0


def test_a_call_without_output_is_not_remembered():
    cache = SessionDrafts()
    speak(cache, [1, 2, 3], [])
    cache.end()
    with pytest.raises(ValueError), drafter_call(cache, [np.array([1])], 1000):
        raise ValueError
    assert len(cache) == 0
    assert cache  # though it has no length


def test_the_present_call_is_not_drafted_from():
    cache = SessionDrafts()
    cache.begin(np.array([1, 2, 3, 1, 2]), 1000)
    assert len(cache.draft(8, Call())) == 0
    cache.observe(Observation(np.array([3, 1, 2])))
    assert len(cache.draft(8, Call())) == 0


def test_a_draft_ends_with_its_call():
    cache = SessionDrafts()
    cache.add([1, 2], [3])
    cache.add([4, 5], [6])
    assert set(nodes_of(drafted(cache, [8, 2]))) == {(3,)}
    assert len(drafted(cache, [8, 3])) == 0


def test_add_takes_all_kinds_of_ids(tokenizer):
    cache = SessionDrafts(tokenizer)
    cache.add("hello", "world")
    cache.add([1, 2], np.array([3, 4]))
    cache.add(torch.tensor([1, 2]), (5, 6))
    assert len(cache) == 3
    tree = drafted(cache, tokenizer(" wor")["input_ids"], budget=2)
    assert tree.tokens.tolist() == tokenizer("ld")["input_ids"]
    cache.clear()
    assert len(cache) == 0
    assert len(drafted(cache, [1, 2])) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1], []), ValueError, "output is empty"),
        (([1], [-1]), ValueError, "output has the id -1"),
        (([1], "text"), ValueError, "output is a string"),
        (([1.5], [1]), TypeError, "prompt must hold integers"),
    ],
)
def test_add_refuses_what_is_no_call(arguments, error, message):
    cache = SessionDrafts()
    with pytest.raises(error, match=message):
        cache.add(*arguments)
    assert len(cache) == 0


BAD_OPTIONS = {"max_tokens": (0, 1.5, 2**29 + 1), "top_k": (-1, 257, True)}


@pytest.mark.parametrize(
    ("option", "value"), [(name, value) for name in BAD_OPTIONS for value in BAD_OPTIONS[name]]
)
def test_bad_options_are_named(option, value):
    with pytest.raises((ValueError, TypeError), match=option):
        SessionDrafts(**{option: value})


@pytest.mark.parametrize("stored", [False, True])
def test_ids_outside_of_the_vocabulary_are_refused(stored, tmp_path):
    cache = SessionDrafts(path=tmp_path if stored else None)
    cache.add([1], [70])
    error, name = (rs.DatastoreError, tmp_path) if stored else (ValueError, "the cache")
    with pytest.raises(error, match=rf"{name} has the id 70, outside .* vocabulary of 70"):
        cache.begin(np.array([1]), 70)
    cache.begin(np.array([1]), 71)


def test_ids_that_are_remembered_during_a_call_are_not_drafted():
    """They may be of another model, with more tokens."""
    cache = SessionDrafts()
    cache.add([1, 2], [3])
    with drafter_call(cache, [np.array([1, 2])], 70):
        cache.fork().add([1, 2], [70])
        assert cache.draft(4, Call()).tokens.tolist() == [3]
    with pytest.raises(ValueError, match="the id 70"):
        cache.begin(np.array([1]), 70)


def test_similar_sessions_are_drafted_from_with_more_weight():
    cache = SessionDrafts(top_k=1)
    cache.add([1, 50], [60, 61])
    cache.add([2, 50], [60, 62])
    cache.add([3, 50], [60, 63])
    for first, following in ((1, 61), (2, 62), (3, 63)):
        tree = drafted(cache, [first, 60])
        assert set(nodes_of(tree)) == {(61,), (62,), (63,)}
        assert tree.tokens[0] == following
        assert tree.probs[0] > 1.2 * tree.probs[1]


def test_without_similar_sessions_all_count_the_same():
    cache = SessionDrafts(top_k=0)
    speak(cache, [1, 50], [60, 61])
    speak(cache, [2, 50], [60, 62])
    assert nodes_of(drafted(cache, [1, 60])) == nodes_of(drafted(cache, [2, 60]))


def test_forks_share_what_is_remembered():
    cache = SessionDrafts()
    fork = cache.fork()
    with (
        drafter_call(cache, [np.array([1, 2])], 1000),
        drafter_call(fork, [np.array([3, 4])], 1000),
    ):
        cache.observe(Observation(np.array([5])))
        fork.observe(Observation(np.array([6])))
    assert len(cache) == len(fork) == 2
    assert set(nodes_of(drafted(cache, [3, 4]))) == {(6,)}
    assert set(nodes_of(drafted(fork, [1, 2]))) == {(5,)}
    assert fork.stats is not cache.stats


def test_threads_with_one_cache(byte_llama):
    cache = SessionDrafts()
    prompts, options = [random_ids(12, seed) for seed in range(4)], {**GREEDY}
    plain = [byte_llama.generate(prompt, **options).tolist() for prompt in prompts]

    def texts(drafter):
        drafting = {"candidate_generator": drafter, **options}
        return [byte_llama.generate(prompt, **drafting).tolist() for prompt in prompts]

    drafters = [cache, cache.fork(), rs.ReferenceCopy() | cache.fork()]
    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(texts, drafters)] == [plain] * 3
    assert len(cache) == 12
