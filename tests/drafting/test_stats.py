"""What `DraftStats` counts and prints."""

import json

import hf_refspec as rs
from hf_refspec.drafting.stats import DraftStats
from tests.helpers.calls import assert_lossless


def recorded() -> DraftStats:
    stats = DraftStats()
    for drafted, accepted in [(0, 0), (8, 3), (8, 0), (4, 3)]:
        stats.record_rows([(drafted, accepted)])
    return stats


def test_each_pass_yields_what_was_accepted_and_one_token_more():
    stats = recorded()
    assert (stats.forward_passes, stats.tokens) == (4, 10)
    assert (stats.drafts, stats.drafted, stats.accepted) == (3, 20, 6)
    figures = json.loads(json.dumps(stats.to_dict()))  # which holds what json can
    assert stats.mat == figures["mat"] == 2.5
    # Passes by accepted tokens.
    assert stats.accepted_lengths == figures["accepted_lengths"] == [2, 0, 0, 2]
    assert figures["prefill_seconds"] == 0.0


def test_str_is_one_readable_line():
    nothing = DraftStats()
    assert str(nothing) == "0 tokens in 0 passes, MAT 0.00, 0 drafted, 0 accepted, 0.0 s"
    stats = recorded()
    stats.verifying_seconds, stats.drafting_seconds = 1.5, 0.5
    assert str(stats) == (
        "10 tokens in 4 passes, MAT 2.50, 20 drafted, 6 accepted (30.0 %), "
        "2.0 s: 75 % verifying, 25 % drafting"
    )
    stats.probe_passes = 10
    assert str(stats).endswith("25 % drafting; 10 passes probed the model")
    stats.reason = "the model was changed"
    assert str(stats).endswith("10 passes probed the model; drafts ended: the model was changed")
    assert repr(stats) == f"DraftStats({stats})"


def test_the_mat_of_several_rows_is_said_to_be_per_row():
    stats = DraftStats()
    for _ in range(4):
        stats.record_rows([(0, 0), (2, 1), (0, 0)])
    assert str(stats).startswith("16 tokens in 4 passes over several rows, MAT 1.33 per row, 8 ")
    stats += recorded()
    assert str(stats).startswith("26 tokens in 8 passes over several rows, MAT 1.62 per row, 28 ")


def test_a_drafter_alone_is_its_only_source(byte_llama, tokenizer):
    inputs = tokenizer(["the mat the mat", "cat cat cat cat"], return_tensors="pt", padding=True)
    stats = assert_lossless(byte_llama, rs.ReferenceCopy(), {**inputs})
    (source,) = stats.sources
    assert (source.name, source.drafted) == ("ReferenceCopy", stats.drafted)
    assert source.accepted == source.first == stats.accepted > 0
    assert " passes over several rows, MAT " in str(stats)
