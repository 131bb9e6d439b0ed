"""Prompts are similar if they have tokens in common."""

from __future__ import annotations

import numpy as np
import pytest

from hf_refspec.drafting.sessions.similar_prompts import SimilarPrompts, signature


def prompts(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 50_000, rng.integers(1, 200)) for _ in range(count)]


def test_a_signature_is_of_the_set_of_tokens():
    (prompt,) = prompts(1)
    vector = signature(prompt)
    assert (vector.dtype, vector.shape) == (np.float32, (256,))
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    for same in (prompt[::-1], np.tile(prompt, 3), prompt.astype(np.uint16)):
        assert signature(same).tolist() == vector.tolist()
    assert not signature(np.empty(0, np.int64)).any()


def test_inner_products_are_about_cosines():
    rng = np.random.default_rng(1)
    errors = []
    for common in range(0, 101, 5):
        ids = rng.choice(100_000, 200 - common, replace=False)
        expected = common / 100  # of two sets of 100
        errors.append(signature(ids[:100]) @ signature(ids[100 - common :]) - expected)
    assert np.abs(errors).max() < 0.25
    assert np.abs(np.mean(errors)) < 0.05


def test_finds_what_a_sort_finds():
    similar, all_prompts = SimilarPrompts(first=3), prompts(50)
    for i, prompt in enumerate(all_prompts):
        similar.add(prompt)
        scores = np.array([signature(each) @ signature(prompt) for each in all_prompts[: i + 1]])
        found = similar.search(prompt, 3, 4)
        assert found[-1] == 3 + i
        np.testing.assert_allclose(scores[np.array(found) - 3], np.sort(scores)[-4:], atol=1e-6)


def test_of_equal_prompts_the_newest_is_last():
    similar = SimilarPrompts()
    for prompt in ([1, 2], [8, 9], [2, 1], [1, 2, 2]):
        similar.add(np.array(prompt))
    assert similar.search(np.array([1, 2]), 0, 3) == [0, 2, 3]
    assert similar.search(np.array([8]), 0, 1) == [1]


def test_what_is_forgotten_is_not_found():
    similar, kept = SimilarPrompts(), prompts(40)
    for number, prompt in enumerate(kept):
        similar.add(prompt)
        oldest = max(number - 4, 0)
        similar.forget(oldest)
        assert sorted(similar.search(prompt, oldest, 9)) == list(range(oldest, number + 1))
    similar.forget(40)
    assert similar.search(kept[0], 40, 4) == []
    similar.add(kept[0])
    assert similar.search(kept[0], 40, 4) == [40]


def test_nothing_to_find():
    assert SimilarPrompts().search(np.array([1]), 0, 3) == []
