"""The device that tests of what holds on a GPU run on: `HF_REFSPEC_DEVICE`, CUDA unless set."""

import os

import pytest
import torch

DEVICE = os.environ.get("HF_REFSPEC_DEVICE", "cuda")
needs_device = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(),
    reason="needs a GPU; test_pretended_device.py runs it on a pretended one",
)
