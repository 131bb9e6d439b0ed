"""Clients change the documents of a datastore, and later requests draft from them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import requests

from hf_refspec.drafting.contract import Call
from hf_refspec.drafting.datastore_drafts import DatastoreDrafts
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.files import only_writer
from tests.helpers.running_server import serving


@pytest.fixture(scope="module")
def store(tokenizer, tmp_path_factory) -> Datastore:
    path = tmp_path_factory.mktemp("corpora") / "store"
    return Datastore.build({"first": "an old text"}, tokenizer, path, progress=False)


@pytest.fixture(scope="module")
def server(speller, tokenizer, store):
    sources = [DatastoreDrafts(store)]
    options = {"max_rows": 2, "keys": ["k"], "stores": {"code": store}}
    with serving(speller, tokenizer, sources, **options) as running:
        yield running


def ask(server, method: str, path: str = "", store: str = "code", **options) -> requests.Response:
    headers = {"Authorization": "Bearer k", **options.pop("headers", {})}
    url = f"{server.url}/stores/{store}/documents{path}"
    return requests.request(method, url, headers=headers, timeout=600, **options)


def test_requests_draft_from_documents_that_came_and_not_from_those_that_left(
    server, store, tokenizer
):
    client, drafter = server.client.with_options(api_key="k"), DatastoreDrafts(store).fork()
    options = {"model": "tiny", "prompt": "the cat", "max_tokens": 24, "temperature": 0}

    def answer() -> str:
        return client.completions.create(**options).choices[0].text

    def drafted() -> str:
        drafter.begin(np.array(tokenizer("the cat")["input_ids"]), 259)
        return tokenizer.decode(drafter.draft(8, Call()).tokens)

    text = answer()
    added = ask(server, "POST", json={"documents": {"a b/c.py": "the cat" + text, "first": "new"}})
    assert added.json() == {"store": "code", "document_count": 2, "token_count": 10 + len(text)}
    assert answer() == text and text[0] in drafted()
    assert ask(server, "GET").json()["documents"] == ["a b/c.py", "first"]
    assert ask(server, "DELETE", "/a%20b/c.py").json()["document_count"] == 1
    assert answer() == text and drafted() == ""
    # A text that names a file of the server stays a text.
    unnamed = ask(server, "POST", json={"documents": [__file__, "two"]}).json()
    assert (unnamed["document_count"], unnamed["token_count"]) == (3, 3 + len(__file__) + 3)
    Datastore(store.path).add({"other": "of another process"}, progress=False)
    assert ask(server, "GET").json()["documents"] == ["first", "other"]
    assert ask(server, "DELETE", "/other").json()["document_count"] == 3


REFUSED = [
    (404, "POST", "", {"store": "none", "json": {"documents": ["a"]}}),
    (404, "DELETE", "/none", {}),
    (400, "POST", "", {"json": {"documents": []}}),
    (400, "POST", "", {"json": {"documents": [1]}}),
    (400, "POST", "", {"json": {"texts": ["a"]}}),
    (400, "POST", "", {"json": {"documents": [""]}}),
    (400, "POST", "", {"data": "no JSON"}),
    (413, "POST", "", {"json": {"documents": ["a" * 100_000]}}),
    (401, "GET", "", {"headers": {"Authorization": "Bearer other"}}),
    (
        400,
        "POST",
        "",
        {"data": json.dumps({"documents": ["a"]}), "headers": {"Origin": "http://x.y"}},
    ),
]


@pytest.mark.parametrize(("status", "method", "path", "options"), REFUSED)
def test_what_is_refused_changes_nothing(server, store, status, method, path, options):
    before = store.config
    answer = ask(server, method, path, **options)
    assert answer.status_code == status and answer.json()["error"]["message"]
    assert store.config == before


def test_a_datastore_that_another_process_writes_is_not_waited_for(server, store):
    with only_writer(store.path):
        answer = ask(server, "POST", json={"documents": ["a"]})
    assert answer.status_code == 409 and "another process" in answer.json()["error"]["message"]
