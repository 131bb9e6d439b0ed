"""`hf-refspec demo`: each answer is shown once, drafted, and compared with the plain one."""

import io

import pytest
from transformers import LlamaForCausalLM

from hf_refspec import ReferenceCopy
from hf_refspec.apps.cli.demo import DRAFTED, show
from hf_refspec.apps.cli.main import main
from hf_refspec.apps.shared.comparison import UNDRAFTED, Comparison
from hf_refspec.apps.shared.prompts import Scene
from hf_refspec.apps.shared.streams import LiveDrafts, Terminal


def shown(model, tokenizer, scenes, max_new_tokens, **terminal):
    """Shows scenes; returns the drafted calls and what was printed."""
    methods = {UNDRAFTED: {}, DRAFTED: {"candidate_generator": LiveDrafts([ReferenceCopy()])}}
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    comparison, printed = Comparison(model, lambda: methods, **options), io.StringIO()
    for scene in scenes:
        show(scene, comparison, tokenizer, Terminal(file=printed, **terminal))
    return comparison.calls[DRAFTED], printed.getvalue()


@pytest.mark.nightly
def test_the_default_model_answers_the_same_with_drafts_in_every_scene(capsys):
    assert main(["demo", "--device", "cpu", "--max-new-tokens", "10"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "SmolLM2-135M-Instruct, 135 million parameters, float32" in printed
    assert printed.count("; ids identical") == 4 and printed.count("4 of 4") == 2
    assert "document: plain " in printed and "chat 2: plain " in printed


def test_the_second_turn_is_asked_with_the_first_answer(byte_llama, tokenizer):
    chat = Scene("chat", ("one", "two"))
    calls, _ = shown(byte_llama, tokenizer, [chat], 8)
    [alone], _ = shown(byte_llama, tokenizer, [Scene("alone", ("two",))], 8)
    assert calls[1].ids != alone.ids


def test_ids_that_differ_are_told_with_their_position(folder, capsys, monkeypatch):
    generate = LlamaForCausalLM.generate

    def changed(model, **options):
        ids = generate(model, **options)
        ids[0, options["input_ids"].shape[1] + 3] ^= "candidate_generator" in options
        return ids

    monkeypatch.setattr(LlamaForCausalLM, "generate", changed)
    assert main(["demo", "--model", folder, "--max-new-tokens", "8"]) == 1
    assert "IDS DIFFER from position 3" in " ".join(capsys.readouterr().out.split())


def test_a_model_of_ones_own_and_a_picture(folder, tmp_path, capsys):
    picture = tmp_path / "demo.svg"
    arguments = ["--model", folder, "--max-new-tokens", "20", "--svg", str(picture)]
    assert main(["demo", *arguments, "--assistant-model", folder]) == 0
    printed = capsys.readouterr().out
    assert "DraftModel" in printed
    assert "An edit of Python code" in printed and printed.count("4 of 4") == 2
    assert "def to_celsius(fahrenheit):" in printed  # the document is shown
    assert "\x1b[" not in printed  # not a terminal
    drawn = picture.read_text(encoding="utf-8")
    assert drawn.startswith("<svg") and "to_celsius" in drawn and "ReferenceCopy" in drawn
