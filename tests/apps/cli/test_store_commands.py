"""`hf-refspec store build`, `extend`, `retokenize`, `compact`, `push`, `info`, `search`: what they
make and print."""

from __future__ import annotations

import ast
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hf_refspec import smollm2
from hf_refspec.apps.cli import arguments
from hf_refspec.retrieval.knowledge_base import KnowledgeBase
from hf_refspec.store.datastore import Datastore
from tests.helpers.byte_model import word_tokenizer
from tests.helpers.hub_server import TOKEN

TEXTS = {
    "a.py": "def area(width, height):\n    return width * height\n",
    "b.py": "def area(radius):\n    return radius * radius\n",
    "c.txt": "the cat sat on the mat, the cat sat on the hat\n",
}


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizers") / "words"
    word_tokenizer(["<unk>", "the", "cat"]).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory, corpus, tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "store"
    Datastore.build(corpus, tokenizer, folder, num_proc=1, progress=False)
    return folder


@pytest.fixture(scope="module")
def compact_store(tmp_path_factory, store) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "compact"
    Datastore(store).compact(folder, progress=False)
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


def test_builds_from_a_preset_with_its_name_and_licence(built, corpus, monkeypatch):
    monkeypatch.setattr(arguments, "python_stdlib", lambda: [corpus / "b.py"])
    texts, text = built("--preset", "python-stdlib")
    assert texts == [TEXTS["b.py"]]
    assert "corpus      Python standard library\n" in text and "licence     PSF-2.0\n" in text


@pytest.mark.parametrize("kind", ["datastore", "knowledge base"])
def test_the_name_licence_and_description_of_the_card_can_change_later(
    kind, built, run, corpus, tmp_path, tokenizer, folder
):
    about = ["--name", "Areas", "--description", "Two functions | and a cat."]
    _, text = built(corpus, *about)
    assert "corpus      Areas\n" in text and "about       Two functions | and a cat.\n" in text
    store = tmp_path / "store"
    if kind == "knowledge base":
        store = KnowledgeBase.build(TEXTS.values(), tokenizer, None, tmp_path / "base").path
        run("card", store, "owner/areas", *about)
    assert "license: mit" not in run("card", store, "owner/areas")
    card = run("card", store, "owner/areas", "--license", "MIT")
    assert card == run("card", store, "owner/areas")
    assert re.search(r"^\| (Corpus|Documents) \| Areas \|$", card, re.M)
    assert "license: mit\n" in card and "| Description | Two functions \\| and a cat. |" in card
    if kind == "datastore":
        run("retokenize", store, "--tokenizer", folder, "--out", tmp_path / "other")
        assert "about       Two functions" in run("info", tmp_path / "other")


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_builds_from_a_dataset_of_this_machine(built, rows, streaming):
    options = ["--column", "title", "--deduplicate", *streaming]
    assert built("--dataset", rows, *options)[0] == [*"abcdefghi"]


@pytest.mark.parametrize("option", [[], ["--dataset"]])
def test_a_file_of_rows_is_read_and_never_asked_of_the_hub(built, option, tmp_path, monkeypatch):
    monkeypatch.setattr(arguments, "ask_hub", None)
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text('{"text": "one"}\n{"content": "two", "n": 1}\n')
    name = "./data.jsonl" if option else "data.jsonl"
    texts, text = built(*option, name)
    assert texts == ["one", "two"] and "corpus      data.jsonl\n" in text


# --- extend, merge, compact, info


def test_merges_all_shards_and_compacts_into_the_store_itself(built, run, corpus, tmp_path):
    built(corpus)
    store = tmp_path / "store"
    Datastore(store).add([[7]], progress=False)
    assert "in 2 shards\n" in run("info", store)
    assert "in 1 shard\n" in run("merge", store)
    text = run("compact", store)
    sizes = Datastore(store, form="full").config.ngrams.ngrams
    assert f": {sum(sizes)} n-grams of up to {len(sizes)} tokens, " in text
    assert "full        " in text and "documents   4\n" in text


