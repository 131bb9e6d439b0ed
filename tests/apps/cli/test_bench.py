"""`hf-refspec bench`, `check` and `store evaluate`: what they measure, print and refuse."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from hf_refspec.apps.cli.main import main
from hf_refspec.apps.shared import comparison
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.datastore_config import StoreConfig
from hf_refspec.store.files import only_writer
from hf_refspec.store.hub import card
from tests.helpers.hub_server import TOKEN
from tests.helpers.pass_times import passes_take

ASKED = ["tell me of the cat on the mat", "the cat sat on the mat, the cat sat on the"]


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"turns": [text, "again"], "reference": [text, text[:9]]} for text in ASKED]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def bench(folder, printed):
    """What the command prints, in one line."""
    command = partial(printed, "bench", "--model", folder)
    return lambda *arguments, **status: " ".join(command(*arguments, **status).split())


def test_all_turns_are_answered_by_all_methods_and_each_has_a_verdict(
    bench, prompts, tmp_path, tokenizer
):
    Datastore.build(ASKED, tokenizer, tmp_path / "store")
    drafters = ["auto", f"ReferenceCopy | DatastoreDrafts={tmp_path / 'store'}"]
    options = ["--drafters", *drafters, "--max-draft-tokens", "auto", 8, "--max-new-tokens", 12]
    printed = bench("--prompts", prompts, *options)
    assert "in float32 on cpu, 2 chats, 4 prompts; a verdict needs at least 5" in printed
    assert printed.count(" 4 of 4") == 2 + 2 * 2  # two turns of two chats
    for name in ("transformers' prompt look-up", "auto", "auto, 8 draft tokens"):
        verdict = rf"{name} against plain is undecided: \d\.\d\dx over 4 prompts, and .* needs 5; "
        assert re.search(verdict + r"\d\.\d\d tokens a pass, which takes \d+\.\d\d times", printed)
    assert " 1 of 1" in bench("--prompts", prompts, "--limit", 1, "--turns", 1)


def test_models_that_draft_are_measured_by_name(printed, prompts, folder, mtp_folder):
    named = ["auto | use_mtp", f"auto | assistant_model={folder}"]
    options = ["--turns", 1, "--max-new-tokens", 8, "--drafters", *named]
    table = printed("bench", "--model", mtp_folder, "--prompts", prompts, *options)
    assert table.count("2 of 2") == 3


def test_each_call_is_reported_with_the_time_that_is_left(prompts, folder, capsys):
    options = ["--prompts", prompts, "--turns", 1, "--max-new-tokens", 4]
    assert main(["bench", "--model", folder, *map(str, options)]) == 0
    told = re.findall(r"(\d)/(\d) \[\d\d:\d\d<(\d\d:\d\d|\?)", capsys.readouterr().err)
    numbers = [int(number) for number, total, _ in told if total == "6"]
    assert sorted({*numbers}) == [0, 1, 2, 3, 4, 5, 6] and numbers == sorted(numbers)


def test_recorded_chats_are_replayed_without_a_model(printed, prompts, folder, monkeypatch):
    monkeypatch.setattr("hf_refspec.apps.cli.bench.load_model", None)
    budgets = ["--max-draft-tokens", 2, 64]
    options = ["--replay", prompts, "--tokenizer", folder, *budgets]
    said = " ".join(printed("bench", *options).split())
    assert said.startswith("4 recorded answers in the tokens of bytes")
    assert said.endswith("--model measures how long they take.")
    copied, cached = re.findall(r"([A-Z][\w |]+) (\d+\.\d\d) (\d+\.\d\d)", said)
    assert (copied[0], cached[0]) == ("ReferenceCopy", "ReferenceCopy | SessionDrafts")
    assert 1 < float(copied[1]) <= 3 < float(copied[2])


def test_prompts_without_a_recorded_answer_are_counted(printed, folder, tmp_path):
    rows = [{"question": "cat", "answer": answer} for answer in ("the mat", "", None, [1])]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = ["--replay", path, "--tokenizer", folder, "--max-draft-tokens", 2]
    lines = printed("bench", *options).splitlines()
    assert lines[0] == (
        "1 recorded answer in the tokens of bytes; skipped 3 prompts without a recorded answer"
    )


def test_a_drafter_that_is_none_is_refused_before_anything_is_replayed(prompts, folder, capsys):
    options = ["--replay", prompts, "--tokenizer", folder, "--drafters", "ReferenceCopy", "LLAM"]
    assert main(["bench", *map(str, options)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "(did you mean 'LLMA'?)" in said.err


def test_a_replay_with_a_model_lays_the_cost_of_its_passes_beside_the_mat(bench, prompts):
    printed = bench("--replay", prompts, "--drafters", "ReferenceCopy", "--max-draft-tokens", 8)
    expected = r"8 draft tokens: a pass has (\d\.\d) tokens and costs \d+\.\d\d plain steps, "
    tokens, mat = re.search(expected + r"MAT (\S+): expect \d+\.\dx$", printed).groups()
    assert 1 < float(tokens) <= 9 and float(mat) > 1


def test_prompts_that_are_too_long_are_left_out(bench, folder, tmp_path, byte_llama, capsys):
    long = "x" * byte_llama.config.max_position_embeddings
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": long}) + "\n" + json.dumps({"text": "cat"}) + "\n")
    assert " 1 of 1" in bench("--prompts", path, "--max-new-tokens", 4)
    path.write_text(json.dumps({"text": long}) + "\n")
    assert main(["bench", "--model", folder, "--prompts", str(path)]) == 2
    assert f"{path}, row 1: a prompt has" in capsys.readouterr().err


def test_other_ids_are_said_and_exit_with_1(bench, prompts, monkeypatch):
    def other(model, inputs, **options):
        call = decode(model, inputs, **options)
        if "prompt_lookup_num_tokens" in options:
            call.ids[-1] += 1
        return call

    decode = comparison.decode
    monkeypatch.setattr(comparison, "decode", other)
    options = ["--prompts", prompts, "--turns", 1, "--max-new-tokens", 4]
    assert "IDS DIFFER: transformers' prompt look-up" in bench(*options, status=1)
    said = bench(*options, "--dtype", "bfloat16")
    assert "in 16 bits near-ties between tokens flip" in said and "DIFFER" not in said


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
    return Datastore.build(list(TEXTS.values())[:2], tokenizer, folder)


@pytest.fixture
def refusing(tmp_path, folder) -> Path:
    """The folder of a model whose chat template refuses the role system."""
    path = shutil.copytree(folder, tmp_path / "refusing")
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template = path / "chat_template.jinja"
    template.write_text(refusal + template.read_text())
    return path


MEASURING = {
    "bench": "bench --prompts {rows} --model {model} --max-new-tokens 4",
    "replay": "bench --replay {rows} --tokenizer {model}",
    "evaluate": "store evaluate {store} --prompts {rows} --model {model} --max-new-tokens 4",
}


@pytest.mark.parametrize("command", MEASURING.values(), ids=MEASURING)
def test_chats_that_the_template_refuses_are_skipped_counted_and_named(
    command, refusing, store, tmp_path, capsys, caplog
):
    ask, answer = {"role": "user", "content": ASKED[0]}, {"role": "assistant", "content": ASKED[1]}
    rows = [[{"role": "system", "content": "Be brief."}, ask, answer], [ask, answer]]
    path = tmp_path / "rows.jsonl"
    words = command.format(rows=path, model=refusing, store=store.path).split()
    for kept, status in ((rows, 0), (rows[:1], 2)):
        path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in kept))
        caplog.clear()
        assert main([*words, "--limit", "1"]) == status
        named, counted = caplog.messages
        assert f"{path}, row 1: the chat template refuses" in named and "no system" in named
        assert counted == "skipped 1 chat that the chat template refuses"
    assert f"{path}, row 1: the chat template refuses this chat and all" in capsys.readouterr().err


@pytest.fixture
def evaluate(offline, folder, printed):
    command = partial(printed, "store", "evaluate", "--model", folder, "--max-new-tokens", 12)
    return lambda *arguments: " ".join(command(*arguments).split())


def test_texts_that_are_in_the_store_are_told_from_others(evaluate, store, texts):
    printed = evaluate(store.path, texts)
    assert "to answer 5 prompts plainly" in printed and "the full form of " in printed
    for name in ("plain", "default drafter", "with the datastore"):
        assert re.search(rf"{name} \d+\.\d \d+\.\d \d+\.\d\dx \d\.\d\d 5 of 5", printed)
    verdict = "with the datastore against default drafter "
    assert re.search(verdict + "(pays|does not pay|is undecided): ", printed)
    assert "the datastore itself holds 2 of 5 prompts: it gains less" in printed


def test_rows_of_a_file_are_texts_of_their_own(evaluate, store, tmp_path):
    rows = "".join(json.dumps({"body": text}) + "\n" for text in ASKED)
    (tmp_path / "rows.jsonl").write_text(rows)
    printed = evaluate(store.path, tmp_path / "rows.jsonl", "--column", "body")
    assert "to answer 2 prompts plainly" in printed


def test_prompts_of_a_file_and_the_compact_form(evaluate, store, tmp_path):
    compact = store.compact(tmp_path / "compact")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n\n{"turns": ["the mat"]}\n')
    printed = evaluate(compact.path, "--prompts", tmp_path / "prompts.jsonl")
    assert "the compact form of" in printed and "is undecided" in printed
    assert "the datastore itself" not in printed
    (measured,) = StoreConfig.read(compact.path).measured
    assert measured["speed-up with it"] == "not enough to say"
    assert measured["prompts"].startswith("2 of prompts.jsonl;")


def test_what_was_measured_is_on_the_card_until_the_datastore_changes(
    evaluate, store, texts, tmp_path, printed, hub
):
    store.save_pretrained(tmp_path / "mine")
    mine = Datastore(tmp_path / "mine")
    with only_writer(mine.path):
        assert "not written: " in evaluate(mine.path, texts)
    figures = r"64 draft tokens: MAT (\S+), without the datastore (\S+) written into \S+mine"
    with passes_take(lambda tokens: 1.0):  # drafts pay on any machine
        mat, without = re.search(figures, evaluate(mine.path, texts)).groups()
    assert float(mat) >= float(without) > 1
    asked = f"5 of {texts.name} (2 in it); 12 new tokens"
    row = f"\n| full | {asked} | bytes, float32 | 64 | {without} | {mat} | "
    speed_up = StoreConfig.read(mine.path).measured[0]["speed-up with it"]
    assert re.fullmatch(r"\d+\.\d\dx \(\d+\.\d\dx to \d+\.\d\dx\)", speed_up)
    assert f"{row}{speed_up} |" in card(StoreConfig.read(mine.path), "owner/store")
    mine.verify()
    mine.push_to_hub("owner/store", token=TOKEN)
    assert row in hub.repos["owner/store"].files()["README.md"].decode()
    fetched = Datastore.from_pretrained("owner/store")
    assert f"MAT with it {mat}," in printed("store", "info", "owner/store")
    assert "is in the Hub's cache" in evaluate("owner/store", texts)
    assert StoreConfig.read(fetched.path) == StoreConfig.read(mine.path)
    assert row in card(StoreConfig.read(mine.path), "owner/store")
    mine.compact()
    assert row in card(StoreConfig.read(mine.path), "owner/store")
    mine.add(["another text"])
    assert "Not measured." in card(StoreConfig.read(mine.path), "owner/store")


def test_passes_are_timed_at_each_context(printed, folder):
    said = printed("check", "--model", folder, "--context", 16, 40)
    assert "ms at 16 tokens\n" in said and "ms at 40 tokens\n" in said
