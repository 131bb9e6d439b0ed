"""`hf-refspec store build`, `extend`, `retokenize`, `compact`, `info`, `search`: what they make
and print."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_refspec import smollm2
from hf_refspec.apps.cli import arguments
from hf_refspec.apps.cli.main import main
from hf_refspec.retrieval.knowledge_base import KnowledgeBase
from hf_refspec.store.datastore import Datastore

TEXTS = {
    "a.py": "def area(width, height):\n    return width * height\n",
    "b.py": "def area(radius):\n    return radius * radius\n",
    "c.txt": "the cat sat on the mat, the cat sat on the hat\n",
}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory, tokenizer) -> str:
    folder = tmp_path_factory.mktemp("tokenizers") / "bytes"
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizers") / "words"
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "cat": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory, corpus, tokenizer_folder) -> str:
    folder = tmp_path_factory.mktemp("stores") / "store"
    assert run("build", corpus, "--tokenizer", tokenizer_folder, "--out", folder) == 0
    return str(folder)


@pytest.fixture(scope="module")
def compact_store(tmp_path_factory, store) -> str:
    folder = tmp_path_factory.mktemp("stores") / "compact"
    assert run("compact", store, "--out", folder) == 0
    return str(folder)


@pytest.fixture
def search(capsys):
    """Runs a search and returns what it prints, line by line."""

    def searched(store, text) -> list[str]:
        capsys.readouterr()
        assert run("search", store, text) == 0
        return capsys.readouterr().out.splitlines()

    return searched


def run(*arguments) -> int:
    return main(["store", *map(str, arguments)])


def texts_of(folder, tokenizer) -> list[str]:
    return [tokenizer.decode(ids) for ids in Datastore(folder).iter_documents()]


# --- build


def test_builds_from_files_in_their_order(tmp_path, corpus, tokenizer, tokenizer_folder, capsys):
    files = [corpus / "c.txt", corpus / "a.py"]
    out = tmp_path / "store"
    assert run("build", *files, "--tokenizer", tokenizer_folder, "--out", out) == 0
    assert texts_of(out, tokenizer) == [TEXTS["c.txt"], TEXTS["a.py"]]
    printed = capsys.readouterr().out
    assert printed.startswith(f"{out}\n")
    assert "corpus      c.txt, a.py" in printed
    assert "licence     not stated" in printed
    tokens = len(TEXTS["c.txt"]) + len(TEXTS["a.py"]) + 2
    assert f"full        {tokens} tokens, 2 documents, 1 shard, " in printed
    assert re.search(r"\d\.\d MB, \d+\.\d\d bytes a token", printed)


def test_builds_with_the_default_models_tokenizer(
    tmp_path, corpus, tokenizer, tokenizer_folder, monkeypatch
):
    monkeypatch.setattr(smollm2, "default_model", lambda: tokenizer_folder)
    assert run("build", corpus / "a.py", "--out", tmp_path / "store") == 0
    assert texts_of(tmp_path / "store", tokenizer) == [TEXTS["a.py"]]


def test_builds_from_those_files_of_a_folder_that_fit_a_pattern(
    tmp_path, corpus, tokenizer, tokenizer_folder, capsys
):
    arguments = ["--tokenizer", tokenizer_folder, "--out", tmp_path / "store", "--license", "MIT"]
    assert run("build", corpus, *arguments, "--pattern", "*.py") == 0
    assert texts_of(tmp_path / "store", tokenizer) == [TEXTS["a.py"], TEXTS["b.py"]]
    assert "licence     MIT\n" in capsys.readouterr().out


def test_builds_from_a_preset_with_its_name_and_licence(
    tmp_path, corpus, tokenizer, tokenizer_folder, capsys, monkeypatch
):
    monkeypatch.setattr(arguments, "python_stdlib", lambda: [corpus / "b.py"])
    options = ["--tokenizer", tokenizer_folder, "--out", tmp_path / "store"]
    assert run("build", "--preset", "python-stdlib", *options) == 0
    assert texts_of(tmp_path / "store", tokenizer) == [TEXTS["b.py"]]
    printed = capsys.readouterr().out
    assert "corpus      Python standard library\n" in printed
    assert "licence     PSF-2.0\n" in printed


@pytest.mark.parametrize(("kind", "streaming"), [("json", []), ("parquet", ["--streaming"])])
def test_builds_from_a_dataset_of_this_machine(
    tmp_path, tokenizer, tokenizer_folder, kind, streaming, monkeypatch
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = {"id": [1, 2, 3], "body": ["one", "two", "one"], "note": ["x", "y", "z"]}
    folder = tmp_path / "rows"
    folder.mkdir()
    getattr(datasets.Dataset.from_dict(rows), f"to_{kind}")(folder / f"train.{kind}")
    arguments = ["--dataset", folder, "--column", "body", "--tokenizer", tokenizer_folder]
    arguments += ["--out", tmp_path / "store", "--deduplicate"]
    assert run("build", *arguments, *streaming) == 0
    assert texts_of(tmp_path / "store", tokenizer) == ["one", "two"]


# --- extend, merge, compact, info


def test_merges_all_shards_and_compacts_into_the_store_itself(
    tmp_path, corpus, tokenizer_folder, capsys
):
    store = tmp_path / "store"
    run("build", corpus, "--tokenizer", tokenizer_folder, "--out", store)
    Datastore(store).extend([[7]], progress=False)
    run("info", store)
    assert "4 documents, 2 shards" in capsys.readouterr().out
    assert run("merge", store) == 0
    assert "4 documents, 1 shard," in capsys.readouterr().out
    assert run("compact", store) == 0
    printed = capsys.readouterr().out
    assert "full        " in printed
    sizes = Datastore(store, form="full").config.ngrams.ngrams
    orders = ", ".join(map(str, sizes))
    assert f"compact     {sum(sizes)} n-grams ({orders} of the orders 1, 2, ...)" in printed


def test_the_tokenizer_is_found_again_where_its_folder_is_gone(
    tmp_path, corpus, tokenizer, other_tokenizer, capsys
):
    folder = tmp_path / "tokenizer"
    tokenizer.save_pretrained(folder)
    store, other = tmp_path / "store", tmp_path / "other"
    assert run("build", corpus / "a.py", "--tokenizer", folder, "--out", store) == 0
    shutil.rmtree(folder)
    assert run("extend", store, corpus / "c.txt") == 0
    assert texts_of(store, tokenizer) == [TEXTS["a.py"], TEXTS["c.txt"]]
    assert run("search", store, "the cat") == 0
    capsys.readouterr()
    assert run("info", store) == 0
    assert "tokenizer   tokenizer, fingerprint" in capsys.readouterr().out
    assert run("retokenize", store, "--tokenizer", other_tokenizer, "--out", other) == 0
    assert "corpus      a.py, c.txt" in capsys.readouterr().out
    assert Datastore(other).documents == 2
    assert Datastore(other).config.tokenizer == "words"


def test_compacts_into_a_folder_of_its_own(tmp_path, store, capsys):
    out = tmp_path / "compact"
    assert run("compact", store, "--out", out, "--max-bytes", 5000) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{out}\n") and "full        " not in printed
    assert 0 < Datastore(out).config.ngrams.file.size <= 5000
    assert Datastore(store).config.ngrams is None


def test_info_tells_what_is_in_it_and_verifies_all_files(
    tmp_path, store, compact_store, capsys, refused
):
    assert run("info", store) == 0
    full = capsys.readouterr().out
    assert "vocabulary  259\n" in full and Datastore(store).config.fingerprint in full
    assert "compact " not in full and "as they were written" not in full
    assert run("info", compact_store, "--verify") == 0
    compact = capsys.readouterr().out
    corpus_tokens = sum(map(len, TEXTS.values())) + len(TEXTS)
    assert re.search(rf"compact +\d+ n-grams .* MB, of {corpus_tokens} tokens\n", compact)
    assert "all files are as they were written" in compact
    damaged = tmp_path / "damaged"
    Datastore(store).save_pretrained(damaged)
    file = damaged / Datastore(store).config.shards[0].tokens_file.name
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert run("info", damaged) == 0
    assert "verified    never" in capsys.readouterr().out
    assert file.name in refused("store", "info", damaged, "--verify")


def test_info_says_when_a_knowledge_base_was_verified(tmp_path, tokenizer, capsys, refused):
    base = KnowledgeBase.build(TEXTS.values(), tokenizer, None, tmp_path / "base", progress=False)
    assert run("info", base.path) == 0
    assert re.search(
        r"passages +3, \d+ tokens, for BM25\n +verified +never\n", capsys.readouterr().out
    )
    assert run("info", base.path, "--verify") == 0
    assert run("info", base.path) == 0
    shown = f"verified    {base.verified:%Y-%m-%d %H:%M} UTC"
    assert shown in capsys.readouterr().out
    file = base.path / "passages.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert file.name in refused("store", "info", base.path, "--verify")
    assert run("info", base.path) == 0 and "verified    never" in capsys.readouterr().out


# --- search


def test_search_shows_the_longest_match_and_what_stands_around_a_few_of_its_places(store, search):
    lines = search(store, "xyz the cat sat on the ")
    # Nothing else ends in "z the", so that the match begins behind it.
    assert lines[0] == "the last 20 tokens, ' the cat sat on the ', occur 1 times, such as:"
    assert lines[1] == "  … on the mat,⟦ the cat sat on the ⟧hat↵…"
    assert lines[2].endswith(" nodes, each with the probability that it is accepted:")
    assert len(lines) == 3 + int(lines[2].split()[3])
    lines = search(store, "return ")
    assert lines[0] == "the last 7 tokens, 'return ', occur 2 times, such as:"
    shown = {line.partition("⟦")[2] for line in lines[1:3]}
    assert shown == {"return ⟧width * heig…", "return ⟧radius * rad…"}
    assert sum("⟦a⟧" in line for line in search(store, "a")) == 3


def tree_of(lines: list[str]) -> list[tuple[tuple[str, ...], float]]:
    """The nodes of a printed tree: their paths and probabilities."""
    path: list[str] = []
    nodes = []
    for line in lines:
        prob, indented, token = re.fullmatch(r" *(\d\.\d{3}) ((?: {2})+)(\S.*)", line).groups()
        depth = len(indented) // 2
        assert depth <= len(path) + 1
        path[depth - 1 :] = [ast.literal_eval(token)]
        nodes.append((tuple(path), float(prob)))
    return nodes


@pytest.mark.parametrize("form", ["full", "compact"])
def test_search_prints_the_tree_with_its_probabilities(store, compact_store, form, search):
    lines = search(store if form == "full" else compact_store, "the ")
    start = next(i for i, line in enumerate(lines) if line.startswith("the draft tree, "))
    nodes = tree_of(lines[start + 1 :])
    probs = dict(nodes)
    assert f"the draft tree, {len(nodes)} nodes" in lines[start]
    assert len(probs) == len(nodes) > 3
    assert all(prob <= probs.get(path[:-1], 1.0) for path, prob in nodes)
    # Behind "the " stands "cat" twice, "mat" and "hat" once each.
    assert probs[("c",)] > probs[("m",)] > 0
    assert probs[("h",)] > 0
    assert max(map(len, probs)) > 1
    if form == "compact":
        assert start == 0  # matches cannot be shown


def test_search_prints_text_and_says_where_nothing_is_found(store, search):
    assert any(line.endswith("  ' '") for line in search(store, "cat"))
    found, tree = search(store, "Q")
    assert found == "not even the last token occurs" and tree.startswith("the draft tree, 0 nodes")
