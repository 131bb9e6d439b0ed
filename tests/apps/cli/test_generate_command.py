"""`hf-refspec generate`: where the prompt comes from, what is drafted from, and what is refused."""

from __future__ import annotations

import io
import re
from functools import partial
from pathlib import Path

import pytest
from texts import some_texts

from hf_refspec import Datastore, RetrievalCache
from hf_refspec.apps.cli.main import main
from hf_refspec.apps.shared.prompts import chat_inputs, user

SHORT = ["--max-new-tokens", "12"]


pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture
def generate(folder, capsys):
    """Runs the command, which must succeed; returns what it prints to stdout and stderr."""

    def run(*arguments, model=folder) -> tuple[str, str]:
        capsys.readouterr()
        assert main(["generate", "--model", model, *SHORT, *map(str, arguments)]) == 0
        return capsys.readouterr()

    return run


@pytest.fixture
def refused(refused, folder):
    return partial(refused, "generate", "--model", folder)


def test_only_the_text_goes_to_stdout_and_the_statistics_to_stderr(
    generate, byte_llama, tokenizer, tmp_path
):
    inputs = chat_inputs(tokenizer, [user("the cat sat on")])
    ids = byte_llama.generate(**inputs, max_new_tokens=12)[0, inputs["input_ids"].shape[1] :]
    plain = tokenizer.decode(ids, skip_special_tokens=True)
    reference = tmp_path / "reference.txt"
    reference.write_text(plain, encoding="utf-8")
    drafted, statistics = generate("the cat sat on", "--reference", reference)
    assert drafted == plain + "\n"
    assert re.fullmatch(r"12 tokens in \d+ passes, MAT \d.*\n", statistics)


def test_a_device_map_changes_no_token(generate, refused):
    text, _ = generate("the cat sat on")
    assert generate("the cat sat on", "--device-map", "auto", "--dtype", "float32")[0] == text
    assert "'balanced', " in refused("the cat sat on", "--device-map", "atuo")


def test_the_prompt_is_an_argument_a_file_or_stdin(generate, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_text("the cat sat on", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat sat on"))
    outputs = [generate("the cat sat on"), generate("--prompt-file", file), generate()]
    assert len({output for output, _ in outputs}) == 1


def test_plain_text_is_put_into_the_chat_template_where_there_is_one(generate, templateless):
    chat, _ = generate("the cat")
    assert generate("user: the cat\nassistant: ", model=templateless)[0] == chat
    assert generate("the cat", model=templateless)[0] != chat
    templated = "<s>user: the cat\nassistant: "  # has a special token: it is in a template already
    assert generate(templated)[0] == generate(templated, model=templateless)[0]


def test_context_is_read_by_the_model_and_a_reference_is_not(generate, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a dog\n", encoding="utf-8")
    assert generate("the cat", "--context", text)[0] == generate("a dog\n\nthe cat")[0]
    assert generate("the cat", "--reference", text)[0] == generate("the cat")[0]


def test_sampling_depends_on_the_seed_alone(generate):
    sampling = ["--do-sample", "--temperature", "0.9"]
    texts = [generate("the cat", *sampling, "--seed", seed)[0] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_it_drafts_from_a_datastore_and_from_earlier_calls(generate, tmp_path, tokenizer):
    Datastore.build(some_texts(4), tokenizer, tmp_path / "store", progress=False)
    options = ["--datastore", tmp_path / "store", "--cache", tmp_path / "cache"]
    first, _ = generate("the cat", *options)
    second, _ = generate("the cat", *options)
    assert first == second == generate("the cat")[0]
    assert len(RetrievalCache(tokenizer=tokenizer, path=tmp_path / "cache")) == 2


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--prompt-file", "missing.txt"], ["--prompt-file missing.txt"]),
        (
            ["x", "--reference", "missing.md"],
            ["--reference missing.md", "up to the next option"],
        ),
        (["x", "--context", "missing.md"], ["--context missing.md"]),
        (["x", "--context", "picture.png"], ["--context picture.png is not a text"]),
        (["x", "--context", "."], ["--context . cannot be read"]),
        (["x", "--reference", "empty.md"], ["--reference empty.md is empty"]),
        (["x", "--cache", "empty.md"], ["--cache empty.md is a file"]),
        (["x", "--model", "missing/model/folder"], ["missing/model/folder"]),
        (["x", "--prompt-file", "y.txt"], ["'x'", "y.txt", "not both"]),
        ([" "], ["the prompt is empty"]),
        (["x", "--temperature", "0.5"], ["--temperature 0.5", "--do-sample"]),
        (["x", "--seed", "1"], ["--seed 1", "--do-sample"]),
        (["x", "--do-sample", "--temperature", "0"], ["--temperature 0.0", "above 0"]),
        (["x", "--do-sample", "--temperature", "nan"], ["--temperature nan", "above 0"]),
        (["x", "--do-sample", "--seed", str(2**70)], [f"--seed {2**70}", "64 bits"]),
        (["\udcff"], ["the prompt is not a text in UTF-8"]),
        (["x" * 3000], ["the prompt has 3,018 tokens", "2,048", "shorten it"]),
    ],
)
def test_bad_input_is_named_with_the_way_out(refused, arguments, messages, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("picture.png").write_bytes(b"\x89PNG\xff")
    Path("empty.md").write_text(" \n")
    message = refused(*arguments)
    assert all(part in message for part in messages)


def test_bytes_that_are_no_text_are_no_prompt(refused, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x00"), "utf-8"))
    assert "the prompt is not a text in UTF-8" in refused()


def test_an_answer_ends_where_the_context_of_the_model_does(generate):
    prompt = "x" * (2048 - len("user: \nassistant: ") - 5)
    _, statistics = generate(prompt)
    assert statistics.startswith("5 tokens in ")
