"""Whether a name is a folder or a repo, and when the Hub is asked or not waited for."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import TOKEN, Blob
from huggingface_hub import constants

from hf_refspec.store import names
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.names import HubSilentError, ask_hub, is_here, load_tokenizer, model_source

REPO = "owner/model"


@pytest.fixture(autouse=True)
def nobody_was_silent(monkeypatch):
    monkeypatch.setattr(names, "_silent_since", {})


def published(hub, folder: Path, name: str = REPO, **attributes: bool) -> None:
    files = {path.name: Blob(path.read_bytes(), False) for path in folder.iterdir()}
    hub.create(name, **attributes).commit("main", files)


@pytest.fixture
def tokenizer_folder(tmp_path, tokenizer) -> Path:
    tokenizer.save_pretrained(tmp_path / "bytes")
    (tmp_path / "bytes" / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path / "bytes"


def nowhere(monkeypatch) -> None:
    """The Hub is gone: nothing listens there."""
    url = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.mark.parametrize(
    "name",
    [
        *("/no/such", "./no", "../no", ".", "~/no", "a/b/c", "a\\b", "model.json", "org/x.gguf"),
        *("a b", "", "-x", "org/", "x" * 200, "nul\0"),
    ],
)
def test_what_can_only_be_a_path_is_refused_without_asking_the_hub(name, hub, tmp_path):
    if name == ".":
        assert is_here(name)
        return
    for load in (load_tokenizer, model_source, Datastore.from_pretrained):
        with pytest.raises(FileNotFoundError, match="does not exist; name a folder, or a Hub id"):
            load(name)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["gpt2", "org/name", "org/Qwen2.5-0.5B", "org/v0.1", "a_b/c-d.e"])
def test_what_can_be_a_repo_is_none_of_these(name):
    assert not is_here(name)


def test_a_folder_is_taken_whatever_it_is_called(tmp_path, monkeypatch, tokenizer):
    monkeypatch.chdir(tmp_path)
    tokenizer.save_pretrained("org/a.json")
    assert model_source_of("org/a.json") == ("org/a.json", False)
    assert load_tokenizer("org/a.json").get_vocab() == tokenizer.get_vocab()


def model_source_of(name: str) -> tuple[str, bool]:
    Path(name, "config.json").write_text("{}")
    source = model_source(name)
    return source["pretrained_model_name_or_path"], source["local_files_only"]


def test_a_folder_says_what_it_lacks(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder of a model: it has no config.json"):
        model_source(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(FileNotFoundError, match=r"of a tokenizer: it has no tokenizer.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(NotADirectoryError, match="is a file; name the folder of a model"):
        model_source(str(tmp_path / "config.json"))


def test_a_tokenizer_of_the_hub_is_loaded_and_then_taken_from_the_cache(
    hub, tokenizer_folder, tokenizer, monkeypatch
):
    published(hub, tokenizer_folder)
    assert load_tokenizer(REPO).get_vocab() == tokenizer.get_vocab()
    nowhere(monkeypatch)
    assert load_tokenizer(REPO).get_vocab() == tokenizer.get_vocab()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_tokenizer(REPO).get_vocab() == tokenizer.get_vocab()


def test_a_hub_that_is_gone_is_asked_once(hub, monkeypatch):
    nowhere(monkeypatch)
    asked = []
    get = names.get_hf_file_metadata
    monkeypatch.setattr(
        names, "get_hf_file_metadata", lambda *args, **kw: asked.append(args) or get(*args, **kw)
    )
    for name in ("gpt2", REPO):
        with pytest.raises(
            OSError, match=rf"'{name}' is no folder here and not in the Hub's cache"
        ):
            load_tokenizer(name)
    assert len(asked) == 1
    with pytest.raises(OSError, match=r"and not in the Hub's cache.*HF_HUB_OFFLINE is set"):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        Datastore.from_pretrained(REPO)


def test_a_private_repo_and_one_that_is_none_get_an_answer(
    hub, tokenizer_folder, tokenizer, monkeypatch
):
    published(hub, tokenizer_folder, private=True)
    for name in (REPO, "owner/none"):
        with pytest.raises(OSError, match=rf"neither a folder '{name}' nor a tokenizer of this"):
            load_tokenizer(name)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert load_tokenizer(REPO).get_vocab() == tokenizer.get_vocab()


def test_a_gated_repo_says_where_to_ask(hub, tokenizer_folder):
    published(hub, tokenizer_folder, gated=True)
    with pytest.raises(OSError, match=rf"granted on request; ask for it at {hub.endpoint}/{REPO}"):
        load_tokenizer(REPO)


def test_code_that_comes_with_a_tokenizer_is_never_run(tmp_path):
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    auto_map = '{"AutoTokenizer": ["evil.Evil", "evil.Evil"]}'
    (folder / "tokenizer_config.json").write_text(f'{{"auto_map": {auto_map}}}')
    ran = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_tokenizer(str(folder))
    assert not ran.exists()


@pytest.fixture
def released():
    """What blocks in the test goes on after it."""
    event = threading.Event()
    yield event
    event.set()


def test_a_name_server_that_does_not_answer_is_not_waited_for(hub, monkeypatch, released):
    def look_up(*args, **kwargs):
        released.wait()
        raise socket.gaierror("no answer")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(names, "HUB_SECONDS", 0.1)
    huggingface_hub.close_session()
    with pytest.raises(HubSilentError, match="does not answer"):
        ask_hub(REPO, "config.json")


def test_a_server_that_does_not_answer_is_not_waited_for(hub, monkeypatch):
    monkeypatch.setattr(names, "HUB_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        with pytest.raises(HubSilentError, match="does not answer"):
            ask_hub(REPO, "config.json")
