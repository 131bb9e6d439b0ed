"""`hf-refspec evaluate`: what it asks the model, what it prints, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_refspec.apps.bench.measure import Bench
from hf_refspec.apps.cli.main import main
from hf_refspec.store.datastore import Datastore

TEXTS = {f"{i}.txt": f"text {i}: the cat sat on the mat, the cat sat on the hat\n" for i in "abcde"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory, tokenizer) -> Datastore:
    folder = tmp_path_factory.mktemp("stores") / "store"
    options = {"num_proc": 1, "progress": False}
    return Datastore.build(list(TEXTS.values())[:2], tokenizer, folder, **options)


@pytest.fixture
def run(monkeypatch, folder, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("hf_refspec.apps.cli.evaluate._NEW_TOKENS", 12)

    def run(*arguments) -> tuple[int, str, str]:
        status = main(["evaluate", *map(str, arguments), "--model", folder])
        return (status, *capsys.readouterr())

    return run


def test_texts_that_are_in_the_store_are_told_from_others(run, store, texts):
    status, printed, _ = run(store.path, texts)
    assert status == 0
    lines = printed.splitlines()
    assert lines[0].startswith("bytes in float32, the full form of ")
    assert lines[0].endswith("5 prompts: beginnings of texts")
    rows = [line.strip("| ").split(" | ") for line in lines[3:6]]
    assert [row[0] for row in rows] == ["plain generate", "default drafter", "with the datastore"]
    assert [row[-1] for row in rows] == ["5 of 5"] * 3  # the texts are the same
    assert re.search(r"datastore: ReferenceCopy .*TokenRecycling .*DatastoreDrafts \d", lines[8])
    assert lines[9].startswith("2 of the prompts are beginnings of texts in the datastore itself")
    assert re.match(r"pays: |does not pay here: |too few prompts to say: ", lines[10])
    assert len(lines) == 11


def test_prompts_of_a_file_and_the_compact_form(run, store, tmp_path):
    compact = store.compact(tmp_path / "compact", progress=False)
    (tmp_path / "prompts").write_text("the cat\n\non the mat\n")
    status, printed, _ = run(compact.path, "--prompts", tmp_path / "prompts")
    assert status == 0
    assert "the compact form of" in printed and "2 prompts: " in printed
    assert "too few prompts to say: " in printed and ", of 2; give at least 5" in printed


def test_without_texts_the_stores_own_documents_are_taken_and_that_is_said(run, store):
    status, printed, _ = run(store.path)
    assert status == 0
    assert "2 prompts: beginnings of the datastore's own documents" in printed
    assert "2 of the prompts are beginnings of texts in the datastore itself" in printed


def test_other_ids_are_said_and_exit_with_1(run, store, texts, monkeypatch):
    call = Bench.call

    def other(self, method, prompts, answer_ids=None, **kwargs):
        sample, rows, outputs = call(self, method, prompts, answer_ids, **kwargs)
        if method.name == "with the datastore" and answer_ids is None:
            outputs[0].tokens[3] += 1
        return sample, rows, outputs

    monkeypatch.setattr(Bench, "call", other)
    status, printed, _ = run(store.path, texts)
    assert status == 1
    assert "IDS DIFFER: " in printed and "returns other ids than plain generate" in printed


REFUSED = {
    "a missing store": (["{missing}", "{texts}"], "does not exist; name a folder"),
    "missing texts": (["{store}", "{missing}"], "{missing} is neither a file nor a folder"),
    "texts and prompts": (["{store}", "{texts}", "--prompts", "{text}"], "not both"),
    "missing prompts": (
        ["{store}", "--prompts", "{missing}"],
        "{missing} does not exist",
    ),
    "texts that are too short": (["{store}", "{short}"], "no text has the 8 tokens"),
    "nothing to take prompts from": (["{compact}"], "the compact form has no documents"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_line(arguments, message, run, store, texts, tmp_path):
    (tmp_path / "short").write_text("abc")
    store.compact(tmp_path / "compact", progress=False)
    places = {
        **{name: tmp_path / name for name in ("missing", "short", "compact")},
        **{"store": store.path, "texts": texts, "text": texts / "a.txt"},
    }
    status, printed, refused = run(*(argument.format(**places) for argument in arguments))
    assert (status, printed) == (2, "")
    assert message.format(**places) in refused and refused.count("\n") == 1


def test_a_store_of_another_tokenizer_is_refused(run, tmp_path, texts):
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})))
    Datastore.build([[0, 0]], words, tmp_path / "store", num_proc=1, progress=False)
    status, _, refused = run(tmp_path / "store", texts)
    assert status == 2
    assert "was made for another tokenizer" in refused
