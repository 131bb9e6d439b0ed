"""A replay says the recorded answers and counts what a drafter saves."""

from __future__ import annotations

import pytest
from drafters import Noise, Prophet
from shared_data import data_file
from transformers import AutoTokenizer
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_refspec as rs
from hf_refspec.bench.replay import replay, stand_in_model
from hf_refspec.bench.suites import RecordedAnswer, llma_rag

ANSWERS = [RecordedAnswer([1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 2]), RecordedAnswer([3], [7, 2])]


def test_counts_every_token_and_pass():
    model = stand_in_model(64)
    stats = replay(ANSWERS, Noise(), model, max_draft_tokens=0)
    assert (stats.tokens, stats.forward_passes, stats.mat) == (9, 9, 1.0)
    perfect = Prophet([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 2], accuracy=1.0, branches=0)
    stats = replay(ANSWERS[:1], perfect, model, max_draft_tokens=3)
    assert (stats.tokens, stats.forward_passes) == (7, 3)  # the prefill, 3 + 1, 1 + 1


@pytest.fixture(scope="module")
def rag():
    tokenizer = AutoTokenizer.from_pretrained(data_file("llama2-tokenizer"))
    return llma_rag(data_file("llma_rag.jsonl"), tokenizer), stand_in_model(len(tokenizer))


@pytest.mark.parametrize(
    ("drafter", "nodes", "verification", "least"),
    [
        (lambda: rs.ReferenceCopy(mode="llma", copy_length=18), 18, "chain", 3.2),
        (rs.ReferenceCopy, 18, "chain", 3.35),
        (rs.ReferenceCopy, 16, "tree", 3.6),
        (rs.ReferenceCopy, 64, "tree", 4.15),
    ],
)
def test_mat_on_the_retrieval_augmented_prompts(rag, drafter, nodes, verification, least):
    answers, model = rag
    assert replay(answers, drafter(), model, nodes, verification).mat >= least


def test_prompt_look_up_scores_as_known(rag):
    answers, model = rag
    look_up = PromptLookupCandidateGenerator(num_output_tokens=10, max_length=2**31)
    assert 2.9 <= replay(answers, look_up, model, 10, "chain").mat <= 3.15
