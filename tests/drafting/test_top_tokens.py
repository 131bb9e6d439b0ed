"""The best next tokens of rows of logits, against a sort of each row."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from hf_refspec.drafting.top_tokens import BLOCK, _by_torch, top_tokens

finite = st.floats(-60, 60, width=32) | st.sampled_from([0.0, -0.0, 1.0, -np.inf])
some_logits = arrays(
    np.float32, array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=200), elements=finite
)


def found(logits: np.ndarray, k: int) -> tuple[np.ndarray, ...]:
    """Choices, tokens and probabilities of some rows."""
    return tuple(each[0] for each in top_tokens(torch.from_numpy(logits)[None], k))


def twin(row: np.ndarray, k: int) -> list[int]:
    """By value, then by place."""
    return sorted(range(len(row)), key=lambda token: (-row[token] + 0.0, token))[:k]


@given(some_logits, st.integers(0, 9))
def test_the_best_tokens_are_those_of_a_sort(logits, k):
    k = min(k, logits.shape[1])
    choices, tokens, probs = found(logits, k)
    assert choices.tolist() == torch.from_numpy(logits).argmax(dim=-1).tolist()
    for row, best, estimates in zip(logits, tokens, probs, strict=True):
        # -0.0 may stand behind 0.0, which is equal to it.
        assert row[best].tolist() == row[twin(row, k)].tolist()
        assert len(set(best.tolist())) == k
        assert ((estimates >= 0) & (estimates <= 1)).all() and estimates.sum() <= 1.001
        assert (np.diff(estimates) <= 0).all()


@pytest.mark.parametrize("vocab_size", [1, 5, BLOCK - 1, BLOCK, 10 * BLOCK + 3, 49_152])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("steps", [0, 1, 8])  # many are equal, as in 16 bits, or all
def test_probabilities_are_about_the_softmax(vocab_size, spread, steps):
    logits = np.random.default_rng(0).normal(-7, spread, (9, vocab_size)).astype(np.float32)
    if steps:
        logits = np.round(logits * steps / 8) / steps
    k = min(8, vocab_size)
    _, tokens, probs = found(logits, k)
    softmax = torch.from_numpy(logits).softmax(dim=-1).numpy()
    expected = np.take_along_axis(softmax, tokens, axis=1)
    assert probs == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("place", [0, 70, 199])
def test_nan_is_chosen_as_torch_does_and_promises_nothing(place):
    logits = np.random.default_rng(0).normal(0, 1, (3, 200)).astype(np.float32)
    for nan in (np.float32(np.nan), -np.float32(np.nan)):
        logits[1, place] = nan
        for top in (top_tokens, _by_torch):
            choices, _, probs = top(torch.from_numpy(logits)[None], 4)
            assert choices[0].tolist() == torch.from_numpy(logits).argmax(dim=-1).tolist()
            assert choices[0, 1] == place and not probs[0, 1].any()
            assert probs[0, 0].all() and probs[0, 2].all()


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinite_logits_are_compared_as_numbers(value):
    logits = np.full((2, 300), -1.0, dtype=np.float32)
    logits[0, 123] = value
    logits[1] = value
    choices, _, probs = found(logits, 3)
    assert choices.tolist() == torch.from_numpy(logits).argmax(dim=-1).tolist()
    assert np.isfinite(probs).all()


# --- from any device


@pytest.mark.parametrize("k", [0, 1, 8, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("side_by_side", [True, False])
def test_both_find_what_torch_finds(dtype, k, side_by_side):
    torch.manual_seed(0)
    logits = (3 * torch.randn(2, 5, 300)).to(dtype)
    logits = logits if side_by_side else logits.transpose(0, 1).contiguous().transpose(0, 1)
    expected_probs, expected = logits.float().softmax(dim=-1).topk(min(k, 300), dim=-1)
    for found in (top_tokens(logits, k), _by_torch(logits, min(k, 300))):
        assert found.choices.tolist() == logits.argmax(dim=-1).tolist()
        assert found.tokens.shape == found.probs.shape == (2, 5, min(k, 300))
        values = logits.gather(-1, torch.from_numpy(found.tokens).long())
        assert values.tolist() == logits.gather(-1, expected).tolist()  # equal ones in any order
        assert found.probs == pytest.approx(expected_probs.numpy(), rel=0.15, abs=1e-6)
