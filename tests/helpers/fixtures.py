"""The fixtures of all folders, and the state in which tests find torch and transformers."""

import copy
import os
import threading
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from hf_refspec.apps.shared.loading import load_model, load_tokenizer
from hf_refspec.verification import finding
from hf_refspec.warm_up import warmup
from tests.helpers import byte_model
from tests.helpers.architectures import small
from tests.helpers.hub_server import hub_in_place

if os.environ.get("HF_REFSPEC_DEVICE") == "pretended":
    from tests.helpers import pretended_device  # noqa: F401  (registers it)
warmup()  # here, where it is in no test's time; and every call drafts from its first token on
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)  # tiny models: more threads only wait for each other
# By default its lock is shared with forked processes, and one that a test kills may hold it.
tqdm.set_lock(threading.RLock())


@pytest.fixture(scope="session", autouse=True)
def no_findings_of_other_runs():
    """Tests probe their models, whatever this machine's folder of findings has."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(finding, "findings_folder", lambda: Path(os.devnull))
        yield


@pytest.fixture(scope="session")
def models_by_type():
    """Builds the tiny random model of a type (and dtype) once a session."""
    return cache(small)


@pytest.fixture(scope="session")
def llama(models_by_type):
    return models_by_type("llama")


@pytest.fixture
def fresh_llama(llama):
    """A copy that no other test has probed or changed."""
    return copy.deepcopy(llama)


@pytest.fixture(scope="session")
def loaded():
    """The default model, which has learned to write, and its tokenizer."""
    return load_model(device_map="cpu"), load_tokenizer()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and a chat template."""
    return byte_model.byte_tokenizer()


@pytest.fixture(scope="session")
def byte_llama(tokenizer) -> LlamaForCausalLM:
    """A random model of bytes. It soon repeats itself, so that drafts are accepted."""
    return byte_model.byte_llama(len(tokenizer))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, byte_llama, tokenizer) -> Path:
    """The model of bytes on disk, with its tokenizer and its chat template."""
    folder = tmp_path_factory.mktemp("models") / "bytes"
    byte_llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that huggingface_hub takes for the real one, with nobody logged in."""
    with hub_in_place(monkeypatch, tmp_path) as server:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield server
