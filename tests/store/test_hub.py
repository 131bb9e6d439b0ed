"""Datastores on the Hub: the real client against a local server."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from textwrap import dedent

import huggingface_hub
import numpy as np
import pytest
import yaml
from hub_server import TOKEN, Blob, Fault
from huggingface_hub import constants

from hf_refspec.store import hub as hub_module
from hf_refspec.store.card import card as card_of
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.datastore_config import NgramsEntry, ShardEntry, StoreConfig
from hf_refspec.store.files import CONFIG, DatastoreError, FileEntry, check_file, write_arrays
from hf_refspec.store.folder import write_json

REPO = "owner/store"
SOURCE = {
    "corpus": "Python | standard library",
    "license": "Apache-2.0",
    "deduplicated": True,
    "documents": 10,
    "mat": {"HumanEval, 64 nodes": 2.1},
    "hf_refspec": "0.1.0",
}


@pytest.fixture
def no_waiting(monkeypatch):
    """Between two tries the client waits for seconds."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)


def make_store(folder: Path, shards=(100,), ngrams="0123456789ab", seed=0) -> StoreConfig:
    """A datastore whose arrays mean nothing, but are what config.json says."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)

    def written(name, dtype, length):
        array = rng.integers(0, 50, length).astype(dtype)
        return write_arrays(folder / f"{name}.safetensors", {name.split("-")[0]: array})

    entries = [
        ShardEntry(
            tokens=length,
            documents=4,
            tokens_file=written(f"tokens-{number:05}", np.uint16, length),
            suffixes_file=written(f"suffixes-{number:05}", np.int32, length),
        )
        for number, length in enumerate(shards, start=1)
    ]
    compact = None
    if ngrams:
        file = written(f"ngrams-{ngrams}", np.int32, 20)
        compact = NgramsEntry(ngrams=[5, 7], nodes=30, corpus_tokens=sum(shards), file=file)
    config = StoreConfig("f" * 32, "org/tokenizer", 32000, SOURCE, entries, compact)
    config.write(folder)
    return config


def fetch(repo: str | Path, form: str | None = None, **options) -> Path:
    return hub_module.fetch(repo, StoreConfig, Datastore._part(form), **options)


def push(folder: Path, repo: str, **options):
    return hub_module.push(folder, StoreConfig, repo, **options)


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "store"
    make_store(folder)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def downloads(hub) -> list[str]:
    return sorted(request.split("/")[-1] for request in hub.asked_for("HEAD"))


# There and back


def test_what_is_pushed_is_fetched(hub, store):
    info = push(store, REPO, token=TOKEN)
    assert info.commit_url == f"{hub.endpoint}/datasets/{REPO}/commit/{info.oid}"
    assert len(hub.repos[REPO].commits) == 2  # the first one is the Hub's own
    fetched = content(fetch(REPO))
    card = fetched.pop("README.md").decode()
    assert fetched == content(store)
    assert REPO in card
    for entry in StoreConfig.read(store).files():
        check_file(fetch(REPO), entry)


@pytest.mark.parametrize("large", [r".*", r"nothing", r".*\.safetensors|config\.json"])
def test_large_and_plain_files(hub, store, large):
    hub.large = large
    push(store, REPO, token=TOKEN)
    fetched = content(fetch(REPO))
    assert {name: fetched[name] for name in content(store)} == content(store)


def test_a_large_file_with_a_dropped_connection(hub, tmp_path, no_waiting):
    folder = tmp_path / "store"
    config = make_store(folder, shards=(12_000_000,))
    assert config.shards[0].tokens_file.size > 24_000_000
    assert config.shards[0].suffixes_file.size > 48_000_000
    tokens = f"/storage/{config.shards[0].tokens_file.sha256}"
    hub.faults.append(Fault("PUT", tokens, after=15_000_000))
    push(folder, REPO, token=TOKEN)
    assert len(hub.asked_for("PUT", tokens)) == 2
    hub.faults.append(Fault("GET", tokens, after=15_000_000))
    fetched = fetch(REPO)
    resumed = f"GET {tokens} bytes={constants.DOWNLOAD_CHUNK_SIZE}-"
    assert hub.asked_for("GET", tokens) == [f"GET {tokens}", resumed]
    for entry in config.files():
        check_file(fetched, entry)


def test_a_folder_is_returned_as_it_is(hub, store):
    assert fetch(store, revision="whatever", token="whatever") == store
    assert fetch(str(store), form="compact") == store
    assert hub.requests == []


def test_only_the_store_and_the_card_are_pushed(hub, store):
    (store / "notes.txt").write_text("private")
    (store / "tokens-00099.safetensors").write_bytes(b"of an older version")
    names = {file.name for file in StoreConfig.read(store).files()}
    push(store, REPO, token=TOKEN)
    files_there = hub.repos[REPO].files()
    assert set(files_there) == {".gitattributes", CONFIG, "README.md", *names}


def test_a_card_of_ones_own_is_kept(hub, store):
    (store / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    push(store, REPO, token=TOKEN)
    assert hub.repos[REPO].files()["README.md"] == (store / "README.md").read_bytes()
    assert fetch(REPO).joinpath("README.md").read_text().endswith("# Mine\n")


def test_a_card_that_is_a_link_is_not_published(hub, store, tmp_path):
    secret = tmp_path / "blobs" / ("a" * 40)
    secret.parent.mkdir()
    secret.write_text("secret")
    link = tmp_path / "link"
    link.symlink_to(secret)
    for target in (secret, Path("../blobs") / secret.name, link, tmp_path / "nothing"):
        (store / "README.md").symlink_to(target)
        with pytest.raises(DatastoreError, match=r"README\.md is a link, which is not followed"):
            push(store, REPO, token=TOKEN)
        (store / "README.md").unlink()
    # Nor is one in a folder that looks like the Hub's cache, if what it is to is not a file there.
    snapshot = tmp_path / "snapshots" / "b"
    snapshot.parent.mkdir()
    store.rename(snapshot)
    secret.unlink()
    secret.symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text("secret")
    (snapshot / "README.md").symlink_to(Path("../../blobs") / secret.name)
    with pytest.raises(DatastoreError, match=r"blobs/a* is a link, which is not followed"):
        push(snapshot, REPO, token=TOKEN)
    assert not hub.repos


def test_a_card_in_the_cache_of_the_hub_is_published_again(hub, store):
    (store / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    push(store, REPO, token=TOKEN)
    fetched = fetch(REPO)
    assert (fetched / "README.md").is_symlink()
    push(fetched, "owner/copy", token=TOKEN)
    assert hub.repos["owner/copy"].files() == hub.repos[REPO].files()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_card_is_refused_and_not_waited_for(hub, store, make):
    make(store / "README.md")
    with pytest.raises(DatastoreError, match=r"README\.md is not a file"):
        push(store, REPO, token=TOKEN)


def test_a_card_that_is_too_large_is_not_read(hub, store):
    with open(store / "README.md", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DatastoreError, match=r"README\.md has more than .* bytes"):
        push(store, REPO, token=TOKEN)


def test_a_new_version_removes_the_old_ones_files(hub, store):
    push(store, REPO, token=TOKEN)
    repo = hub.repos[REPO]
    own = {"notes.txt": b"keep", "tokens-list.safetensors": b"keep", "a/tokens-00001.bin": b"keep"}
    blobs = repo.commits[repo.branches["main"]]
    repo.commit("main", {**blobs, **{name: Blob(data, False) for name, data in own.items()}})
    old = fetch(REPO)
    commits = len(repo.commits)
    config = make_store(store, shards=(), ngrams="abcdefabcdef")
    push(store, REPO, token=TOKEN, commit_message="Only the compact form")
    assert len(repo.commits) == commits + 1
    named = {file.name for file in config.files()}
    assert set(repo.files()) == {".gitattributes", CONFIG, "README.md", *own, *named}
    new = fetch(REPO)
    assert new != old
    assert {path.name for path in new.iterdir()} == {CONFIG, "README.md", *named}
    assert (old / "tokens-00001.safetensors").exists()  # whoever has it open goes on with it


def test_what_has_not_changed_is_not_pushed_again(hub, store):
    first = push(store, REPO, token=TOKEN)
    uploads = len(hub.asked_for("PUT"))
    assert push(store, REPO, token=TOKEN).oid == first.oid
    make_store(store, shards=(100, 60))
    assert push(store, REPO, token=TOKEN).oid != first.oid
    assert len(hub.asked_for("PUT")) == uploads + 3  # a new shard, and n-grams of other content


def test_private_repo(hub, store):
    push(store, REPO, private=True, token=TOKEN)
    assert hub.repos[REPO].private
    assert fetch(REPO, token=TOKEN).is_dir()
    with pytest.raises(OSError, match=r"owner/store.*token="):
        fetch(REPO, cache_dir=store / "elsewhere")


def test_what_is_to_be_private_does_not_get_into_a_public_repo(hub, store):
    hub.create(REPO)
    with pytest.raises(OSError, match=r"owner/store.*public already.*private=True"):
        push(store, REPO, private=True, token=TOKEN)
    assert set(hub.repos[REPO].files()) == {".gitattributes"}


def test_a_name_without_an_owner_is_the_users_own(hub, store):
    push(store, "store", token=TOKEN)
    assert REPO in hub.repos["owner/store"].files()["README.md"].decode()


def test_revisions(hub, store, tmp_path):
    push(store, REPO, token=TOKEN)
    older = tmp_path / "older"
    make_store(older, seed=1)
    info = push(older, REPO, token=TOKEN, revision="older/v1")
    for revision, folder in [("older/v1", older), (info.oid, older), (None, store)]:
        assert (fetch(REPO, revision=revision) / CONFIG).read_bytes() == (
            folder / CONFIG
        ).read_bytes()


def test_pull_request(hub, store):
    hub.create(REPO)
    info = push(store, REPO, token=TOKEN, create_pr=True)
    assert info.pr_url
    assert set(hub.repos[REPO].files()) == {".gitattributes"}
    assert CONFIG in hub.repos[REPO].files("refs/pr/1")


def test_from_a_process_of_its_own(hub, store, tmp_path):
    program = dedent("""
        import sys
        from hf_refspec.store.datastore_config import StoreConfig
        from hf_refspec.store.hub import fetch, push

        folder, repo, token = sys.argv[1:]
        push(folder, StoreConfig, repo, token=token)
        print(fetch(repo, StoreConfig, lambda config: config.in_form("compact")))
    """)
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"),
    }
    environment.pop("HF_HUB_CACHE", None)
    result = subprocess.run(
        [sys.executable, "-c", program, str(store), REPO, TOKEN],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    fetched = Path(result.stdout.strip())
    assert fetched.is_relative_to(tmp_path / "home")
    assert {path.name for path in fetched.iterdir()} == {
        CONFIG,
        "README.md",
        "ngrams-0123456789ab.safetensors",
    }


# Parts of a store


def test_other_files_of_the_repo_are_not_downloaded(hub, store):
    push(store, REPO, token=TOKEN)
    repo = hub.repos[REPO]
    other = {"weights.bin": Blob(b"x" * 100, True), "tokens-00007.safetensors": Blob(b"x", True)}
    repo.commit("main", {**repo.commits[repo.branches["main"]], **other})
    hub.requests.clear()
    assert set(content(fetch(REPO))) == {*content(store), "README.md"}
    assert not set(other) & set(downloads(hub))


def test_compact_form_alone_is_downloaded(hub, store):
    push(store, REPO, token=TOKEN)
    hub.requests.clear()
    compact = fetch(REPO, form="compact")
    ngrams = "ngrams-0123456789ab.safetensors"
    assert set(content(compact)) == {CONFIG, "README.md", ngrams}
    assert set(downloads(hub)) == {CONFIG, "README.md", ngrams}
    hub.requests.clear()
    assert fetch(REPO, form="full") == compact
    assert len(hub.asked_for("GET", "/storage/")) == 2  # only what was missing
    assert set(content(compact)) == {*content(store), "README.md"}


def test_a_form_that_is_not_there(hub, store, tmp_path):
    make_store(store, ngrams=None)
    push(store, REPO, token=TOKEN)
    with pytest.raises(DatastoreError, match=r"owner/store.*no compact form"):
        fetch(REPO, form="compact")
    make_store(tmp_path / "compact", shards=())
    push(tmp_path / "compact", "owner/compact", token=TOKEN)
    assert fetch("owner/compact").is_dir()
    with pytest.raises(DatastoreError, match=r"owner/compact.*only the compact form"):
        fetch("owner/compact", form="full")
    with pytest.raises(ValueError, match=r"form must be .* but is 'small'"):
        fetch(REPO, form="small")


def test_one_version_even_if_another_is_pushed_meanwhile(hub, store, monkeypatch):
    push(store, REPO, token=TOKEN)
    before = (store / CONFIG).read_bytes()
    read = StoreConfig.read

    def pushed_meanwhile(folder):
        monkeypatch.setattr(StoreConfig, "read", read)
        make_store(store, shards=(), ngrams="abcdefabcdef")
        push(store, REPO, token=TOKEN)
        return read(folder)

    monkeypatch.setattr(StoreConfig, "read", pushed_meanwhile)
    fetched = fetch(REPO)
    assert (fetched / CONFIG).read_bytes() == before
    assert (fetched / "tokens-00001.safetensors").exists()


# What is not there, or not for everyone


def test_unknown_repo(hub):
    with pytest.raises(OSError, match=r"neither a folder 'no/store' nor a datastore of this name"):
        fetch("no/store")
    with pytest.raises(OSError, match=r"neither a folder 'no/store' nor a datastore of this name"):
        fetch("no/store", token=TOKEN)


@pytest.mark.parametrize("path", ["stroe", "stores/of/mine", "./store", "/no/such/folder", "a b"])
def test_neither_a_folder_nor_a_name(hub, path):
    with pytest.raises(OSError, match=rf"'{path}' does not exist; name a folder, or a Hub id"):
        fetch(path)
    assert hub.requests == []


def test_missing_revision(hub, store):
    push(store, REPO, token=TOKEN)
    with pytest.raises(OSError, match=r"'owner/store' has no revision 'v9'.*leave revision out"):
        fetch(REPO, revision="v9")


def test_gated_repo(hub, store):
    push(store, REPO, token=TOKEN)
    hub.repos[REPO].gated = True
    with pytest.raises(OSError, match=rf"granted on request.*{hub.endpoint}/datasets/{REPO}"):
        fetch(REPO)
    assert fetch(REPO, token=TOKEN).is_dir()


def test_a_repo_that_is_no_datastore(hub):
    repo = hub.create(REPO)
    with pytest.raises(DatastoreError, match=r"'owner/store'.*no config.json"):
        fetch(REPO)
    repo.commit("main", {CONFIG: Blob(b'{"model_type": "llama"}', False)})
    with pytest.raises(DatastoreError, match=r"'owner/store'.*no format_version"):
        fetch(REPO)


def test_a_repo_that_lacks_a_file(hub, store):
    push(store, REPO, token=TOKEN)
    repo = hub.repos[REPO]
    blobs = dict(repo.commits[repo.branches["main"]])
    del blobs["suffixes-00001.safetensors"]
    repo.commit("main", blobs)
    with pytest.raises(DatastoreError, match=r"'owner/store'.*lacks suffixes-00001.safetensors"):
        fetch(REPO)
    assert fetch(REPO, form="compact").is_dir()


def test_patterns_in_names_match_nothing_else(hub, store):
    config = StoreConfig.read(store)
    assert config.ngrams
    file = replace(config.ngrams.file, name="*.safetensors")
    changed = replace(config, ngrams=replace(config.ngrams, file=file))
    write_json(store / CONFIG, config.HEADER | asdict(changed))
    repo = hub.create(REPO)
    repo.commit("main", {name: Blob(data, False) for name, data in content(store).items()})
    hub.requests.clear()
    with pytest.raises(DatastoreError, match=r"'\*\.safetensors' is not the name of a file"):
        fetch(REPO, form="compact")
    assert set(downloads(hub)) == {CONFIG}


def test_offline(hub, store, monkeypatch):
    push(store, REPO, token=TOKEN)
    hub.requests.clear()
    with pytest.raises(OSError, match=r"'owner/store'.*not in the cache.*local_files_only=False"):
        fetch(REPO, local_files_only=True)
    assert hub.requests == []
    compact = fetch(REPO, form="compact")
    hub.requests.clear()
    assert fetch(REPO, form="compact", local_files_only=True) == compact
    with pytest.raises(
        OSError, match=r"not in the cache, or not all of it; with local_files_only=False"
    ):
        fetch(REPO, local_files_only=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(REPO, form="compact") == compact
    with pytest.raises(OSError, match=r"not in the cache, or not all of it, and the Hub cannot be"):
        fetch(REPO)
    assert hub.requests == []


def test_hub_out_of_reach(hub, store, monkeypatch, no_waiting):
    push(store, REPO, token=TOKEN)
    compact = fetch(REPO, form="compact")
    url = "http://127.0.0.1:9"  # nothing listens there
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    assert fetch(REPO, form="compact") == compact
    with pytest.raises(OSError, match=r"dataset repo 'owner/store'.*cannot be reached"):
        fetch(REPO)
    with pytest.raises(OSError, match=r"not pushed to 'owner/store'"):
        push(store, REPO, token=TOKEN)


def test_a_client_that_another_thread_has_closed_means_out_of_reach(hub, store, monkeypatch):
    push(store, REPO, token=TOKEN)

    def closed(*args, **kwargs):
        raise RuntimeError("Cannot send a request, as the client has been closed.")

    monkeypatch.setattr("hf_refspec.store.hub.snapshot_download", closed)
    with pytest.raises(OSError, match=r"dataset repo 'owner/store'.*cannot be reached"):
        fetch(REPO)


# Connections that drop


def test_a_dropped_download_goes_on_where_it_was(hub, store, monkeypatch, no_waiting):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 25)
    push(store, REPO, token=TOKEN)
    tokens = FileEntry.of(store / "tokens-00001.safetensors").sha256
    hub.faults.append(Fault("GET", f"/storage/{tokens}", after=50, times=2))
    check_file(fetch(REPO), StoreConfig.read(store).shards[0].tokens_file)
    assert hub.asked_for("GET", tokens)[1:] == [
        f"GET /storage/{tokens} bytes=50-",
        f"GET /storage/{tokens} bytes=100-",
    ]


def test_a_download_that_keeps_dropping(hub, store, no_waiting):
    push(store, REPO, token=TOKEN)
    fault = Fault("GET", "/storage/", after=0, times=1000)
    hub.faults.append(fault)
    with pytest.raises(OSError, match=r"'owner/store' at revision 'main' was not downloaded"):
        fetch(REPO)
    fault.times = 0
    fetched = fetch(REPO)
    assert set(content(fetched)) == {*content(store), "README.md"}
    for entry in StoreConfig.read(store).files():
        check_file(fetched, entry)


def test_a_dropped_upload_is_tried_again(hub, store, no_waiting):
    hub.faults.append(Fault("PUT", "/storage/", after=100))
    push(store, REPO, token=TOKEN)
    assert len(hub.asked_for("PUT")) == 4
    assert {*content(store)} < {*hub.repos[REPO].files()}


@pytest.mark.parametrize(("method", "path"), [("PUT", "/storage/"), ("POST", "/commit/")])
def test_a_failed_push_leaves_the_old_version(hub, store, tmp_path, no_waiting, method, path):
    push(store, REPO, token=TOKEN)
    before = hub.repos[REPO].files()
    newer = tmp_path / "newer"
    make_store(newer, shards=(80, 70), ngrams="abcdefabcdef", seed=1)
    fault = Fault(method, path, after=100, times=1000)
    hub.faults.append(fault)
    with pytest.raises(OSError, match=r"not pushed to 'owner/store'.*push again"):
        push(newer, REPO, token=TOKEN)
    assert hub.repos[REPO].files() == before
    assert (fetch(REPO) / CONFIG).read_bytes() == (store / CONFIG).read_bytes()
    fault.times = 0
    push(newer, REPO, token=TOKEN)
    assert (fetch(REPO) / CONFIG).read_bytes() == (newer / CONFIG).read_bytes()


def test_two_who_push_at_the_same_time(hub, store, monkeypatch):
    push(store, REPO, token=TOKEN)
    repo = hub.repos[REPO]
    repo_info = huggingface_hub.HfApi.repo_info

    def other_commit(self, *args, **kwargs):
        info = repo_info(self, *args, **kwargs)
        repo.commit("main", repo.commits[repo.branches["main"]])
        return info

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", other_commit)
    make_store(store, seed=1)
    before = repo.files()
    with pytest.raises(OSError, match=r"somebody else changed the repo"):
        push(store, REPO, token=TOKEN)
    assert repo.files() == before


# What is not pushed


def test_without_the_right_to_write(hub, store):
    for token in (None, "hf_of_somebody_else"):
        with pytest.raises(OSError, match=r"'owner/store'.*does not let you write there.*token="):
            push(store, REPO, token=token)
    hub.create(REPO)
    with pytest.raises(OSError, match=r"'owner/store'.*does not let you write there.*token="):
        push(store, REPO)


def test_a_damaged_store_is_not_published(hub, store):
    with open(store / "tokens-00001.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(DatastoreError, match=r"tokens-00001.safetensors is damaged"):
        push(store, REPO, token=TOKEN)
    (store / "tokens-00001.safetensors").unlink()
    with pytest.raises(DatastoreError, match=r"tokens-00001.safetensors cannot be read"):
        push(store, REPO, token=TOKEN)
    with pytest.raises(DatastoreError, match=r"is not a datastore"):
        push(store.parent, REPO, token=TOKEN)
    assert hub.requests == []


def test_names_and_cards_that_the_hub_refuses(hub, store):
    with pytest.raises(OSError, match=r"not a name for a repo"):
        push(store, "not/a/name", token=TOKEN)
    (store / "README.md").write_text("---\nlicense: proprietary\n---\n")
    with pytest.raises(OSError, match=r"Invalid metadata in README.md.*unknown license"):
        push(store, REPO, token=TOKEN)
    assert set(hub.repos[REPO].files()) == {".gitattributes"}


# The card


def metadata(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_card_says_what_is_in_the_store(store):
    config = StoreConfig.read(store)
    card = card_of(config, REPO)
    assert metadata(card) == {
        "license": "apache-2.0",
        "library_name": "hf_refspec",
        "tags": ["hf-refspec", "speculative-decoding"],
        "viewer": False,
    }
    for text in [
        "# store\n",
        'rs.Datastore.from_pretrained("owner/store")',
        "| Corpus | Python \\| standard library |",
        "| Licence of the corpus | Apache-2.0 |",
        "| Documents | 4, exact duplicates dropped |",
        ": 96 tokens and their suffix array |",
        "| Tokenizer | `org/tokenizer`, ids below 32,000 |",
        f"| Tokenizer fingerprint | `{'f' * 32}` |",
        "12 n-grams of up to 2 tokens, with 30 draft nodes",
        'With `form="compact"` only the compact form is downloaded',
        "| Built with | hf_refspec 0.1.0 |",
        "| `suffixes-00001.safetensors` | 480 bytes |",
        "| HumanEval, 64 nodes | 2.10 |",
    ]:
        assert text in card
    assert "$" not in card


def test_card_of_a_store_of_which_little_is_known(store):
    config = replace(StoreConfig.read(store), source={"license": None}, shards=[])
    card = card_of(config, REPO)
    assert "license" not in metadata(card)
    assert "| Licence of the corpus | not stated |" in card
    assert "has not been stated" in card
    assert "has not been measured" in card
    assert "from 100 tokens |" in card and "| Full form | none |" in card
    assert 'form="compact"' not in card
    config = replace(config, ngrams=None, shards=StoreConfig.read(store).shards)
    assert 'form="compact"' not in card_of(config, REPO)


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("CC-BY-SA-4.0", {"license": "cc-by-sa-4.0"}),
        ("PSF-2.0", {"license": "other", "license_name": "psf-2.0"}),
        ("various: see $files", {"license": "other", "license_name": "various-see-files"}),
    ],
)
def test_licences(store, licence, expected):
    config = StoreConfig.read(store)
    card = card_of(replace(config, source={**SOURCE, "license": licence}), REPO)
    found = metadata(card)
    assert {key: found[key] for key in found if key.startswith("license")} == expected
    assert f"| Licence of the corpus | {licence} |" in card


@pytest.mark.parametrize("name", ["datastore.md", "knowledge_base.md", "knn_datastore.md"])
def test_the_packaged_card_is_the_template(name):
    template = Path(__file__).parents[2] / "model_cards" / name
    assert files("hf_refspec.store").joinpath(name).read_text() == template.read_text()
