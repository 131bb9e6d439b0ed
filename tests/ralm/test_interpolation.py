"""What is chosen for a kNN-LM on held-out text."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_refspec.ralm.interpolation import LEAST_TOKENS, _best_lambda, choose


def neighbours(count: int, k: int, seed: int, near_are_right: bool = True):
    """Distances of neighbours, whether they are right, and what the model says of the tokens."""
    generator = np.random.default_rng(seed)
    distances = np.sort(generator.exponential(10, (count, k)), axis=1).astype(np.float32)
    chance = np.exp(-distances / 5) if near_are_right else np.zeros((count, k))
    right = generator.random((count, k)) < chance
    return -distances, right, np.log(generator.uniform(0.001, 0.5, count))


def test_lambda_falls_with_the_distance_of_the_nearest_neighbour():
    chosen = choose(*neighbours(2000, 4, seed=0))
    assert len(chosen.lambdas) == 12
    assert chosen.lambdas == sorted(chosen.lambdas, reverse=True)
    assert chosen.lambdas[0] > 0.3 > 0.1 > chosen.lambdas[-1]
    assert chosen.lambda_at(0) == chosen.lambdas[0]
    assert chosen.lambda_at(chosen.distances[0]) == chosen.lambdas[0]
    assert chosen.lambda_at(math.inf) == chosen.lambdas[-1]
    assert chosen.perplexity < chosen.perplexity_alone


def test_lambda_is_zero_where_neighbours_are_never_right():
    chosen = choose(*neighbours(300, 8, seed=0, near_are_right=False))
    assert set(chosen.lambdas) == {0}
    assert chosen.perplexity == pytest.approx(chosen.perplexity_alone)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(LEAST_TOKENS, 500), st.integers(1, 20), st.booleans())
def test_no_choice_is_worse_than_the_model_alone(seed, count, k, near_are_right):
    scores, right, log_lm = neighbours(count, k, seed, near_are_right)
    scores[: count // 2] = np.float32(0)  # and many distances can be the same
    chosen = choose(scores, right, log_lm)
    chosen.check()
    assert chosen.perplexity <= chosen.perplexity_alone * (1 + 1e-9)
    assert chosen.perplexity_alone == pytest.approx(math.exp(-log_lm.mean()))


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=30), st.floats(0, 1))
def test_the_best_lambda_has_the_greatest_likelihood(ratios, unlike):
    ratios = np.array(ratios)

    def likelihood(lambda_: float) -> float:
        of_tokens = np.log(1 - lambda_ + lambda_ * ratios).sum()
        return float(of_tokens + unlike * len(ratios) * math.log(1 - lambda_))

    best = likelihood(min(_best_lambda(ratios, unlike), 1 - 1e-9))
    assert all(likelihood(each) <= best + 1e-6 for each in np.linspace(0, 0.99, 34))
