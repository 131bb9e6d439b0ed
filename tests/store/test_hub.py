"""Datastores on the Hub: the real client against a local server."""

import os
import re
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants

from hf_refspec.store.datastore import Datastore
from hf_refspec.store.datastore_config import StoreConfig
from hf_refspec.store.files import CONFIG, DatastoreError, check_file
from hf_refspec.store.hub import card as card_of
from tests.helpers.datastores import FEW, SOURCE, some_documents, write_store
from tests.helpers.hub_server import TOKEN, Blob, Fault, point_to
from tests.helpers.stored import content_of

REPO = "owner/store"


def fetch(repo: str | Path, form: str | None = None, **options) -> Path:
    return Datastore.from_pretrained(repo, form, **options).path


def push(folder: Path, repo: str, **options):
    return Datastore(folder).push_to_hub(repo, **options)


@pytest.fixture
def store(both) -> Path:
    """The folder of a datastore that has both forms."""
    return both.path


@pytest.fixture
def newer(tmp_path) -> Path:
    """The folder of a datastore with other files."""
    return write_store(tmp_path / "newer", some_documents(seed=1)).compact(**FEW).path


@pytest.fixture
def no_waiting(monkeypatch):
    """Between two tries the client waits for seconds."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)


@pytest.fixture
def pushed(hub, store):
    """The repo of the datastore."""
    push(store, REPO, token=TOKEN)
    return hub.repos[REPO]


# There and back


def test_what_is_pushed_is_fetched(hub, store):
    info = push(store, REPO, token=TOKEN)
    assert info.commit_url == f"{hub.endpoint}/datasets/{REPO}/commit/{info.oid}"
    assert len(hub.repos[REPO].commits) == 2  # the first one is the Hub's own
    fetched = content_of(fetch(REPO))
    card = fetched.pop("README.md").decode()
    assert fetched == content_of(store)
    assert REPO in card
    for entry in StoreConfig.read(store).files():
        check_file(fetch(REPO), entry)


def test_a_folder_is_returned_as_it_is_and_what_can_only_be_one_not_looked_for(hub, store):
    assert fetch(store, revision="whatever", token="whatever") == store
    assert fetch(str(store), form="compact") == store
    with pytest.raises(OSError, match="'stroe' does not exist; name a folder, or a Hub id"):
        fetch("stroe")
    assert hub.requests == []


def test_only_the_store_and_the_card_are_pushed(hub, store):
    (store / "notes.txt").write_text("private")
    (store / "tokens-00099.safetensors").write_bytes(b"of an older version")
    names = {file.name for file in StoreConfig.read(store).files()}
    push(store, REPO, token=TOKEN)
    files_there = hub.repos[REPO].files()
    assert set(files_there) == {".gitattributes", CONFIG, "README.md", *names}


def test_a_new_version_removes_the_old_ones_files(store, pushed, tmp_path):
    own = {"notes.txt": b"keep", "tokens-list.safetensors": b"keep", "a/tokens-00001.bin": b"keep"}
    blobs = pushed.commits[pushed.branches["main"]]
    pushed.commit("main", {**blobs, **{name: Blob(data, False) for name, data in own.items()}})
    old = fetch(REPO)
    commits = len(pushed.commits)
    compact = Datastore(store).compact(tmp_path / "compact", max_ngram=1)
    compact.push_to_hub(REPO, token=TOKEN, commit_message="Only the compact form")
    assert len(pushed.commits) == commits + 1
    named = {file.name for file in compact.config.files()}
    assert set(pushed.files()) == {".gitattributes", CONFIG, "README.md", *own, *named}
    new = fetch(REPO)
    assert new != old
    assert {path.name for path in new.iterdir()} == {CONFIG, "README.md", *named}
    assert (old / "tokens-00001.safetensors").exists()  # whoever has it open goes on with it


def test_what_is_private_stays_private(hub, store):
    push(store, REPO, private=True, token=TOKEN)
    assert hub.repos[REPO].private
    assert fetch(REPO, token=TOKEN).is_dir()
    with pytest.raises(OSError, match=r"owner/store.*not downloaded: .*Repository Not Found"):
        fetch(REPO, cache_dir=store / "elsewhere")
    hub.create("owner/public")
    with pytest.raises(OSError, match=r"owner/public.*public already.*private=True"):
        push(store, "owner/public", private=True, token=TOKEN)
    assert set(hub.repos["owner/public"].files()) == {".gitattributes"}


def test_a_name_without_an_owner_is_the_users_own(hub, store):
    push(store, "store", token=TOKEN)
    assert REPO in hub.repos["owner/store"].files()["README.md"].decode()


def test_revisions_and_pull_requests(hub, store, newer, pushed):
    info = push(newer, REPO, token=TOKEN, revision="newer/v2")
    for revision, folder in [("newer/v2", newer), (info.oid, newer), (None, store)]:
        fetched = fetch(REPO, revision=revision) / CONFIG
        assert fetched.read_bytes() == (folder / CONFIG).read_bytes()
    with pytest.raises(OSError, match=r"'owner/store' at revision 'v9' was not .*: .*Revision"):
        fetch(REPO, revision="v9")
    hub.create("owner/other")
    assert push(store, "owner/other", token=TOKEN, create_pr=True).pr_url
    assert set(hub.repos["owner/other"].files()) == {".gitattributes"}
    assert CONFIG in hub.repos["owner/other"].files("refs/pr/1")


def test_compact_form_alone_is_downloaded(hub, store, pushed):
    hub.requests.clear()
    compact = fetch(REPO, form="compact")
    ngrams = StoreConfig.read(store).ngrams.file.name
    assert set(content_of(compact)) == {CONFIG, "README.md", ngrams}
    asked = {request.split("/")[-1] for request in hub.asked_for("HEAD")}
    assert asked == {CONFIG, "README.md", ngrams}
    hub.requests.clear()
    assert fetch(REPO, form="full") == compact
    assert len(hub.asked_for("GET", "/storage/")) == 4  # only what was missing
    assert set(content_of(compact)) == {*content_of(store), "README.md"}


def test_a_form_that_is_not_there(hub, full, compact):
    push(full.path, REPO, token=TOKEN)
    with pytest.raises(DatastoreError, match=r"owner/store.*no compact form"):
        fetch(REPO, form="compact")
    push(compact.path, "owner/compact", token=TOKEN)
    assert fetch("owner/compact").is_dir()
    with pytest.raises(DatastoreError, match=r"owner/compact.*only the compact form"):
        fetch("owner/compact", form="full")
    with pytest.raises(OSError, match=r"form must be .* but is 'small'"):
        fetch(REPO, form="small")


def test_one_version_even_if_another_is_pushed_meanwhile(store, newer, monkeypatch, pushed):
    before = (store / CONFIG).read_bytes()
    read = StoreConfig.read

    def pushed_meanwhile(folder):
        monkeypatch.setattr(StoreConfig, "read", read)
        push(newer, REPO, token=TOKEN)
        return read(folder)

    monkeypatch.setattr(StoreConfig, "read", pushed_meanwhile)
    fetched = fetch(REPO)
    assert (fetched / CONFIG).read_bytes() == before
    assert (fetched / "tokens-00001.safetensors").exists()


# What is not there, or not for everyone


def test_gated_repo(hub, pushed):
    pushed.gated = True
    with pytest.raises(OSError, match=rf"gated repo for url {hub.endpoint}/datasets/{REPO}"):
        fetch(REPO)
    assert fetch(REPO, token=TOKEN).is_dir()


def test_a_repo_that_is_no_datastore_or_lacks_a_file(hub, pushed):
    repo = hub.create("owner/other")
    with pytest.raises(DatastoreError, match=r"'owner/other'.*no config.json"):
        fetch("owner/other")
    repo.commit("main", {CONFIG: Blob(b'{"model_type": "llama"}', False)})
    with pytest.raises(DatastoreError, match=r"'owner/other'.*not \{'kind': 'datastore', "):
        fetch("owner/other")
    blobs = dict(pushed.commits[pushed.branches["main"]])
    del blobs["suffixes-00001.safetensors"]
    pushed.commit("main", blobs)
    with pytest.raises(DatastoreError, match=r"'owner/store'.*has no suffixes-00001.safetensors"):
        fetch(REPO)
    assert fetch(REPO, form="compact").is_dir()


def test_offline(hub, monkeypatch, pushed):
    hub.requests.clear()
    with pytest.raises(OSError, match=r"'owner/store'.* was not downloaded: .*'local_files_only="):
        fetch(REPO, local_files_only=True)
    assert hub.requests == []
    compact = fetch(REPO, form="compact")
    hub.requests.clear()
    assert fetch(REPO, form="compact", local_files_only=True) == compact
    with pytest.raises(OSError, match=r"was not downloaded: "):
        fetch(REPO, local_files_only=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(REPO, form="compact") == compact
    with pytest.raises(OSError, match=r"was not downloaded: "):
        fetch(REPO)
    assert hub.requests == []


def test_hub_out_of_reach(store, monkeypatch, no_waiting, pushed):
    compact = fetch(REPO, form="compact")
    point_to("http://127.0.0.1:9", monkeypatch)  # nothing listens there
    assert fetch(REPO, form="compact") == compact
    with pytest.raises(OSError, match=r"dataset repo 'owner/store'.*was not downloaded: "):
        fetch(REPO)
    with pytest.raises(OSError, match=r"not pushed to 'owner/store'"):
        push(store, REPO, token=TOKEN)


@pytest.mark.parametrize(("method", "path"), [("PUT", "/storage/"), ("POST", "/commit/")])
def test_a_failed_push_leaves_the_old_version(hub, store, newer, no_waiting, method, path, pushed):
    before = pushed.files()
    hub.faults.append(Fault(method, path, after=100))
    with pytest.raises(OSError, match=r"not pushed to 'owner/store'.*push again"):
        push(newer, REPO, token=TOKEN)
    assert pushed.files() == before
    assert (fetch(REPO) / CONFIG).read_bytes() == (store / CONFIG).read_bytes()
    hub.faults.clear()
    push(newer, REPO, token=TOKEN)
    assert (fetch(REPO) / CONFIG).read_bytes() == (newer / CONFIG).read_bytes()


def test_two_who_push_at_the_same_time(newer, monkeypatch, pushed):
    repo_info = huggingface_hub.HfApi.repo_info

    def other_commit(self, *args, **kwargs):
        info = repo_info(self, *args, **kwargs)
        pushed.commit("main", pushed.commits[pushed.branches["main"]])
        return info

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", other_commit)
    before = pushed.files()
    with pytest.raises(OSError, match=r"A commit has happened since"):
        push(newer, REPO, token=TOKEN)
    assert pushed.files() == before


# What is not pushed


def test_without_the_right_to_write(hub, store):
    hub.create("owner/there")
    for repo, token in ((REPO, None), (REPO, "hf_of_somebody_else"), ("owner/there", None)):
        with pytest.raises(OSError, match=rf"'{repo}'.*not let you write there.*another token"):
            push(store, repo, token=token)


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
    with pytest.raises(ValueError, match=r"Repo id must .*not/a/name"):
        push(store, "not/a/name", token=TOKEN)
    (store / "README.md").write_text("---\nlicense: proprietary\n---\n")
    with pytest.raises(OSError, match=r"Invalid metadata in README.md.*unknown license"):
        push(store, REPO, token=TOKEN)
    assert set(hub.repos[REPO].files()) == {".gitattributes"}


@pytest.fixture
def config(store) -> StoreConfig:
    return replace(StoreConfig.read(store), vocab_size=32_000)


def metadata(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_card_says_what_is_in_the_store(config):
    card = card_of(config, REPO)
    assert metadata(card) == {
        "pretty_name": "store",
        "task_categories": ["text-generation"],
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
        "| Documents | 22, exact duplicates dropped |",
        ": 612 tokens and their suffix array, in 2 shards |",
        "| Tokenizer | `org/tokenizer`, ids below 32,000 |",
        f"| Tokenizer fingerprint | `{'f' * 32}` |",
        "40 n-grams of up to 2 tokens, with 2,560 draft nodes",
        "| Built with | hf_refspec 0.1.0 |",
        "| `suffixes-00001.safetensors` | 1.40kB |",
    ]:
        assert text in card
    assert "$" not in card and "Not measured." in card


@pytest.mark.parametrize("mat", [5, [5, {}], [{"state": None}], [{"form": [], "state": {}}]])
def test_figures_of_another_state_or_format_are_not_shown(config, mat):
    assert "Not measured." in card_of(replace(config, source={"mat": mat}), REPO)


def test_card_of_a_store_of_which_little_is_known(config):
    card = card_of(replace(config, source={"license": None}, shards=[]), REPO)
    assert "license" not in metadata(card)
    assert "| Licence of the corpus | not stated |" in card
    assert "has not been stated" in card
    assert "from 612 tokens |" in card and "| Full form | none |" in card
    assert "| Compact form | none |" in card_of(replace(config, ngrams=None), REPO)


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("CC-BY-SA-4.0", {"license": "cc-by-sa-4.0"}),
        ("PSF-2.0", {"license": "other", "license_name": "psf-2.0"}),
        ("various: see $files", {"license": "other", "license_name": "various-see-files"}),
    ],
)
def test_licences(config, licence, expected):
    card = card_of(replace(config, source={**SOURCE, "license": licence}), REPO)
    found = metadata(card)
    assert {key: found[key] for key in found if key.startswith("license")} == expected
    assert f"| Licence of the corpus | {licence} |" in card


def test_the_list_of_cards_has_every_template_of_the_package():
    root = Path(__file__).parents[2]
    listed = (root / "model_cards" / "README.md").read_text(encoding="utf-8")
    templates = sorted((root / "hf_refspec").rglob("*.md"))
    linked = re.findall(r"\]\(\.\./(.*)\)", listed)
    assert sorted(linked) == [path.relative_to(root).as_posix() for path in templates]


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


def test_a_card_of_ones_own_is_kept_and_published_again_from_the_cache(hub, store):
    (store / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    push(store, REPO, token=TOKEN)
    assert hub.repos[REPO].files()["README.md"] == (store / "README.md").read_bytes()
    fetched = fetch(REPO)
    assert (fetched / "README.md").is_symlink()
    assert (fetched / "README.md").read_text().endswith("# Mine\n")
    push(fetched, "owner/copy", token=TOKEN)
    assert hub.repos["owner/copy"].files() == hub.repos[REPO].files()


def test_a_pipe_is_no_card_and_not_waited_for(hub, store):
    os.mkfifo(store / "README.md")
    with pytest.raises(DatastoreError, match=r"README\.md is not a file"):
        push(store, REPO, token=TOKEN)
