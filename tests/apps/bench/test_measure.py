"""What `hf-refspec bench` says of its progress, and what a replay counts."""

from __future__ import annotations

import pytest

import hf_refspec as rs
from hf_refspec.apps.bench.measure import Progress, replay
from hf_refspec.apps.shared.comparison import Decoded


def test_each_call_has_a_line_with_the_time_that_further_ones_take():
    progress = Progress(prompts=3, methods=2)
    assert progress.line("plain", Decoded([1], 30.0)) == (
        "prompt 1 of 3, plain: 30.0 s; about 3 minutes left"
    )
    assert progress.line("auto", Decoded([1], 10.0)) == (
        "prompt 1 of 3, auto: 10.0 s; about 2 minutes left"
    )
    progress.prompts = 2  # one did not fit
    assert progress.line("auto", Decoded([1], 10.0)) == (
        "prompt 2 of 2, auto: 10.0 s; about 1 minute left"
    )
    assert progress.line("plain", Decoded([1], 30.0)) == "prompt 2 of 2, plain: 30.0 s"


def test_a_replay_counts_passes_by_size_and_weighs_them_by_their_cost():
    text = [*range(1, 9)]
    stats = replay([(text, text)], rs.ReferenceCopy(), 64, 3)
    assert sum(size * passes for size, passes in stats.pass_tokens.items()) == (
        stats.forward_passes + stats.drafted
    )
    assert stats.pass_tokens == {1: 1, 4: 2}  # the prompt's pass, and two with drafts
    costs = {1: 1.0, 3: 2.0, 5: 3.0}  # 2.5 for four tokens
    assert stats.pass_cost(costs) == pytest.approx((1.0 + 2 * 2.5) / 3)
