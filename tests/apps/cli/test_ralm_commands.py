"""`hf-refspec ralm`, `knn build` and `store recycle`: what they print, and what they refuse."""

from __future__ import annotations

import re
from pathlib import Path

import datasets
import pytest
from texts import some_texts

import hf_refspec as rs
from hf_refspec.apps.cli.main import main
from hf_refspec.apps.shared import comparison
from hf_refspec.ralm.knn_datastore import KnnDatastore

QUESTION = "stone light music "
SHORT = ["--max-new-tokens", 14]

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ralm") / "texts"
    (folder / "more").mkdir(parents=True)
    (folder / "a.md").write_text("\n".join(some_texts(12)), encoding="utf-8")
    (folder / "more" / "b.txt").write_text("\n".join(some_texts(12, seed=1)), encoding="utf-8")
    (folder / "escape.txt").write_text("stone light music \x1b[31mred\x07", encoding="utf-8")
    return folder


@pytest.fixture
def ask(folder, capsys):
    """Runs the command; returns what it prints."""

    def asked(*arguments, status: int = 0) -> str:
        capsys.readouterr()
        assert main(["ralm", "--model", folder, *map(str, arguments)]) == status
        return capsys.readouterr().out

    return asked


def test_a_passage_is_named_with_its_file_and_line(texts, ask, monkeypatch):
    monkeypatch.chdir(texts.parent)
    printed = ask("texts", "--question", QUESTION, *SHORT)
    found = re.findall(r"(\d+), (texts/\S+), line (\d+): steps? ", printed)
    assert found
    for _, name, line in found:
        assert int(line) <= len(Path(name).read_text(encoding="utf-8").splitlines())


def test_compare_sums_up_the_speed_of_both_over_all_questions(texts, ask):
    questions = [QUESTION, "harbour story", "market silver"]
    given = [argument for question in questions for argument in ("--question", question)]
    printed = ask(texts, *given, "--compare", *SHORT)
    assert re.search(r"^\d+ passages of at most 256 tokens out of texts\n", printed)
    order = [printed.index(f"── {each}\n") for each in questions]
    assert order == sorted(order)
    first = printed[order[0] : order[1]]
    passages = re.findall(r"^  passage \d+, .*: steps ([\d, ]+) of 4\n    (\S.*)", first, re.M)
    steps = [int(step) for steps, _ in passages for step in steps.split(", ")]
    assert sorted(steps) == [1, 2, 3, 4]  # 14 tokens, 4 a step
    assert re.search(r"  retrieval   4 steps, .* right \(", first)
    assert "speculated against baseline too few prompts to say: " in printed
    assert printed.count("3 of 3") == 2
    assert "\x1b" not in printed  # not a terminal


def test_what_a_passage_says_is_not_obeyed(texts, ask):
    printed = ask(texts, "--pattern", "esc*", "--question", QUESTION, *SHORT)
    assert printed.startswith("1 passages") and "stone light music \\x1b[31mred" in printed


def test_an_answer_that_speculation_changes_is_said_and_exits_with_1(texts, ask, monkeypatch):
    def careless(model, inputs, **options):
        call = decode(model, inputs, **options)
        call.ids[-1] += "speculation" not in options
        return call

    decode = comparison.decode
    monkeypatch.setattr(comparison, "decode", careless)
    printed = ask(texts, "--question", QUESTION, *SHORT, "--compare", status=1)
    assert "IDS DIFFER: speculated" in printed


