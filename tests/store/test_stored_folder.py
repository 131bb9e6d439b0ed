"""Every kind of stored folder goes to the Hub and comes back, and tells nothing of this machine;
damage to its files is found, and how long ago there was none is noted."""

from collections.abc import Callable

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_refspec as rs
from hf_refspec.corpus.documents import files_of
from tests.helpers.hub_server import TOKEN
from tests.helpers.texts import bag_of_words

SECRET = "where-nobody-looks"
REPO = "owner/store"
OF_TOKENIZER = (rs.KnowledgeBase, rs.TokenRecycling)  # opened with it
KINDS: dict[str, Callable] = {
    "datastore": lambda model, tok, docs, path: rs.Datastore.build(docs, tok, path),
    "compact form": lambda model, tok, docs, path: rs.Datastore.build(
        docs, tok, path.with_name("full")
    ).compact(path),
    "extended datastore": lambda model, tok, docs, path: rs.Datastore.build(
        ["a text"], tok, path
    ).add(docs, tok),
    "knowledge base": lambda model, tok, docs, path: rs.KnowledgeBase.build(
        docs, tok, bag_of_words, path
    ),
    "kNN datastore": lambda model, tok, docs, path: rs.KnnDatastore.build(
        [file.read_text() for file in files_of(docs, "*")], tok, model, path
    ),
    "recycling table": lambda model, tok, docs, path: rs.TokenRecycling.build(docs, tok, model),
}


@pytest.mark.parametrize("name", ["a/b/c", "", "a b", "owner/", "name.git"])
def test_what_is_no_name_for_a_repo_is_refused_before_anything_is_checked(name, tmp_path, hub):
    store = rs.Datastore.__new__(rs.Datastore)
    store.path = tmp_path / "nothing"
    with pytest.raises(ValueError, match=r"[Rr]epo"):
        store.push_to_hub(name, token=TOKEN)
    assert hub.requests == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_published_is_fetched_and_has_no_path_of_this_machine(
    kind, tmp_path, hub, byte_llama, tokenizer
):
    root = tmp_path / SECRET
    (root / "corpus" / "below").mkdir(parents=True)
    (root / "corpus" / "a.txt").write_text("the cat sat on the mat")
    (root / "corpus" / "below" / "b.txt").write_text("the cat sat on the hat")
    byte_llama.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    model = AutoModelForCausalLM.from_pretrained(root / "model")
    known = AutoTokenizer.from_pretrained(root / "model")
    assert SECRET in model.name_or_path and SECRET in known.name_or_path
    built = KINDS[kind](model, known, root / "corpus", root / "stored" / "store")
    built.push_to_hub(REPO, token=TOKEN)
    published = hub.repos[REPO].files()
    assert {"config.json", "README.md"} < set(published)
    for name, content in published.items():
        assert SECRET.encode() not in content and str(tmp_path).encode() not in content, name
    card = published["README.md"].decode()
    assert f'from_pretrained("{REPO}"' in card and "$" not in card
    arguments = [known] if isinstance(built, OF_TOKENIZER) else []
    fetched = type(built).from_pretrained(REPO, *arguments, cache_dir=tmp_path / "downloads")
    if isinstance(built, rs.TokenRecycling):
        assert len(fetched) == len(built)
    else:
        fetched.verify()
        assert fetched.config == built.config


@pytest.mark.parametrize("kind", list(KINDS)[:-1])
def test_damage_to_any_file_is_found(kind, tmp_path, byte_llama, tokenizer):
    (tmp_path / "corpus.txt").write_text("the cat sat on the mat, " * 30)
    built = KINDS[kind](byte_llama, tokenizer, tmp_path / "corpus.txt", tmp_path / "store")
    arguments = [tokenizer] if isinstance(built, OF_TOKENIZER) else []
    built.verify()
    assert len(built.config.files()) > 1 or kind == "kNN datastore"
    for entry in built.config.files():
        path = built.path / entry.name
        content, damaged = path.read_bytes(), f"{entry.name} is damaged: its checksum is"
        middle = slice(len(content) // 2, len(content) // 2 + 238)
        flipped = bytes(byte ^ 0xFF for byte in content[middle])
        path.write_bytes(content[: middle.start] + flipped + content[middle.stop :])
        with pytest.raises(rs.DatastoreError, match=damaged):
            built.verify()
        if kind in ("knowledge base", "kNN datastore"):  # small files that decide on the text
            with pytest.raises(rs.DatastoreError, match=damaged):
                type(built)(built.path, *arguments)
        path.write_bytes(content)
