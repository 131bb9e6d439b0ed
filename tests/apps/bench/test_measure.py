"""What `hf-refspec bench` says of its progress."""

from __future__ import annotations

from hf_refspec.apps.bench.measure import Progress
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
