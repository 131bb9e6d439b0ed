"""`hf-refspec store build`, `compact`, `info`, `search`: what they make and print."""

import ast
import re
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hf_refspec import smollm2
from hf_refspec.apps.cli import store as store_commands
from hf_refspec.store.datastore import Datastore
from tests.helpers.hub_server import TOKEN

TEXTS = {
    "a.py": "def area(width, height):\n    return width * height\n",
    "b.py": "def area(radius):\n    return radius * radius\n",
    "c.txt": "the cat sat on the mat, the cat sat on the hat\n",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory, corpus, tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "store"
    Datastore.build(corpus, tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def compact_store(tmp_path_factory, store) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "compact"
    Datastore(store).compact(folder)
    return folder


@pytest.fixture
def run(printed):
    return partial(printed, "store")


@pytest.fixture
def search(run, store):
    """The lines that a search prints."""
    return lambda text, store=store: run("search", store, text).splitlines()


@pytest.fixture
def built(run, folder, tmp_path, tokenizer):
    """Builds a datastore; returns its documents, and what is printed."""

    def build(*arguments, tokenizer_options=("--tokenizer", folder)):
        out = tmp_path / "store"
        text = run("build", *arguments, *tokenizer_options, "--out", out)
        assert text.startswith(f"{out}\n")
        return texts_of(out, tokenizer), text

    return build


def texts_of(folder, tokenizer) -> list[str]:
    return [tokenizer.decode(ids) for ids in Datastore(folder).iter_documents()]


# --- build


def test_builds_from_files_in_their_order(built, corpus):
    texts, text = built(corpus / "c.txt", corpus / "a.py")
    assert texts == [TEXTS["c.txt"], TEXTS["a.py"]]
    assert "corpus      c.txt, a.py" in text and "licence     not stated" in text
    tokens = len(TEXTS["c.txt"]) + len(TEXTS["a.py"]) + 2
    assert "  documents   2\n" in text
    assert f": {tokens - 2} tokens and their suffix array, in 1 shard\n" in text


def test_builds_from_a_pattern_of_files_with_the_default_models_tokenizer(
    built, corpus, folder, monkeypatch
):
    monkeypatch.setattr(smollm2, "default_model", lambda: folder)
    texts, text = built(corpus, "--license", "MIT", "--pattern", "*.py", tokenizer_options=())
    assert texts == [TEXTS["a.py"], TEXTS["b.py"]] and "licence     MIT\n" in text


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_builds_from_a_dataset_of_this_machine(built, rows, streaming):
    options = ["--column", "title", "--deduplicate", *streaming]
    assert built("--dataset", rows, *options)[0] == [*"abcdefghi"]


@pytest.mark.parametrize("option", [[], ["--dataset"]])
def test_a_file_of_rows_is_read_and_never_asked_of_the_hub(built, option, tmp_path, monkeypatch):
    monkeypatch.setattr(store_commands, "ask_hub", None)
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text('{"text": "one"}\n{"content": "two", "n": 1}\n')
    name = "./data.jsonl" if option else "data.jsonl"
    texts, text = built(*option, name)
    assert texts == ["one", "two"] and "corpus      data.jsonl\n" in text


# --- compact, info


def test_compacts_into_the_store_itself(built, run, corpus, tmp_path):
    built(corpus)
    store = tmp_path / "store"
    text = run("compact", store)
    sizes = Datastore(store, form="full").config.ngrams.ngrams
    assert f": {sum(sizes)} n-grams of up to {len(sizes)} tokens, " in text
    assert "full        " in text and "documents   3\n" in text


def test_compacts_into_a_folder_of_its_own(run, tmp_path, store):
    out = tmp_path / "compact"
    text = run("compact", store, "--out", out, "--max-bytes", 5000)
    assert text.startswith(f"{out}\n") and "full        " not in text
    assert 0 < Datastore(out).config.ngrams.file.size <= 5000
    assert Datastore(store).config.ngrams is None


def test_push_publishes_what_push_to_hub_does(run, hub, store, tmp_path, monkeypatch, refused):
    Datastore(store).push_to_hub("owner/pushed", token=TOKEN)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert run("push", store, "owner/again", "--private").strip().endswith("/datasets/owner/again")
    pushed, again = (hub.repos[f"owner/{name}"] for name in ("pushed", "again"))
    assert again.private and not pushed.private
    assert {*pushed.files()} == {*again.files()}
    assert "is not a datastore" in refused("store", "push", tmp_path, "owner/none")


def test_info_tells_what_is_in_it_and_verifies_all_files(
    run, tmp_path, store, compact_store, refused
):
    full, compact = run("info", store), run("info", compact_store, "--verify")
    assert "vocabulary  259\n" in full and Datastore(store).config.fingerprint in full
    assert "compact " not in full and "as they were written" not in full
    corpus_tokens = sum(map(len, TEXTS.values()))
    assert f": {corpus_tokens} tokens and" in full
    assert f"tokens={corpus_tokens}, documents=3" in repr(Datastore(store))
    assert re.search(rf"compact +\S+B: \d+ n-grams .*, from {corpus_tokens} tokens\n", compact)
    assert "all files are as they were written" in compact
    damaged = tmp_path / "damaged"
    Datastore(store).save_pretrained(damaged)
    file = damaged / Datastore(store).config.shards[0].tokens_file.name
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert file.name in refused("store", "info", damaged, "--verify")


# --- search


def test_search_shows_the_longest_match_and_what_stands_around_a_few_of_its_places(search):
    lines = search("xyz the cat sat on the ")
    # Nothing else ends in "z the", so that the match begins behind it.
    assert lines[0] == "the last 20 tokens, ' the cat sat on the ', occur 1 time, such as:"
    assert lines[1] == "  … on the mat,⟦ the cat sat on the ⟧hat↵…"
    assert lines[2].endswith(" nodes, each with the probability that it is accepted:")
    assert len(lines) == 3 + int(lines[2].split()[3])
    lines = search("return ")
    assert lines[0] == "the last 7 tokens, 'return ', occur 2 times, such as:"
    shown = {line.partition("⟦")[2] for line in lines[1:3]}
    assert shown == {"return ⟧width * heig…", "return ⟧radius * rad…"}
    assert sum("⟦a⟧" in line for line in search("a")) == 3


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
    lines = search("the ", store if form == "full" else compact_store)
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


def test_search_prints_text_and_says_where_nothing_is_found(search):
    assert any(line.endswith("  ' '") for line in search("cat"))
    found, tree = search("Q")
    assert found == "not even the last token occurs" and tree.startswith("nothing to draft")
    assert search("Q ")[0].startswith("the last token, ' ', occurs ")


def test_a_space_that_belongs_to_the_next_word_is_left_out_of_a_search(run, search, tmp_path):
    texts = ["return width", "on 5 May and on 6 May"]
    model = smollm2.default_model()
    Datastore.build(texts, AutoTokenizer.from_pretrained(model), tmp_path / "s")
    first, *lines = search("return ", tmp_path / "s")
    assert first.startswith("without the space at the end, which this tokenizer puts before")
    assert lines == search("return", tmp_path / "s") and "'return'" in lines[0]
