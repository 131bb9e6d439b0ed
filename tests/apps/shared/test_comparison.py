"""Methods are compared on the same prompts: ids, times, and whether one pays."""

import io

import pytest
from transformers import BatchEncoding

import hf_refspec as rs
from hf_refspec.apps.shared.comparison import (
    FEWEST_PROMPTS,
    LEAST_GAIN,
    UNDRAFTED,
    Comparison,
    Decoded,
    Gain,
    decode,
    first_difference,
    joined,
)
from hf_refspec.apps.shared.streams import Terminal


@pytest.mark.parametrize(
    ("plain", "other", "position"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [1], 0), ([], [], None)],
)
def test_the_first_difference_is_an_id_or_an_end(plain, other, position):
    assert first_difference(plain, other) == position


def test_rate_and_mat_are_of_all_calls_together():
    call = joined([Decoded([1] * 10, 1, 10), Decoded([1] * 30, 1, 6)])
    assert (call.rate, call.mat) == (20, 2.5)


def calls(*seconds: float) -> list[Decoded]:
    return [Decoded([1] * 100, each, 100) for each in seconds]


def test_the_gain_is_that_of_all_prompts_together():
    gain = Gain.of(calls(2.0, 1.0), calls(1.0, 1.0))
    assert gain.ratio == pytest.approx(1.5)
    assert (gain.low, gain.high) == pytest.approx((1.0, 2.0))


SPANS = "an interval that spans"


@pytest.mark.parametrize(
    ("plain", "other", "said"),
    [
        ([1.2, 1.3, 1.25] * 4, [1.0] * 12, "pays: 1.25x (1.2"),
        ([1.0, 1.0, 1.01] * 4, [1.0, 1.01, 1.0] * 4, "does not pay: 1.00x ("),
        ([0.8, 0.9] * 5, [1.0] * 10, "does not pay: 0.85x ("),
        ([2.0, 0.6] * 3, [1.0] * 6, f"is undecided: 1.30x (0.83x to 1.77x), {SPANS} 1; more"),
        ([1.5] * 4, [1.0] * 4, "is undecided: 1.50x over 4 prompts, and a verdict needs 5"),
    ],
)
def test_the_verdict_says_no_more_than_the_spread_allows(plain, other, said):
    assert str(Gain.of(calls(*plain), calls(*other))).startswith(said)
    assert f"1.01x (1.00x to 1.03x), {SPANS} 1.02; more" in str(Gain(9, 1.015, 1.005, 1.03))


@pytest.fixture
def inputs(tokenizer) -> BatchEncoding:
    return tokenizer(["cat cat cat cat", "the mat the mat"], return_tensors="pt")


def test_passes_are_those_of_the_model_and_of_its_drafter(byte_llama, inputs):
    one = BatchEncoding({name: each[:1] for name, each in inputs.items()})
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert decode(byte_llama, one, **options).passes == 12
    drafter = rs.ReferenceCopy()
    drafted = decode(byte_llama, one, **options, candidate_generator=drafter, max_draft_tokens=8)
    assert drafted.passes == drafter.stats.forward_passes < 12
    static = decode(byte_llama, inputs, **options, cache_implementation="static")
    assert static.passes == 12 and len(static.ids) == 2 * 12
    assert not byte_llama._forward_pre_hooks


def test_methods_take_turns_on_new_drafters_and_sampled_texts_are_the_same(byte_llama, inputs):
    made = []

    def methods():
        made.append(rs.ReferenceCopy() | rs.TokenRecycling())
        return {UNDRAFTED: {}, "drafted": {"candidate_generator": made[-1], "max_draft_tokens": 8}}

    one = BatchEncoding({name: each[:1] for name, each in inputs.items()})
    compared = Comparison(byte_llama, methods, do_sample=True, max_new_tokens=12)
    compared.warm_up()
    assert len(made) == 2 and compared.methods["drafted"]["candidate_generator"] is made[0]
    for _ in range(2):
        compared.ask(one)
    first, second = compared.calls[UNDRAFTED]
    assert first.ids != second.ids  # another seed for each prompt
    assert compared.equal("drafted") == 2
    assert compared.total(UNDRAFTED).mat == 1 <= compared.total("drafted").mat
    printed = io.StringIO()
    assert compared.report(Terminal(file=printed)) == 0
    assert (
        "over 2 prompts" in printed.getvalue()
        and "tokens a pass, which takes" in printed.getvalue()
    )


@pytest.mark.parametrize("accepted", [0, 1])
def test_no_gain_is_claimed_where_no_draft_was_accepted(byte_llama, accepted):
    """The clock shows one, by chance."""
    compared = Comparison(
        byte_llama, lambda: {UNDRAFTED: {}, "drafted": {"candidate_generator": rs.ReferenceCopy()}}
    )
    for _ in range(FEWEST_PROMPTS):
        drafted = Decoded([1] * 100, 1.0, 100 - accepted)
        compared.record({UNDRAFTED: Decoded([1] * 100, 1.07, 100), "drafted": drafted})
    assert compared.gain("drafted").low > LEAST_GAIN
    printed = io.StringIO()
    compared.report(Terminal(file=printed))
    verdict = "drafted against plain does not pay: with a MAT of 1.00 no speed-up comes from drafts"
    assert (verdict in printed.getvalue()) == (accepted == 0)
    assert ("drafted against plain pays: 1.07x" in printed.getvalue()) == (accepted == 1)
