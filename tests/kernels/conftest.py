import pytest
import torch

from hf_refspec.kernels import narrow_product as kernel
from hf_refspec.kernels import pass_kernels as products
from hf_refspec.kernels.narrow_product import narrow_product


@pytest.fixture
def compiled(monkeypatch):
    """Lets passes use the kernel for narrow products, where this CPU has one."""
    if not kernel.SUPPORTED or products._parallel is None:
        pytest.skip("torch computes all products here")
    narrow_product.compile()
    monkeypatch.delenv("HF_REFSPEC_NARROW_PRODUCTS", raising=False)
    with torch.no_grad():
        yield
