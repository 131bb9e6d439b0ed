"""`hf-refspec knn build` and `hf-refspec knn perplexity`: what they print, choose and refuse."""

from __future__ import annotations

import re

import datasets
import pytest
import torch
from texts import some_texts

from hf_refspec.apps.cli.knn import _hold_out
from hf_refspec.apps.cli.main import main
from hf_refspec.ralm.knn_datastore import KnnDatastore
from hf_refspec.ralm.perplexity import perplexity


@pytest.fixture(scope="module")
def places(tmp_path_factory, byte_llama, tokenizer, folder):
    """A model, another one, texts, and a kNN datastore that `knn build` has made of them."""
    root = tmp_path_factory.mktemp("knn")
    (root / "model").symlink_to(folder)
    torch.manual_seed(1)
    type(byte_llama)(byte_llama.config).save_pretrained(root / "other")
    tokenizer.save_pretrained(root / "other")
    texts = root / "texts"
    texts.mkdir()
    for number, text in enumerate(some_texts(40)):
        (texts / f"{number}.txt").write_text(text * 4)
    (root / "held.txt").write_text("\n".join(some_texts(20, seed=1)))
    (root / "short.txt").write_text("stone light\n")
    (root / "empty").mkdir()
    assert run("build", texts, "--model", root / "model", "--out", root / "store") == 0
    return root


def run(*arguments) -> int:
    return main(["knn", *map(str, arguments)])


# --- what they print


def test_build_holds_text_out_and_keeps_what_it_has_chosen(places, tmp_path, capsys):
    out = tmp_path / "store"
    capsys.readouterr()
    assert run("build", places / "texts", "--model", places / "model", "--out", out) == 0
    printed = capsys.readouterr().out
    store = KnnDatastore(out)
    chosen = store.config.interpolation
    assert f"  entries     {len(store):,} of 32 numbers\n" in printed
    assert f"  chosen      {chosen}, on {chosen.tokens:,} held-out tokens\n" in printed
    assert f"{chosen.perplexity_alone:.2f} alone, {chosen.perplexity:.2f} with" in printed
    assert 0.05 < chosen.tokens / (chosen.tokens + len(store)) < 0.15
    assert chosen == KnnDatastore(places / "store").config.interpolation  # the same every time


def test_perplexity_is_that_of_the_model_alone_and_with_what_was_chosen(
    places, capsys, byte_llama, tokenizer
):
    text = (places / "held.txt").read_text()
    store = KnnDatastore(places / "store")
    capsys.readouterr()
    options = [places / "store", places / "held.txt", "--model", places / "model"]
    assert run("perplexity", *options) == 0
    printed = capsys.readouterr().out
    alone = perplexity(byte_llama, tokenizer, text)
    mixed = perplexity(byte_llama, tokenizer, text, store)
    assert mixed < alone
    assert f"alone       {alone:.2f}\n" in printed
    assert re.search(rf"with kNN    {mixed:.2f} \(-\d+\.\d %\), ", printed)
    assert printed.endswith(f", {store.config.interpolation}\n")


def test_a_text_of_the_datastore_is_noticed(places, capsys):
    capsys.readouterr()
    options = [places / "store", places / "texts", "--model", places / "model"]
    assert run("perplexity", *options) == 0
    percent = int(re.search(r"(\d+) % stored with the same", capsys.readouterr().out).group(1))
    assert 80 < percent < 100  # the rest was held out


def test_a_dataset_of_this_machine(places, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "rows"
    folder.mkdir()
    datasets.Dataset.from_dict({"body": some_texts(30)}).to_json(folder / "train.json")
    options = ["--dataset", folder, "--column", "body", "--model", places / "model"]
    assert run("build", *options, "--out", tmp_path / "store") == 0
    assert run("perplexity", tmp_path / "store", *options) == 0
    assert "with kNN" in capsys.readouterr().out


# --- what is held out


def test_whole_texts_are_held_out_the_same_ones_every_time():
    texts = [f"{i:02}" * 50 for i in range(50)]
    kept, held_out = _hold_out(texts)
    assert sorted(kept + held_out) == texts
    assert len(held_out) == 5
    assert _hold_out(texts) == (kept, held_out)


def test_of_one_text_its_end_is_held_out():
    text = "".join(f"line {i}\n" for i in range(1000))
    (kept,), (held_out,) = _hold_out([text])
    assert kept + held_out == text
    assert held_out.startswith("line 9")
    assert 0.09 < len(held_out) / len(text) < 0.11


def test_a_text_without_lines_is_cut_and_no_more_is_held_out_than_is_worth_the_time():
    (kept,), (held_out,) = _hold_out(["\n" + "x" * 9999])
    assert (len(kept), len(held_out)) == (9000, 1000)
    kept, held_out = _hold_out(["x" * 1000] * 2000)
    assert (len(kept), len(held_out)) == (1960, 40)


# --- bad input

REFUSED = {
    "no texts": (["build", "--out", "{new}"], "give one of: files or folders, --dataset NAME"),
    "a folder without texts": (["build", "{empty}", "--out", "{new}"], "there is no text in"),
    "a folder that exists": (["build", "{texts}", "--out", "{empty}"], "--out {empty} exists"),
    "a column of files": (
        ["build", "{texts}", "--column", "x", "--out", "{new}"],
        "--column 'x' is for datasets",
    ),
    "too little text": (
        ["build", "{short.txt}", "--out", "{new}"],
        "too little text to choose lambda on: 0 tokens are held out",
    ),
    "a missing datastore": (["perplexity", "{missing}", "{texts}"], "{missing}"),
    "a folder that is no datastore": (["perplexity", "{empty}", "{texts}"], "not a kNN datastore"),
    "another model": (
        ["perplexity", "{store}", "{held.txt}", "--model", "{other}"],
        "knn_datastore was made with another model",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_exits_with_2_and_one_line(arguments, message, places, offline, refused):
    def filled(text: str) -> str:
        return re.sub(r"\{(.+?)\}", lambda match: str(places / match[1]), text)

    given = [filled(argument) for argument in arguments]
    given += [] if "--model" in given else ["--model", str(places / "model")]
    assert filled(message) in refused("knn", *given)
    assert not (places / "new").exists()
