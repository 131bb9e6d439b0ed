"""`hf-refspec store evaluate`: what it asks the model, what it prints, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

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

    def run(*arguments) -> tuple[int, str, str]:
        options = ["--model", folder, "--max-new-tokens", "12"]
        status = main(["store", "evaluate", *map(str, arguments), *options])
        printed = capsys.readouterr()
        return status, " ".join(printed.out.split()), printed.err

    return run


def test_texts_that_are_in_the_store_are_told_from_others(run, store, texts):
    status, printed, _ = run(store.path, texts)
    assert status == 0
    assert "to answer 5 prompts plainly" in printed and "the full form of " in printed
    for name in ("plain", "default drafter", "with the datastore"):
        assert re.search(rf"{name} \d+\.\d \d+\.\d \d+\.\d\dx \d\.\d\d 5 of 5", printed)
    verdict = "with the datastore against default drafter "
    assert re.search(verdict + "(pays|does not pay|too few prompts to say): ", printed)
    assert "2 prompts are in the datastore itself" in printed


def test_prompts_of_a_file_and_the_compact_form(run, store, tmp_path):
    compact = store.compact(tmp_path / "compact", progress=False)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n\n{"turns": ["the mat"]}\n')
    status, printed, _ = run(compact.path, "--prompts", tmp_path / "prompts.jsonl")
    assert status == 0
    assert "the compact form of" in printed and "too few prompts to say" in printed
    assert "in the datastore itself" not in printed


REFUSED = {
    "a missing store": (["{missing}", "{texts}"], "does not exist; name a folder"),
    "missing texts": (["{store}", "{missing}"], "{missing} is neither a file nor a folder"),
    "texts and prompts": (["{store}", "{texts}", "--prompts", "{text}"], "give one of: texts"),
    "neither": (["{store}"], "give one of: texts that are not in the datastore, --prompts FILE"),
    "missing prompts": (
        ["{store}", "--prompts", "{missing}"],
        "{missing} is no file",
    ),
    "texts that are too short": (["{store}", "{short}"], "no text has the 8 tokens"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_line(arguments, message, run, store, texts, tmp_path):
    (tmp_path / "short").write_text("abc")
    places = {
        **{name: tmp_path / name for name in ("missing", "short")},
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
