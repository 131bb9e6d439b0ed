"""Compiling ahead of time refuses what it cannot compile for."""

from __future__ import annotations

import pytest

import hf_refspec as rs


@pytest.mark.parametrize("model", ["x", 5])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match=rf"^model must be .* generate\(\), but is {model!r}; load"):
        rs.warmup(model)
