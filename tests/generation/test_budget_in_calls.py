"""Calls whose budget is "auto": what passes cost decides what is verified, and never the text."""

import numpy as np
import pytest
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_refspec.generation.budget import pass_costs
from tests.helpers.calls import GREEDY, PROMPT, Call, assert_lossless
from tests.helpers.pass_times import passes_take


def generated(model, accuracy: float):
    """The stats of a call."""
    call = Call(model, inputs={"input_ids": PROMPT})
    return call.assert_lossless(call.drafter(accuracy, branches=0), max_draft_tokens="auto")


def test_by_default_a_call_is_not_slower_where_drafts_are_dear(llama):
    with passes_take(lambda tokens: 1.0 if tokens == 1 else 2.0) as passes:
        generated(llama, accuracy=0.2)
        passes.total = 0.0
        stats = generated(llama, accuracy=0.2)
    assert passes.total <= 1.1 * (stats.tokens - 1)  # the first is the prefill's


def test_the_first_call_of_a_model_measures_three_plain_steps_and_drafts(llama):
    with passes_take(lambda tokens: 1.0) as passes:
        assert generated(llama, accuracy=1.0).mat > 3
        assert passes.sizes[:3] == [1, 1, 1] and passes.sizes[3] > 1
        first = max(passes.sizes)
        passes.sizes.clear()
        generated(llama, accuracy=1.0)
    assert passes.sizes[0] == first  # what a pass costs is still known


@pytest.mark.parametrize("seed", range(3))
def test_a_call_whose_passes_stall_now_and_then_drafts_as_without(llama, seed):
    """One pass in twenty takes ten times as long, as where other processes want the processor."""
    call, drafted = Call(llama, inputs={"input_ids": PROMPT}, max_new_tokens=200), [0, 0]
    for stalls in (False, True):
        rng = np.random.default_rng(seed)
        with passes_take(
            lambda tokens: (1 + tokens / 20) * (10 if rng.random() < 0.05 * stalls else 1)  # noqa: B023
        ):
            drafter = call.drafter(0.7, seed=seed)
            for _ in range(3):
                drafted[stalls] += call.assert_lossless(drafter, max_draft_tokens="auto").drafted
    assert drafted[1] == pytest.approx(drafted[0], rel=0.05) and drafted[0] > 500


@pytest.mark.parametrize("stalled", range(4))
def test_a_stall_in_the_first_passes_costs_a_call_next_to_nothing(llama, stalled):
    """The first four: three plain steps and one with a draft."""
    sizes = []
    for times in (1, 10):
        with passes_take(
            lambda tokens: 1.0 * (times if len(passes.sizes) == stalled else 1)  # noqa: B023
        ) as passes:
            assert generated(llama, accuracy=1.0).mat > 3
        sizes.append(passes.sizes)
    assert len(sizes[0]) == len(sizes[1]) and sizes[0][4:-1] == sizes[1][4:-1]


def test_costs_are_measured_and_kept_with_the_model(fresh_llama):
    stats = generated(fresh_llama, accuracy=0.5)
    costs = pass_costs(fresh_llama, "tree, packed")
    assert costs.passes == stats.forward_passes - 1
    assert costs.seconds(np.array(1), 20) > 0


def test_a_candidate_generators_draft_is_not_cut_by_default(llama):
    lengths = []

    class Theirs(PromptLookupCandidateGenerator):
        def get_candidates(self, input_ids):
            ids = plain[:, : input_ids.shape[1] + 6]
            lengths.append(ids.shape[1] - input_ids.shape[1])
            return ids, None

    plain = llama.generate(PROMPT, **GREEDY)
    with passes_take(float):
        assert_lossless(llama, Theirs(), max_draft_tokens="auto")
    assert lengths == [6, 6, 6, 2]  # 24 tokens: the prefill's, 3 * (6 + 1) and the last 2
