"""The default model from a Hub, and when the Hub is not asked or not waited for."""

from pathlib import Path

import pytest

from hf_refspec import smollm2
from hf_refspec.smollm2 import HUB_ID
from tests.helpers.hub_server import Blob, Fault, hub_in_place
from tests.helpers.tiny_package import content, default_model


@pytest.fixture
def hub(home, monkeypatch):
    """A Hub that answers and has the model; what it has is no real one."""
    with hub_in_place(monkeypatch, home) as server:
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # between two tries
        publish(server, {"config.json": b"{}", "tokenizer.json": b"{}"})
        yield server


def publish(hub, files: dict[str, bytes]) -> None:
    """Puts a model into the Hub, with files that are not needed."""
    others = {"onnx/model.onnx": b"o", "README.md": b"r", "runs/tokenizer.json": b"{}"}
    files = {"tokenizer_config.json": b"{}", "model.safetensors": b"w", **others, **files}
    blobs = {name: Blob(data, name.endswith(".safetensors")) for name, data in files.items()}
    hub.uploads.update({blob.oid: blob.content for blob in blobs.values()})
    hub.create(HUB_ID).commit("main", blobs)


def test_the_hub_comes_first_and_only_what_is_needed_is_downloaded(hub, home):
    folder = Path(default_model())
    assert folder.is_relative_to(home / ".cache")
    assert set(content(folder)) == set(smollm2._NEEDED)
    hub.requests.clear()
    assert default_model() == str(folder)
    assert hub.requests == []


def test_a_part_of_the_model_in_the_cache_is_not_taken_for_it(hub, home):
    folder = Path(default_model())
    (folder / "tokenizer.json").unlink()
    assert default_model() == str(folder)
    assert (folder / "tokenizer.json").exists()
    (folder / "tokenizer.json").unlink()
    hub.repos.clear()
    assert default_model() == str(home / "hf_refspec" / "SmolLM2-135M-Instruct")


def test_a_converted_copy_is_used_without_asking_the_hub(converted, hub):
    assert default_model() == str(converted)
    assert hub.requests == []


def test_a_download_that_fails_is_reported_and_the_package_converted(hub, home, caplog):
    hub.faults.append(Fault("GET", "/storage/", after=0))
    assert default_model() == str(home / "hf_refspec" / "SmolLM2-135M-Instruct")
    messages = [record.message for record in caplog.records if record.name == "hf_refspec"]
    assert messages[0].startswith(f"{HUB_ID} was not downloaded: ")


def test_a_hub_without_the_model_counts_as_none(hub, home):
    hub.repos.clear()
    assert default_model() == str(home / "hf_refspec" / "SmolLM2-135M-Instruct")
    assert hub.requests == [f"HEAD /{HUB_ID}/resolve/main/config.json"]
