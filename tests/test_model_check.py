"""`check` says what a model's drafts are verified by, and what they cost."""

import pytest
import torch

import hf_refspec as rs
from hf_refspec.kernels import narrow_product as kernel
from hf_refspec.model_check import TIMED_TOKENS


def test_a_model_that_verifies_trees(llama):
    found = rs.check(llama, context=16)
    assert (found.verification, found.rows, found.reason) == ("tree", "tree", None)
    assert (found.model, found.dtype, found.device) == ("LlamaForCausalLM", "float32", "cpu")
    assert list(found.relative_costs) == list(TIMED_TOKENS)
    assert found.plain_seconds > 0 and all(cost > 0 for cost in found.relative_costs.values())
    table = str(found)
    assert found.cache == "DynamicCache (2 DynamicLayer)" and found.cache in table
    assert all(f"{n:16d}   {found.relative_costs[n]:.2f}" in table for n in TIMED_TOKENS)
    assert '"auto" verifies' in table


@pytest.mark.parametrize(
    ("switch", "dtype", "narrow_kernel"),
    [
        ("0", torch.float32, "inactive: `HF_REFSPEC_NARROW_PRODUCTS` is 0"),
        ("1", torch.float16, "inactive: torch multiplies float16 itself on this CPU"),
        ("1", torch.float32, "active"),
    ],
)
def test_the_table_says_whether_the_kernel_for_narrow_products_is_active(
    switch, dtype, narrow_kernel, fresh_llama, monkeypatch
):
    if narrow_kernel == "active" and not kernel.SUPPORTED:
        pytest.skip("the CPU lacks what the kernel needs")
    monkeypatch.setenv("HF_REFSPEC_NARROW_PRODUCTS", switch)
    found = rs.check(fresh_llama.to(dtype), context=16)
    assert found.narrow_kernel == narrow_kernel
    assert f"\nnarrow kernel  {narrow_kernel}\n" in str(found)


def test_a_model_that_verifies_chains_alone(models_by_type):
    found = rs.check(models_by_type("bloom"), context=16)
    assert (found.verification, found.rows) == ("chain", "none")
    assert "chains are" in str(found)


def test_a_model_that_decodes_plainly_says_why(models_by_type):
    found = rs.check(models_by_type("mamba"), context=16)
    assert found.verification == "none" and not found.relative_costs
    assert "several tokens in one pass have other logits" in found.reason
    assert str(found).endswith(f"Calls decode plainly: {found.reason}.")


@pytest.mark.parametrize("context", [7, 10_000])
def test_a_context_that_cannot_be_timed_is_refused(llama, context):
    with pytest.raises(ValueError, match=rf"context={context} cannot be timed: .* from 8 to \d+"):
        rs.check(llama, context=context)