@pytest.fixture
def rows(tmp_path, monkeypatch) -> Path:
    """A dataset of this machine."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    texts = {"title": [*"abcdefghi"], "body": some_texts(9)}
    datasets.Dataset.from_dict(texts).to_json(tmp_path / "rows" / "train.json")
    return tmp_path / "rows"


def test_a_column_of_a_dataset_is_searched(ask, rows):
    printed = ask("--dataset", rows, "--column", "body", "--question", QUESTION, *SHORT)
    assert re.search(r"\d, document [0-8], line \d+: step", printed)


REFUSED = {
    "no source": ([], "give one of: files or folders, --dataset NAME"),
    "two sources": (["{texts}", "--dataset", "{texts}"], "give one of: files or folders"),
    "no such files": (["{texts}", "--pattern", "*.rs"], "has no file that matches '*.rs'"),
    "an absolute pattern": (["{texts}", "--pattern", "/x"], "pattern '/x' cannot be used"),
    "a column of files": (["{texts}/a.md", "--column", "text"], "--column 'text'"),
    "a question that is too long": (
        ["{texts}/a.md", "--max-new-tokens", "5000"],
        "no room for a passage",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_exits_with_2_and_one_line(arguments, message, folder, texts, refused):
    given = [argument.format(texts=texts) for argument in arguments]
    assert message in refused("ralm", "--model", folder, *given, "--question", "tree river")


@pytest.fixture(scope="module")
def places(tmp_path_factory, folder):
    """A model and texts."""
    root = tmp_path_factory.mktemp("knn")
    (root / "model").symlink_to(folder)
    texts = root / "texts"
    texts.mkdir()
    for number, text in enumerate(some_texts(9)):
        (texts / f"{number}.txt").write_text(text)
    (root / "empty").mkdir()
    return root


def run_knn(*arguments) -> int:
    return main(["knn", *map(str, arguments)])


def test_build_prints_what_it_has_built(places, tmp_path, capsys):
    out = tmp_path / "store"
    assert run_knn("build", places / "texts", "--model", places / "model", "--out", out) == 0
    assert f"  entries     {len(KnnDatastore(out)):,} of 32 numbers\n" in capsys.readouterr().out


def test_a_column_of_a_dataset_is_built_from(places, tmp_path, rows):
    options = ["--dataset", rows, "--column", "body", "--model", places / "model"]
    assert run_knn("build", *options, "--out", tmp_path / "store") == 0
    assert len(KnnDatastore(tmp_path / "store")) > 9


KNN_REFUSED = {
    "a folder without texts": (["{empty}", "--out", "{new}"], "has no file that matches"),
    "a folder that exists": (["{texts}", "--out", "{empty}"], "--out {empty} exists"),
    "a column of files": (
        ["{texts}", "--column", "x", "--out", "{new}"],
        "--column 'x' is for datasets",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), KNN_REFUSED.values(), ids=KNN_REFUSED)
def test_bad_input_of_knn_exits_with_2_and_one_line(arguments, message, places, offline, refused):
    def filled(text: str) -> str:
        return re.sub(r"\{(.+?)\}", lambda match: str(places / match[1]), text)

    given = [filled(argument) for argument in arguments]
    assert filled(message) in refused("knn", "build", *given, "--model", str(places / "model"))
    assert not (places / "new").exists()


@pytest.mark.parametrize("dtype", [[], ["--dtype", "bfloat16"]], ids=["as stored", "bfloat16"])
def test_it_writes_a_table_and_says_what_is_in_it(tmp_path, folder, dtype, tokenizer, capsys):
    (tmp_path / "a.txt").write_text("the cat sat on the mat, the cat sat on the hat")
    out = tmp_path / "table"
    arguments = [str(tmp_path / "a.txt"), "--model", folder, "--out", str(out)]
    assert main(["store", "recycle", *arguments, "--license", "MIT", *dtype]) == 0
    drafter = rs.TokenRecycling.from_pretrained(out, tokenizer)
    printed = capsys.readouterr().out
    assert f"contexts    {len(drafter)} of up to 3 tokens, with 8 next tokens each" in printed
    assert "model       bytes, vocabulary 259" in printed


def test_it_refuses_what_it_cannot_do_before_the_model_is_loaded(tmp_path, refused):
    arguments = ["store", "recycle", "--model", "no/model", "--out"]
    new, missing = tmp_path / "table", tmp_path / "missing"
    assert "give one of: files or folders, --dataset NAME" in refused(*arguments, new)
    assert "exists; choose another path" in refused(*arguments, tmp_path, "a.txt")
    assert f"{missing} is neither a file nor a folder" in refused(*arguments, new, missing)
