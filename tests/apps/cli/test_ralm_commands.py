"""`hf-refspec ralm`: what it prints, what it keeps, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import datasets
import pytest
from encoders import letters, load_letters
from texts import some_texts
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_refspec.apps.cli.main import main
from hf_refspec.apps.shared import comparison
from hf_refspec.retrieval.knowledge_base import KnowledgeBase

QUESTION = "stone light music "
SHORT = ["--max-new-tokens", 14]


@pytest.fixture(scope="module")
def places(tmp_path_factory, folder, tokenizer) -> dict[str, str]:
    """Models, texts and knowledge bases, and where `encoders` puts more, by name."""
    root = tmp_path_factory.mktemp("ralm")
    (root / "model").symlink_to(folder)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "tree": 1, "river": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    other = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    texts = root / "texts"
    (texts / "more").mkdir(parents=True)
    (texts / "a.md").write_text("\n".join(some_texts(12)), encoding="utf-8")
    (texts / "more" / "b.txt").write_text("\n".join(some_texts(12, seed=1)), encoding="utf-8")
    (texts / "escape.txt").write_text("stone light music \x1b[31mred\x07", encoding="utf-8")
    (texts / "picture.png").write_bytes(b"\x89PNG\0\0")
    (texts / "empty.md").write_text(" \n", encoding="utf-8")
    (texts / ".hidden.md").write_text("hidden", encoding="utf-8")
    (root / "blank").mkdir()
    (root / "blank" / "empty.md").write_text(" \n", encoding="utf-8")
    KnowledgeBase.build(some_texts(20), tokenizer, None, root / "base", progress=False)
    KnowledgeBase.build(some_texts(20), other, None, root / "other", progress=False)
    made = {path.name: str(path) for path in root.iterdir()}
    KnowledgeBase.build(some_texts(20), tokenizer, letters(8), root / "dense", progress=False)
    made["dense"] = str(root / "dense")
    return {**made, "encoder": "letters-8", "wide": "letters-16", "missing": str(root / "missing")}


@pytest.fixture(autouse=True)
def encoders(offline, monkeypatch):
    monkeypatch.setattr("hf_refspec.apps.cli.ralm.load_encoder", load_letters)


@pytest.fixture
def ask(places, capsys):
    """Runs the command, which must succeed; returns what it prints."""

    def asked(*arguments, model="model") -> str:
        capsys.readouterr()
        assert run("--model", places[model], *arguments) == 0
        return capsys.readouterr().out

    return asked


def run(*arguments) -> int:
    return main(["ralm", *map(str, arguments)])


# --- what it prints


def test_a_passage_is_named_with_its_file_and_line(places, ask, monkeypatch):
    monkeypatch.chdir(Path(places["texts"]).parent)
    printed = ask("texts", "--question", QUESTION, *SHORT)
    found = re.findall(r"(\d+), (texts/\S+), line (\d+): steps? ", printed)
    assert found
    for _, name, line in found:
        assert int(line) <= len(Path(name).read_text(encoding="utf-8").splitlines())


def test_compare_shows_the_speed_of_both(places, ask):
    printed = ask(places["texts"], "--question", QUESTION, "--compare", *SHORT)
    assert re.search(
        r"^\d+ passages of at most 256 tokens out of texts, searched by bm25\n", printed
    )
    assert f"── {QUESTION}\n" in printed
    passages = re.findall(r"^  passage \d+, .*: steps ([\d, ]+) of 4\n    (\S.*)", printed, re.M)
    steps = [int(step) for steps, _ in passages for step in steps.split(", ")]
    assert sorted(steps) == [1, 2, 3, 4]  # 14 tokens, 4 a step
    assert re.search(r"  retrieval   4 steps, .* right \(", printed)
    assert "speculated against baseline too few prompts to say: " in printed
    assert printed.count("1 of 1") == 2
    assert "\x1b" not in printed  # not a terminal
    file = Path(places["texts"]) / "escape.txt"  # what a passage says is not obeyed
    assert "stone light music \\x1b[31mred" in ask(file, "--question", QUESTION, *SHORT)


def test_several_questions_are_summed_up(places, ask):
    questions = [QUESTION, "harbour story", "market silver"]
    given = [argument for question in questions for argument in ("--question", question)]
    printed = ask(places["texts"], *given, "--compare", *SHORT)
    order = [printed.index(f"── {each}\n") for each in questions]
    assert order == sorted(order)
    assert printed.count("3 of 3") == 2


def test_smollm2_is_the_default(places, capsys):
    assert run(places["texts"], "--question", QUESTION, *SHORT) == 0
    assert "  retrieval   " in capsys.readouterr().out


def test_an_answer_that_speculation_changes_is_said_and_exits_with_1(places, capsys, monkeypatch):
    def careless(model, inputs, **options):
        call = decode(model, inputs, **options)
        call.ids[-1] += "speculation" not in options
        return call

    decode = comparison.decode
    monkeypatch.setattr(comparison, "decode", careless)
    options = ["--model", places["model"], places["texts"], "--question", QUESTION, *SHORT]
    assert run(*options, "--compare") == 1
    assert "IDS DIFFER: speculated" in capsys.readouterr().out


# --- knowledge bases and retrievers


def test_a_knowledge_base_is_kept_where_it_is_asked_for_and_opened_again(
    places, ask, tmp_path, tokenizer
):
    path = tmp_path / "kept"
    options = ["--knowledge-base", path, "--question", QUESTION, "--max-new-tokens", 14]
    built = ask(places["texts"], *options)
    opened = ask(*options)
    assert built.partition("  retrieval")[0] == opened.partition("  retrieval")[0]
    base = KnowledgeBase(path, tokenizer)
    assert base.config.source["corpus"] == "texts"


def test_only_texts_that_fit_the_pattern_are_read(places, ask, tmp_path, tokenizer, capsys):
    path = tmp_path / "kept"
    options = ["--question", QUESTION, "--max-new-tokens", 5, "--knowledge-base", path]
    capsys.readouterr()
    assert run("--model", places["model"], places["texts"], "--pattern", "*.*", *options) == 0
    assert "left out 2 files without text" in capsys.readouterr().err
    base = KnowledgeBase(path, tokenizer)
    assert "hidden" not in "".join(base.text(i) for i in range(len(base)))
    only = ask(
        *(places["texts"], "--pattern", "*.md", "--question", QUESTION, "--max-new-tokens", 5)
    )
    passages = int(only.partition(" ")[0])
    assert 0 < passages < len(base)


def test_a_dataset_of_this_machine(places, ask, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = {"title": ["x", "y"], "body": some_texts(2)}
    folder = tmp_path / "rows"
    folder.mkdir()
    datasets.Dataset.from_dict(rows).to_json(folder / "train.json")
    printed = ask("--dataset", folder, "--column", "body", "--question", QUESTION, *SHORT)
    assert "searched by bm25" in printed
    assert re.search(r"\d, document [01], line \d+: step", printed)


@pytest.mark.parametrize("retriever", ["dense", "hnsw"])
def test_embeddings_of_an_encoder(places, ask, retriever):
    options = ["--retriever", retriever, "--encoder", places["encoder"], "--question", QUESTION]
    assert ask(places["texts"], *options, "--compare", *SHORT).count("1 of 1") == 2
    assert f"searched by {retriever}" in ask("--knowledge-base", places["dense"], *options)


# --- bad input

ASKED = ["--question", "tree river"]
REFUSED = {
    "no source": (ASKED, "give one of: files or folders, --dataset NAME"),
    "two sources": (["{texts}", "--dataset", "{texts}", *ASKED], "give one of: files or folders"),
    "a folder with no text": (["{blank}", *ASKED], "there is no text in {blank}"),
    "no such files": (["{texts}", "--pattern", "*.rs", *ASKED], "0 files match --pattern '*.rs'"),
    "an absolute pattern": (["{texts}", "--pattern", "/x", *ASKED], "pattern '/x' cannot be used"),
    "an empty question": (["{texts}", "--question", " "], "--question is empty"),
    "dense without an encoder": (
        ["{texts}", "--retriever", "dense", *ASKED],
        "--retriever dense needs --encoder",
    ),
    "an encoder for BM25": (["{texts}", "--encoder", "{encoder}", *ASKED], "--retriever bm25"),
    "a missing encoder": (
        ["{texts}", "--retriever", "hnsw", "--encoder", "{missing}", *ASKED],
        "--encoder {missing} cannot be loaded",
    ),
    "an encoder of another dimension": (
        ["--knowledge-base", "{dense}", "--retriever", "dense", "--encoder", "{wide}", *ASKED],
        "--encoder does not fit --knowledge-base",
    ),
    "dense without embeddings": (
        ["--knowledge-base", "{base}", "--retriever", "dense", "--encoder", "{encoder}", *ASKED],
        "--knowledge-base {base} was built without an encoder",
    ),
    "the knowledge base of another tokenizer": (
        ["--knowledge-base", "{other}", *ASKED],
        "--knowledge-base cannot be opened: {other} was made for another tokenizer",
    ),
    "a knowledge base that would be built over": (
        ["{texts}", "--knowledge-base", "{base}", *ASKED],
        "--knowledge-base {base} exists",
    ),
    "a column of files": (["{texts}/a.md", "--column", "text", *ASKED], "--column 'text'"),
    "a question that is too long": (
        ["{texts}/a.md", "--max-new-tokens", "5000", *ASKED],
        "no room for a passage",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_exits_with_2_and_one_line(arguments, message, places, refused):
    given = [_filled(argument, places) for argument in arguments]
    assert _filled(message, places) in refused("ralm", "--model", places["model"], *given)


def _filled(text: str, places: dict[str, str]) -> str:
    for name, path in places.items():
        text = text.replace(f"{{{name}}}", path)
    return text
