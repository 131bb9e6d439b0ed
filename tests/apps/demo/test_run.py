"""The demo shows each answer once, drafted, and compares it with the plain one."""

from __future__ import annotations

import io

import pytest

from hf_refspec.apps.demo.run import Demo
from hf_refspec.apps.shared.console import Terminal
from hf_refspec.apps.shared.loading import load
from hf_refspec.apps.shared.scenes import FILE_TOKENS, Scene, built_in_scenes, scenes_of_file


@pytest.fixture(scope="module")
def smollm():
    return load(device_map="cpu")


def show(model, tokenizer, scenes, max_new_tokens, **terminal):
    """Runs a demo; returns it, whether all ids were identical, and what it printed."""
    printed = io.StringIO()
    console = Terminal(file=printed, **terminal)
    demo = Demo(model, tokenizer, max_new_tokens, console)
    return demo, demo.run(scenes), printed.getvalue()


def test_the_default_model_answers_the_same_with_drafts_in_every_scene(smollm):
    model, tokenizer = smollm
    demo, identical, printed = show(model, tokenizer, built_in_scenes(), 10, width=100)
    assert identical and len(demo.answers) == 4
    assert "SmolLM2-135M-Instruct, 135 million parameters, float32" in printed
    assert printed.count("; ids identical") == 4
    assert "4 of 4" in printed
    for answer in demo.answers:
        text = tokenizer.decode(answer.drafted.ids, skip_special_tokens=True)
        assert text.rstrip() in printed
        assert answer.stats.tokens == len(answer.drafted.ids) <= 10


def test_a_document_is_shown_and_colours_are_for_terminals(byte_llama, tokenizer):
    scene = Scene("repeat", "a repetition", ("abcabcabc",), "a text of one line")
    options = {"force_terminal": True, "color_system": "standard", "width": 80}
    for terminal, colored in ((options, True), ({}, False)):
        _, _, printed = show(byte_llama, tokenizer, [scene], 40, **terminal)
        assert "a text of one line" in printed and ("\x1b[32m" in printed) == colored


def test_the_second_turn_is_asked_with_the_first_answer(byte_llama, tokenizer):
    chat = Scene("chat", "a chat", ("one", "two"))
    demo, _, _ = show(byte_llama, tokenizer, [chat], 8)
    alone, _, _ = show(byte_llama, tokenizer, [Scene("alone", "alone", ("two",))], 8)
    assert demo.answers[1].drafted.ids != alone.answers[0].drafted.ids


def test_ids_that_differ_are_told_with_their_position(byte_llama, tokenizer, monkeypatch):
    generate = byte_llama.generate

    def changed(**options):
        ids = generate(**options)
        ids[0, options["input_ids"].shape[1] + 3] ^= "candidate_generator" in options
        return ids

    monkeypatch.setattr(byte_llama, "generate", changed)
    scene = Scene("a", "a", ("b",))
    _, identical, printed = show(byte_llama, tokenizer, [scene], 8, width=200)
    assert not identical and "IDS DIFFER from position 3" in printed


def test_a_file_of_ones_own_is_asked_about_and_edited(tokenizer):
    text = "".join(f"line {i}\n" for i in range(200))
    scenes = scenes_of_file(text, "notes.txt", tokenizer)
    assert ["notes.txt" in scene.title for scene in scenes] == [True, True]
    for scene in scenes:
        assert scene.document is not None and text.startswith(scene.document)
        assert FILE_TOKENS - 10 < len(scene.document) <= FILE_TOKENS  # a token is a byte
        assert scene.document.endswith("\n")
    code = scenes_of_file("def f(): pass\n", "f.py", tokenizer)
    assert code[0].document == "```python\ndef f(): pass\n```"
    assert scenes_of_file("x" * 1000, "one_line.txt", tokenizer)[0].document == "x" * FILE_TOKENS
