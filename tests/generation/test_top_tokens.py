"""The target's best next tokens on the host: from a CPU's memory, or in one copy from a device."""

from __future__ import annotations

import pytest
import torch

from hf_refspec.generation.top_tokens import _on_device, top_tokens


@pytest.mark.parametrize("k", [0, 1, 8, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_find_what_torch_finds(dtype, k):
    torch.manual_seed(0)
    logits = (3 * torch.randn(2, 5, 300)).to(dtype)
    expected_probs, expected = logits.float().softmax(dim=-1).topk(min(k, 300), dim=-1)
    for found in (top_tokens(logits, k), _on_device(logits, min(k, 300))):
        assert found.choices.tolist() == logits.argmax(dim=-1).tolist()
        assert found.tokens.shape == found.probs.shape == (2, 5, min(k, 300))
        values = logits.gather(-1, torch.from_numpy(found.tokens).long())
        assert values.tolist() == logits.gather(-1, expected).tolist()  # equal ones in any order
        assert found.probs == pytest.approx(expected_probs.numpy(), rel=0.15, abs=1e-6)


def test_logits_need_not_lie_side_by_side():
    logits = torch.randn(7, 3, 40).transpose(0, 1)
    assert top_tokens(logits, 2).choices.tolist() == logits.argmax(dim=-1).tolist()


def test_logits_that_are_nan_promise_nothing():
    logits = torch.full((1, 2, 30), float("nan"))
    for found in (top_tokens(logits, 3), _on_device(logits, 3)):
        assert found.choices.tolist() == logits.argmax(dim=-1).tolist()
        assert not found.probs.any()
