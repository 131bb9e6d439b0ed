"""`hf-refspec ralm`, `knn build` and `store recycle`: what they print, and what they refuse."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

import hf_refspec as rs
from hf_refspec.apps.shared import comparison
from hf_refspec.ralm.knn_datastore import KnnDatastore
from tests.helpers.texts import some_texts

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
def ask(folder, printed):
    return partial(printed, "ralm", "--model", folder)


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
    assert re.search(r"^\d+ passages of at most 256 tokens from texts\n", printed)
    order = [printed.index(f"── {each}\n") for each in questions]
    assert order == sorted(order)
    first = printed[order[0] : order[1]]
    passages = re.findall(r"^  passage \d+, .*: steps ([\d, ]+) of 4\n    (\S.*)", first, re.M)
    steps = [int(step) for steps, _ in passages for step in steps.split(", ")]
    assert sorted(steps) == [1, 2, 3, 4]  # 14 tokens, 4 a step
    assert re.search(r"  retrieval   4 steps, .* right \(", first)
    assert "speculated against baseline is undecided: " in printed
    assert printed.count("3 of 3") == 2
    assert "\x1b" not in printed  # not a terminal


def test_what_a_passage_says_is_not_obeyed(texts, ask):
    printed = ask(texts, "--pattern", "esc*", "--question", QUESTION, *SHORT)
    assert printed.startswith("1 passage of") and "stone light music \\x1b[31mred" in printed


def test_an_answer_that_speculation_changes_is_said_and_exits_with_1(texts, ask, monkeypatch):
    def careless(model, inputs, **options):
        call = decode(model, inputs, **options)
        call.ids[-1] += "speculation" not in options
        return call

    decode = comparison.decode
    monkeypatch.setattr(comparison, "decode", careless)
    printed = ask(texts, "--question", QUESTION, *SHORT, "--compare", status=1)
    assert "IDS DIFFER: speculated" in printed


def test_a_column_of_a_dataset_is_searched(ask, rows):
    printed = ask("--dataset", rows, "--column", "body", "--question", QUESTION, *SHORT)
    assert re.search(r"\d, document [0-8], line \d+: step", printed)


def test_a_knn_datastore_is_built_from_files_and_from_a_column(
    printed, folder, texts, rows, tmp_path
):
    for number, source in enumerate([[texts], ["--dataset", rows, "--column", "body"]]):
        out = tmp_path / f"store{number}"
        text = printed("knn", "build", *source, "--model", folder, "--out", out)
        entries = len(KnnDatastore(out))
        assert entries > 9 and f"  entries     {entries:,} of 32 numbers\n" in text


@pytest.mark.parametrize("dtype", [[], ["--dtype", "bfloat16"]], ids=["as stored", "bfloat16"])
def test_it_writes_a_table_and_says_what_is_in_it(tmp_path, folder, dtype, tokenizer, printed):
    (tmp_path / "a.txt").write_text("the cat sat on the mat, the cat sat on the hat")
    out = tmp_path / "table"
    options = ["--model", folder, "--out", out, "--license", "MIT", *dtype]
    text = printed("store", "recycle", tmp_path / "a.txt", *options)
    drafter = rs.TokenRecycling.from_pretrained(out, tokenizer)
    assert f"contexts    {len(drafter)} of up to 3 tokens, with 8 next tokens each" in text
    assert "model       bytes, vocabulary 259" in text
