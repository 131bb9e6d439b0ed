"""The messages that docs/troubleshooting.md explains are those that are raised."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from drafters import Noise

import hf_refspec as rs

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
IDS = torch.tensor([[5, 6, 7]])


def masked(text: str) -> str:
    return re.sub(r"\d+", "0", text)


def generate(model, **options):
    return model.generate(IDS, max_new_tokens=2, do_sample=False, **options)


def a_class(model, tokenizer):
    generate(model, candidate_generator=rs.ReferenceCopy)


def not_installed(model, tokenizer):
    rs.uninstall()
    try:
        generate(model, candidate_generator=Noise())
    finally:
        rs.install()


def in_use(model, tokenizer):
    drafter = rs.ReferenceCopy()
    with drafter.session(IDS[0].numpy(), 300):
        generate(model, candidate_generator=drafter)


def store_is_there(model, tokenizer):
    for _ in range(2):
        rs.Datastore.build(["a text"], tokenizer, "store", progress=False)


@pytest.mark.parametrize(
    "mistake",
    [
        a_class,
        not_installed,
        in_use,
        store_is_there,
    ],
)
def test_the_message_of_a_mistake_is_on_the_page(
    mistake, byte_llama, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception) as raised:
        mistake(byte_llama, tokenizer)
    message = f"{raised.type.__name__}: {raised.value}".partition(" (note:")[0]
    assert masked(message) in masked(PAGE.read_text(encoding="utf-8"))
