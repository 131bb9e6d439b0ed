"""A tokenizer with a token that its model has no row for, as Gemma 3's and Code Llama's have one:
only ids that occur decide, and a source that has such an id is refused before work starts."""

import copy
import json

import numpy as np
import pytest

import hf_refspec as rs
from hf_refspec.apps.cli import main
from hf_refspec.drafting.contract import Call
from tests.helpers.passes import passes_of
from tests.helpers.running_server import serving

TEXTS = ["the cat sat on the mat, the cat sat on the hat"] * 2
IMAGE = "<image>"
FOREIGN = [*TEXTS, f"a picture {IMAGE} of the cat"]


@pytest.fixture(scope="module")
def longer(tokenizer):
    found = copy.deepcopy(tokenizer)
    found.add_special_tokens({"additional_special_tokens": [IMAGE]})
    return found


@pytest.fixture(scope="module")
def generated(byte_llama, longer):
    def run(**options):
        inputs = longer("the cat", return_tensors="pt")
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | options
        return byte_llama.generate(**inputs, **options).tolist()

    return run


def sources(texts, tokenizer, folder):
    store = rs.Datastore.build(texts, tokenizer, folder / "store")
    cache = rs.SessionDrafts(tokenizer, path=folder / "cache")
    cache.add("the cat", texts[-1])
    return {
        "full": rs.DatastoreDrafts(store),
        "compact": rs.DatastoreDrafts(store.compact(folder / "compact")),
        "cache": cache,
        "references": rs.ReferenceCopy(texts, tokenizer),
    }


def test_sources_without_the_further_id_draft_what_plain_decoding_generates(
    generated, longer, byte_llama, tmp_path
):
    plain = generated()
    found = sources(plain, longer, tmp_path)
    found["table"] = rs.TokenRecycling.build(plain, longer, byte_llama)
    found["table"].save_pretrained(tmp_path / "table")
    found["stored"] = rs.TokenRecycling.from_pretrained(tmp_path / "table", longer)
    for name, drafter in found.items():
        assert generated(candidate_generator=drafter, max_draft_tokens=8) == plain, name
        assert drafter.stats.drafted > 0, name


@pytest.mark.parametrize("name", ["full", "compact", "cache", "references"])
def test_sources_with_the_further_id_are_refused_before_a_pass(
    generated, longer, byte_llama, tmp_path, name
):
    drafter = sources(FOREIGN, longer, tmp_path)[name]
    message = r"the id 259, outside of the target model's vocab"
    with passes_of(byte_llama) as passes, pytest.raises(ValueError, match=message):
        generated(candidate_generator=drafter)
    assert not passes


def test_a_document_that_is_added_meanwhile_ends_at_the_further_id(generated, longer, tmp_path):
    store = rs.Datastore.build(TEXTS, longer, tmp_path / "store")
    drafter, plain = rs.DatastoreDrafts(store), generated()
    assert generated(candidate_generator=drafter) == plain
    store.add([f"the cat{IMAGE} sat"] * 9)
    assert generated(candidate_generator=drafter) == plain
    drafter.begin(np.array(longer("the cat")["input_ids"]), 259)
    tree = drafter.draft(64, Call())
    assert len(tree) and tree.tokens.max() < 259
    with pytest.raises(rs.DatastoreError, match="has the id 259"):
        generated(candidate_generator=rs.DatastoreDrafts(store))


def test_a_removed_document_decides_no_more(generated, longer, tmp_path):
    documents = dict(zip("abc", FOREIGN, strict=True))
    store = rs.Datastore.build(documents, longer, tmp_path / "store")
    store.remove("c")
    assert generated(candidate_generator=store) == generated()


def test_what_runs_the_model_over_texts_names_the_text_with_the_further_id(
    byte_llama, longer, tmp_path
):
    message = r"document 2 has the id 259, outside of the target model's vocabulary of 259"
    with pytest.raises(ValueError, match=message):
        rs.TokenRecycling.build(FOREIGN, longer, byte_llama)
    with pytest.raises(ValueError, match=message):
        rs.KnnDatastore.build(FOREIGN, longer, byte_llama, tmp_path / "knn")
    assert not [*tmp_path.iterdir()]
    knn = rs.KnnDatastore.build(TEXTS, longer, byte_llama, tmp_path / "knn")
    inputs = longer("the cat", return_tensors="pt")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    byte_llama.generate(**inputs, **options, custom_generate=rs.knn_lm, knn_datastore=knn)


def test_a_knowledge_base_is_refused_if_a_passage_has_the_further_id(
    byte_llama, longer, tmp_path, generated
):
    options = {"custom_generate": rs.iterative_ralm, "tokenizer": longer}
    base = rs.KnowledgeBase.build(TEXTS, longer, None, tmp_path / "base")
    assert generated(retriever=rs.SparseRetriever(base), **options)
    foreign = rs.KnowledgeBase.build(FOREIGN, longer, None, tmp_path / "foreign")
    with pytest.raises(ValueError, match=r"foreign has the id 259, outside of the target model's"):
        generated(retriever=rs.SparseRetriever(foreign), **options)


def test_a_grammar_drafts_with_a_longer_tokenizer(generated, longer):
    drafter = rs.GrammarDrafts(longer, regex="(cat sat on the mat )+")
    options = {"logits_processor": [drafter.processor()]}
    plain = generated(**options)
    drafts = {"candidate_generator": drafter, "max_draft_tokens": 8}
    assert generated(**{"logits_processor": [drafter.processor()]}, **drafts) == plain
    assert drafter.stats.accepted > 0


def test_a_server_with_the_further_id_does_not_start(byte_llama, longer, tmp_path, capsys):
    for pretrained in (byte_llama, longer):
        pretrained.save_pretrained(tmp_path / "model")
    rs.Datastore.build(FOREIGN, longer, tmp_path / "store")
    line = "serve", "--model", tmp_path / "model", "--port", 0, "--datastore", tmp_path / "store"
    assert main.main([*map(str, line)]) == 2
    message = capsys.readouterr().err
    assert "has the id 259, outside of the target model's vocabulary of 259" in message


def test_a_server_refuses_a_request_with_the_further_id_and_goes_on(byte_llama, longer, tmp_path):
    store = rs.Datastore.build({"a": TEXTS[0]}, longer, tmp_path / "store")
    sources = [rs.ReferenceCopy(), rs.DatastoreDrafts(store)]
    with serving(byte_llama, longer, sources) as server:
        answer = server.post(chat(f"a picture {IMAGE}"))
        assert answer.status_code == 400
        assert "the ids of this chat must be from 0 to 258" in answer.json()["error"]["message"]
        store.add({"b": f"the cat{IMAGE} sat"}, longer)
        assert server.post(chat("the cat")).status_code == 200


def chat(text: str) -> str:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"messages": messages, "max_tokens": 4, "temperature": 0})
