from __future__ import annotations

import pytest
import torch
from hub_server import hub_in_place
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_refspec.smollm2 import HUB_ID, default_model


@pytest.fixture
def as_in_the_documentation(monkeypatch, tmp_path):
    """What the pages take for granted: a folder to work in, the model, and an account on the Hub.

    The name of SmolLM2-135M-Instruct loads the default model from wherever it is; all other names
    are those of a Hub on this machine.
    """
    folder = default_model()
    for auto in (AutoModelForCausalLM, AutoTokenizer):
        load = auto.from_pretrained

        def from_pretrained(name, *args, load=load, **kwargs):
            return load(folder if name == HUB_ID else name, *args, **kwargs)

        monkeypatch.setattr(auto, "from_pretrained", from_pretrained)
    monkeypatch.chdir(tmp_path)
    with hub_in_place(monkeypatch, tmp_path), torch.random.fork_rng():
        yield
