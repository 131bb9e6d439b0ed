"""Replays count what a drafter saves on recorded answers."""

import json
from pathlib import Path

import numpy as np
import pytest
import replay as script
import sessions
import torch
from suites import random_model

from hf_refspec.apps.bench.measure import replay
from hf_refspec.drafting.reference_copy import ReferenceCopy
from hf_refspec.drafting.stats import DraftStats
from tests.helpers.calls import Forced


def test_a_replay_counts_as_generate_does():
    model, texts = random_model("tiny", 64), np.random.default_rng(0).integers(0, 4, (3, 60))
    answers = [(text[:20].tolist(), text[20:].tolist()) for text in texts]
    forced = {"logits_processor": [Forced(torch.from_numpy(texts))], "max_new_tokens": 40}
    for drafter in (ReferenceCopy(), ReferenceCopy(published=True)):
        generated = DraftStats()
        for ids in map(torch.from_numpy, texts):
            options = {"candidate_generator": drafter, "max_draft_tokens": 16, **forced}
            model.generate(ids[None, :20], do_sample=False, eos_token_id=None, **options)
            generated += drafter.stats
        replayed = replay(answers, drafter, 64, 16)
        assert replayed.tokens == generated.tokens == 120
        assert replayed.forward_passes == generated.forward_passes
        assert replayed.accepted_lengths == generated.accepted_lengths


def test_replay_has_figures_of_all_contenders_by_n_and_k_and_speed_ups(
    data, tokenizer, tmp_path, printed_rows, capsys
):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    command = [str(data / "llma_rag.jsonl"), "--tokenizer", str(tmp_path / "tokenizer")]
    script.main(command)
    header, *rows = printed_rows()
    assert header[2:5] == ["MAT", "triggers", "accepted"]
    [llma] = [row for row in rows if row[0].startswith("LLMA")]
    mat, triggers, accepted, steps = map(float, llma[2:6])
    assert mat > 1 and 0 < triggers < steps < accepted
    [swept] = [row for row in rows if row[:2] == ["1", "18"]]
    assert swept[2:6] == llma[2:6]
    timed = ["--size", "tiny", "--dtype", "float32", "--limit", "1"]
    script.main([*command, *timed])  # asserts that the answers are written, and compares spans
    printed = capsys.readouterr().out
    assert printed.count("x\n") == len(script.CONTENDERS) - 1
    one, other = (line.split(" | ")[1:3] for line in printed.splitlines()[-3:-1])
    assert one == other and int(one[0]) > 0


def test_sessions_answer_each_question_once_and_pay_where_answers_repeat(model, data, printed_rows):
    command = ["answers.jsonl", "--data", str(data), *model[:2]]
    sessions.main([*command, "--limit", "2", "--max-new-tokens", "8"])
    counts = {"LLMA's queries": "1", "HumanEval": "1", "two turns": "1", sessions.EDITS: "2"}
    assert [row[:2] for row in printed_rows()[1:]] == [list(item) for item in counts.items()]
    rows = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [len(row["answer"]) for row in rows] == [len(row["turns"]) for row in rows]
    same = [{**rows[0], "turns": [f"{i} who?"], "answer": ["a tame cat, " * 4]} for i in range(4)]
    Path("answers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in same))
    sessions.main(command)
    _, [_, questions, *mats] = printed_rows()
    _, of_prompt, of_sessions, alone, blended, *_ = map(float, mats)
    assert questions == "2" and of_prompt < of_sessions and alone < blended


def test_suffix_decoding_drafts_from_the_prompt_and_from_earlier_answers():
    pytest.importorskip("arctic_inference", reason="arctic-inference is not installed")
    drafter, text = sessions.SuffixDecoding(), list(range(100, 140))
    assert replay([([1, 2, 3], text)], drafter, 500, 64).mat == 1.0
    assert replay([([4, 5], text)], drafter, 500, 64).mat > 4.0
    assert replay([([*text[::-1], 7], text[::-1])], drafter, 500, 64).mat > 4.0
