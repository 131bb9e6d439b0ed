"""The messages that docs/faq.md explains are those that are raised."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import hf_refspec as rs
from hf_refspec.drafting.calls import drafter_call
from tests.helpers.drafters import Noise

PAGE = Path(__file__).parents[2] / "docs" / "faq.md"
IDS = torch.tensor([[5, 6, 7]])


def masked(text: str) -> str:
    return re.sub(r"\d+", "0", text)


def generate(model, **options):
    return model.generate(IDS, max_new_tokens=2, do_sample=False, **options)


def not_installed(model):
    rs.uninstall()
    try:
        generate(model, candidate_generator=Noise())
    finally:
        rs.install()


def in_use(model):
    drafter = rs.ReferenceCopy()
    with drafter_call(drafter, [IDS[0].numpy()], 300):
        generate(model, candidate_generator=drafter)


@pytest.mark.parametrize("mistake", [not_installed, in_use])
def test_the_message_of_a_mistake_is_on_the_page(mistake, byte_llama):
    with pytest.raises(Exception) as raised:
        mistake(byte_llama)
    message = f"{raised.type.__name__}: {raised.value}".partition(" (note:")[0]
    assert masked(message) in masked(PAGE.read_text(encoding="utf-8"))
