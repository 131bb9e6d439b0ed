"""No file that is published tells where on this machine its folder was built."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hub_server import TOKEN
from texts import bag_of_words
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_refspec as rs
from hf_refspec.store.build.source import files_of

SECRET = "where-nobody-looks"
REPO = "owner/store"
QUIET = {"progress": False}
KINDS: dict[str, Callable] = {
    "datastore": lambda model, tok, docs, path: rs.Datastore.build(docs, tok, path, **QUIET),
    "compact form": lambda model, tok, docs, path: rs.Datastore.build(
        docs, tok, path.with_name("full"), **QUIET
    ).compact(path, **QUIET),
    "extended datastore": lambda model, tok, docs, path: rs.Datastore.build(
        ["a text"], tok, path, **QUIET
    ).extend(docs, tok, **QUIET),
    "knowledge base": lambda model, tok, docs, path: rs.KnowledgeBase.build(
        docs, tok, bag_of_words, path, **QUIET
    ),
    "kNN datastore": lambda model, tok, docs, path: rs.KnnDatastore.build(
        model, tok, [file.read_text() for file in files_of(docs, "*")], path, **QUIET
    ),
    "recycling table": lambda model, tok, docs, path: rs.TokenRecycling.build(
        model, tok, docs, **QUIET
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_published_file_has_a_path_of_this_machine(kind, tmp_path, hub, byte_llama, tokenizer):
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
