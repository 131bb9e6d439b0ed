"""Calls are remembered in order, and forgotten in order."""

import copy
import pickle
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.drafting.session_drafts import Memory
from hf_refspec.store.sessions import DATABASE, SessionDatabase
from tests.helpers.full_disk import full_disk
from tests.helpers.stored import in_a_child


def call(number: int, length: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """A call that says its number and nothing else."""
    return np.full(length // 2, number), np.full(length - length // 2, number)


def remembered(memory: Memory) -> list[tuple[list[int], list[int]]]:
    return [(prompt.tolist(), output.tolist()) for prompt, output in memory.view.sessions()]


def seen(memory: Memory) -> list[int]:
    """All tokens that a draft can see, boundaries as -1."""
    return memory.view.text.tokens.tolist()


def as_text(calls) -> list[int]:
    return [token for prompt, output in calls for token in [*prompt, *output, -1]]


def as_lists(calls):
    return [(prompt.tolist(), output.tolist()) for prompt, output in calls]


@given(st.lists(st.integers(1, 30), max_size=60), st.integers(1, 200))
def test_the_oldest_are_forgotten(lengths, max_tokens):
    memory = Memory(max_tokens)
    calls = [call(i, length) for i, length in enumerate(lengths)]
    kept: list = []
    for each in calls:
        memory.add(*each)
        if sum(map(len, each)) <= max_tokens:  # a longer one pushes nothing out
            kept.append(each)
        while sum(len(p) + len(o) for p, o in kept) > max_tokens:
            kept.pop(0)
        assert remembered(memory) == as_lists(kept)
    expected = as_text(as_lists(kept))
    text = seen(memory)
    assert text[len(text) - len(expected) :] == expected
    assert len(text) - len(expected) <= len(text) / 8


def test_cleared_sessions_leave_no_token():
    memory = Memory(10**6)
    for i in range(300):
        memory.add(*call(i))
        if i % 50 == 20:
            memory.clear()
            assert len(memory) == 0
            assert seen(memory) == []
    assert remembered(memory) == as_lists(call(i) for i in range(271, 300))
    assert seen(memory) == as_text(as_lists(call(i) for i in range(271, 300)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_is_another_memory(copied):
    memory = Memory(75)
    for i in range(20):
        memory.add(*call(i))
    other = copied(memory)
    assert remembered(other) == remembered(memory)
    other.add(*call(99))
    assert remembered(memory) == as_lists(call(i) for i in range(13, 20))
    assert remembered(other) == as_lists(call(i) for i in [*range(14, 20), 99])


def opened(path, max_tokens: int = 10**6) -> Memory:
    return Memory(max_tokens, SessionDatabase(path, max_tokens))


def numbers(memory: Memory) -> list[int]:
    """Those of the calls that are remembered, when all is read."""
    found = [int(prompt[0]) for prompt, _ in memory.refresh().sessions()]
    assert seen(memory)[-2:] == ([found[-1], -1] if found else [])
    return found


def test_what_is_kept_is_remembered_by_the_next(tmp_path):
    memory = opened(tmp_path)
    for i in range(60):
        memory.add(*call(i, 3 + i % 11))
    before, text = remembered(memory), seen(memory)
    memory = opened(tmp_path)
    assert remembered(memory) == before and seen(memory) == text
    for _ in range(2):
        memory.add(*call(60))
        memory = opened(tmp_path, max_tokens=50)
        assert numbers(memory)[-1] == 60 and len(seen(memory)) <= 60


def test_memories_of_one_folder_follow_each_other(tmp_path):
    memories = [opened(tmp_path, max_tokens) for max_tokens in (75, 75, 10**6)]
    for i in range(30):
        memories[i % 2].add(*call(i))
    assert all(numbers(memory) == list(range(23, 30)) for memory in memories[:2])
    assert numbers(memories[2])[-7:] == list(range(23, 30))
    memories[2].clear()
    assert all(numbers(memory) == [] and len(memory) == 0 for memory in memories)
    memories[0].add(*call(30))
    memories[1].add(*call(31))
    assert all(numbers(memory) == [30, 31] for memory in memories)


def test_a_call_begins_with_no_more_than_a_batch_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(SessionDatabase.read, "__defaults__", (100,))
    memory, other = opened(tmp_path), opened(tmp_path)
    for i in range(30):
        other.add(*call(i))
    assert numbers(memory) == [0, 1, 2]
    assert numbers(memory) == [0, 1, 2, 3, 4, 5]
    memory.add(*call(30))
    assert numbers(memory) == list(range(31))


def test_on_a_full_disk_sessions_are_only_in_memory(tmp_path, caplog):
    memory = opened(tmp_path)
    with full_disk():
        memory.add(*call(0))
        memory.add(*call(1))
        assert numbers(memory) == [0, 1]
    memory.add(*call(2))
    with full_disk():
        memory.add(*call(3))
    assert numbers(memory) == [0, 1, 2, 3]
    assert [str(tmp_path / DATABASE) in each.getMessage() for each in caplog.records] == [True] * 2
    other = opened(tmp_path)
    other.add(*call(4))
    assert numbers(other) == [2, 4] and numbers(memory) == [0, 1, 2, 3, 4]
    other.clear()
    assert numbers(memory) == []


def test_a_database_that_is_damaged_meanwhile_ends_no_call(tmp_path, caplog):
    memory = opened(tmp_path)
    memory.add(*call(0))
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        connection.execute("INSERT INTO session (prompt_length, tokens) VALUES (9, 'nothing')")
    connection.close()
    for i in range(1, 4):
        memory.add(*call(i))
        assert numbers(memory) == list(range(i + 1))
    (record,) = caplog.records
    assert f"{tmp_path / DATABASE} is damaged: row 2 is not a session" in record.getMessage()


def test_forks_and_the_process_that_was_forked_go_on(tmp_path):
    memory = opened(tmp_path)
    memory.add(*call(0))

    def child(number: int) -> None:
        memory.add(*call(number))
        assert 0 in numbers(memory) and numbers(memory)[-1] == number
        assert in_a_child(lambda: memory.add(*call(number + 1))) is None
        assert numbers(memory)[-1] == number + 1

    assert in_a_child(lambda: child(1)) is None
    memory.add(*call(3))
    assert numbers(memory) == [0, 1, 2, 3]
    assert numbers(opened(tmp_path)) == [0, 1, 2, 3]


def test_forks_while_threads_write(tmp_path):
    memory, done = opened(tmp_path), threading.Event()

    def keep_adding() -> None:
        while not done.is_set():
            memory.add(*call(1))

    with ThreadPoolExecutor(2) as threads:
        adding = [threads.submit(keep_adding) for _ in range(2)]
        try:
            assert [in_a_child(lambda: memory.add(*call(2))) for _ in range(10)] == [None] * 10
        finally:
            done.set()
    assert [each.result() for each in adding] == [None, None]
    assert numbers(memory).count(2) == 10
    assert remembered(opened(tmp_path)) == remembered(memory)
