"""`hf-refspec ralm`: what it prints, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import datasets
import pytest
from texts import some_texts

from hf_refspec.apps.cli.main import main
from hf_refspec.apps.shared import comparison

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


def test_a_dataset_of_this_machine(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = {"title": ["x", "y"], "body": some_texts(2)}
    folder = tmp_path / "rows"
    folder.mkdir()
    datasets.Dataset.from_dict(rows).to_json(folder / "train.json")
    printed = ask("--dataset", folder, "--column", "body", "--question", QUESTION, *SHORT)
    assert re.search(r"\d, document [01], line \d+: step", printed)


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
