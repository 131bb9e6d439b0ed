"""Replays count what a drafter saves on recorded answers."""

from __future__ import annotations

import numpy as np
import replay as script
import torch
from suites import ForcedText, random_model

from hf_refspec.apps.bench.measure import replay
from hf_refspec.drafting.reference_copy import ReferenceCopy
from hf_refspec.drafting.stats import SpeculationStats


def test_a_replay_counts_as_generate_does():
    model, texts = random_model("tiny", 64), np.random.default_rng(0).integers(0, 4, (3, 60))
    answers = [(text[:20].tolist(), text[20:].tolist()) for text in texts]
    for drafter in (ReferenceCopy(), ReferenceCopy(mode="llma")):
        generated = SpeculationStats()
        for ids in map(torch.from_numpy, texts):
            forced = {"logits_processor": [ForcedText(ids)], "max_new_tokens": 40}
            options = {"candidate_generator": drafter, "max_draft_tokens": 16, **forced}
            model.generate(ids[None, :20], do_sample=False, eos_token_id=None, **options)
            generated += drafter.stats
        replayed = replay(answers, drafter, 64, 16)
        assert replayed.tokens == generated.tokens == 120
        assert replayed.forward_passes == generated.forward_passes
        assert replayed.accepted_lengths == generated.accepted_lengths


def test_all_contenders_have_triggers_accepted_tokens_and_steps(
    data, tokenizer, tmp_path, printed_rows
):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    script.main([str(data / "llma_rag.jsonl"), "--tokenizer", str(tmp_path / "tokenizer")])
    header, *rows = printed_rows()
    assert header[2:5] == ["MAT", "triggers", "accepted"]
    assert len(rows) == len(script.CONTENDERS)
    [llma] = [row for row in rows if row[0].startswith("LLMA")]
    mat, triggers, accepted, steps = map(float, llma[2:6])
    assert mat > 1 and 0 < triggers < steps < accepted