def test_the_tokenizer_is_found_again_where_its_folder_is_gone(
    built, run, corpus, tokenizer, other_tokenizer, tmp_path
):
    folder, store, other = (tmp_path / name for name in ("tokenizer", "store", "other"))
    tokenizer.save_pretrained(folder)
    built(corpus / "a.py", tokenizer_options=("--tokenizer", folder))
    shutil.rmtree(folder)
    run("extend", store, corpus / "c.txt")
    assert texts_of(store, tokenizer) == [TEXTS["a.py"], TEXTS["c.txt"]]
    run("search", store, "the cat")
    assert "tokenizer   tokenizer, fingerprint" in run("info", store)
    text = run("retokenize", store, "--tokenizer", other_tokenizer, "--out", other)
    assert "corpus      a.py, c.txt" in text
    assert Datastore(other).documents == 2 and Datastore(other).config.tokenizer == "words"


def test_compacts_into_a_folder_of_its_own(run, tmp_path, store):
    out = tmp_path / "compact"
    text = run("compact", store, "--out", out, "--max-bytes", 5000)
    assert text.startswith(f"{out}\n") and "full        " not in text
    assert 0 < Datastore(out).config.ngrams.file.size <= 5000
    assert Datastore(store).config.ngrams is None


@pytest.mark.parametrize("kind", ["datastore", "knowledge base"])
def test_push_publishes_what_push_to_hub_does(kind, run, hub, store, tokenizer, tmp_path, refused):
    folder, opened = store, Datastore(store)
    if kind == "knowledge base":
        opened = KnowledgeBase.build(TEXTS.values(), tokenizer, None, folder := tmp_path / "base")
    opened.push_to_hub("owner/pushed", token=TOKEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", TOKEN)
        place = run("push", folder, "owner/again", "--private").strip()
        assert "is not a datastore" in refused("store", "push", tmp_path, "owner/none")
    assert place == f"{hub.endpoint}/datasets/owner/again"
    pushed, again = (hub.repos[f"owner/{name}"] for name in ("pushed", "again"))
    assert again.private and not pushed.private
    assert set(pushed.files()) == set(again.files())
    assert pushed.files()["config.json"] == again.files()["config.json"]
    out = tmp_path / "written"
    said = run("push", folder, "owner/pushed", "--out", out)
    names = sorted({*pushed.files()} - {".gitattributes"})
    assert said == (
        f"{out}: {', '.join(names)}\npush it: hf upload owner/pushed {out} --repo-type dataset\n"
    )
    assert all((out / name).read_bytes() == pushed.files()[name] for name in names)


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


def test_info_describes_and_verifies_a_knowledge_base(run, tmp_path, tokenizer, refused):
    base = KnowledgeBase.build(TEXTS.values(), tokenizer, None, tmp_path / "base", progress=False)
    assert re.search(r"passages +3, \d+ tokens, for BM25\n", run("info", base.path))
    assert "all files are as they were written" in run("info", base.path, "--verify")
    file = base.path / "passages.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert file.name in refused("store", "info", base.path, "--verify")


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
    assert found == "not even the last token occurs" and tree.startswith("the draft tree, 0 nodes")
    assert search("Q ")[0].startswith("the last token, ' ', occurs ")


def test_a_space_that_belongs_to_the_next_word_is_left_out_of_a_search(run, search, tmp_path):
    texts = ["return width", "on 5 May and on 6 May"]
    model = smollm2.default_model()
    Datastore.build(texts, AutoTokenizer.from_pretrained(model), tmp_path / "s", progress=False)
    first, *lines = search("return ", tmp_path / "s")
    assert first.startswith("without the space at the end, which this tokenizer puts before")
    assert lines == search("return", tmp_path / "s") and "'return'" in lines[0]
