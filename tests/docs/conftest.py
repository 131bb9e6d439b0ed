from __future__ import annotations

import huggingface_hub
import pytest
import torch
from hub_server import TOKEN, running_hub
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_refspec.apps.shared import default_model


@pytest.fixture
def as_in_the_documentation(monkeypatch, tmp_path):
    """What the pages take for granted: a folder to work in, the model, and an account on the Hub.

    The name of SmolLM2-135M-Instruct loads the default model from wherever it is; all other names
    are those of a Hub on this machine.
    """
    folder = default_model.default_model()
    for auto in (AutoModelForCausalLM, AutoTokenizer):
        load = auto.from_pretrained

        def from_pretrained(name, *args, load=load, **kwargs):
            return load(folder if name == default_model.HUB_ID else name, *args, **kwargs)

        monkeypatch.setattr(auto, "from_pretrained", from_pretrained)
    monkeypatch.chdir(tmp_path)
    with running_hub() as server, torch.random.fork_rng():
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / ".cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield
        huggingface_hub.close_session()
