"""The card says what config.json says, and the Hub can read it."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hf_refspec.store.card import card as card_of
from hf_refspec.store.datastore_config import StoreConfig
from hf_refspec.store.files import DatastoreError
from tests.helpers.datastores import SOURCE, fetch, push
from tests.helpers.hub_server import TOKEN

REPO = "owner/store"


@pytest.fixture
def config(store) -> StoreConfig:
    return StoreConfig.read(store)


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
        "| Documents | 4, exact duplicates dropped |",
        ": 96 tokens and their suffix array, in 1 shard |",
        "| Tokenizer | `org/tokenizer`, ids below 32,000 |",
        f"| Tokenizer fingerprint | `{'f' * 32}` |",
        "12 n-grams of up to 2 tokens, with 30 draft nodes",
        "| Built with | hf_refspec 0.1.0 |",
        "| `suffixes-00001.safetensors` | 480B |",
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
    assert "from 100 tokens |" in card and "| Full form | none |" in card
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
