"""Whether a name is a folder or a repo, and when the Hub is asked or not waited for."""

import socket
import threading
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from hf_refspec.store import names
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.names import ask_hub, is_here, model_source, named_tokenizer
from tests.helpers.hub_server import TOKEN, Blob, point_to

REPO = "owner/model"


def published(hub, folder: Path, name: str = REPO, **attributes: bool) -> None:
    files = {path.name: Blob(path.read_bytes(), False) for path in folder.iterdir()}
    hub.create(name, **attributes).commit("main", files)


@pytest.fixture
def tokenizer_folder(tmp_path, tokenizer) -> Path:
    tokenizer.save_pretrained(tmp_path / "bytes")
    (tmp_path / "bytes" / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path / "bytes"


@pytest.mark.parametrize(
    "name",
    [
        *("/no/such", "./no", "../no", "~/no", "a/b/c", "a\\b", "model.json", "org/x.gguf"),
        *("a b", "", "-x", "org/", "x" * 200, "nul\0"),
    ],
)
def test_what_can_only_be_a_path_is_refused_without_asking_the_hub(name, hub):
    for load in (named_tokenizer, model_source, Datastore.from_pretrained):
        with pytest.raises(FileNotFoundError, match="does not exist; name a folder, or a Hub id"):
            load(name)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["gpt2", "org/name", "org/Qwen2.5-0.5B", "org/v0.1", "a_b/c-d.e"])
def test_what_can_be_a_repo_is_none_of_these(name):
    assert not is_here(name)


def test_a_folder_is_taken_whatever_it_is_called(tmp_path, monkeypatch, tokenizer):
    monkeypatch.chdir(tmp_path)
    tokenizer.save_pretrained("org/a.json")
    Path("org/a.json/config.json").write_text("{}")
    source = model_source("org/a.json")
    assert source == {"pretrained_model_name_or_path": "org/a.json", "local_files_only": False}
    assert named_tokenizer("org/a.json").get_vocab() == tokenizer.get_vocab()


def test_a_folder_says_what_it_lacks(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder of a model: it has no config.json"):
        model_source(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(FileNotFoundError, match=r"of a tokenizer: it has no tokenizer.json"):
        named_tokenizer(str(tmp_path))
    with pytest.raises(NotADirectoryError, match="is a file; name the folder of a model"):
        model_source(str(tmp_path / "config.json"))


def test_a_tokenizer_of_the_hub_is_loaded_and_then_taken_from_the_cache(
    hub, tokenizer_folder, tokenizer, monkeypatch
):
    published(hub, tokenizer_folder)
    assert named_tokenizer(REPO).get_vocab() == tokenizer.get_vocab()
    point_to("http://127.0.0.1:9", monkeypatch)
    assert named_tokenizer(REPO).get_vocab() == tokenizer.get_vocab()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert named_tokenizer(REPO).get_vocab() == tokenizer.get_vocab()


def test_a_name_that_is_not_cached_is_one_error_where_the_hub_is_gone(hub, monkeypatch):
    point_to("http://127.0.0.1:9", monkeypatch)
    message = rf"'{REPO}' is neither a folder here nor in the Hub's cache.* reached: "
    with pytest.raises(OSError, match=message + r"http://127\.0\.0\.1:9 does not answer"):
        named_tokenizer(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=message + "HF_HUB_OFFLINE is set"):
        named_tokenizer(REPO)
    with pytest.raises(OSError, match=r"'owner/model'.*not downloaded: .* set 'HF_HUB_OFFLINE=0'"):
        Datastore.from_pretrained(REPO)


@pytest.mark.parametrize("kind", [{"private": True}, {"gated": True}])
def test_a_private_or_gated_repo_and_one_that_is_none_get_an_answer(
    hub, tokenizer_folder, tokenizer, monkeypatch, kind
):
    published(hub, tokenizer_folder, **kind)
    for name in (REPO, "owner/none"):
        message = rf"neither a folder '{name}' nor a tokenizer of this .* {hub.endpoint}/{name} is"
        with pytest.raises(OSError, match=message):
            named_tokenizer(name)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert named_tokenizer(REPO).get_vocab() == tokenizer.get_vocab()


def test_code_that_comes_with_a_tokenizer_is_never_run(tmp_path):
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    auto_map = '{"AutoTokenizer": ["evil.Evil", "evil.Evil"]}'
    (folder / "tokenizer_config.json").write_text(f'{{"auto_map": {auto_map}}}')
    ran = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(ValueError, match="cannot be loaded"):
        named_tokenizer(str(folder))
    assert not ran.exists()


def test_a_name_server_that_does_not_answer_is_not_waited_for(hub, monkeypatch):
    released = threading.Event()

    def look_up(*args, **kwargs):
        released.wait()
        raise socket.gaierror("no answer")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(names, "HUB_SECONDS", 0.1)
    huggingface_hub.close_session()
    try:
        assert "does not answer" in ask_hub(REPO, "model", "config.json")
    finally:
        released.set()
