"""The lossless contract, point by point, for each verifier, one row and several."""

from __future__ import annotations

import copy

import pytest
import torch
from calls import Call, up_to_end
from drafters import Noise, Prophets
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)

import hf_refspec as rs

ROWS = [1, 4]
UNEQUAL = [0.9, 0.2, 0.5, 1.0]  # accuracies of rows
# The type, its attention, the rows and the options of a call.
CALLS = {
    "tree": ("llama", "sdpa", 1, {}),
    "packed, 4 rows": ("llama", "sdpa", 4, {}),
    "rectangle, 4 rows": ("llama", "eager", 4, {}),
    "chain": ("mistral", "sdpa", 1, {}),
    "running state": ("qwen3_next", "sdpa", 1, {}),
    "static": ("gemma2", "eager", 1, {"cache_implementation": "static"}),
    "static, 4 rows": ("llama", "sdpa", 4, {"cache_implementation": "static"}),
}
# Of a static cache the slots behind the text hold what was rejected.
dynamic = pytest.mark.parametrize("call", [*CALLS][:-2], indirect=True)
takes_trees = pytest.mark.parametrize("call", [*CALLS][:3], indirect=True)


@pytest.fixture(scope="module", params=CALLS)
def call(request, models_by_type) -> Call:
    model_type, attention, rows, options = CALLS[request.param]
    model = copy.deepcopy(models_by_type(model_type))
    model.set_attn_implementation(attention)
    return Call(model, rows, **options)


@takes_trees
@settings(max_examples=20, deadline=None)
@given(
    accuracies=st.lists(st.floats(0, 1), min_size=4, max_size=4),
    branches=st.integers(0, 5),
    seed=st.integers(0, 2**16),
    budget=st.one_of(st.just("auto"), st.integers(0, 20)),
    verification=st.sampled_from(["auto", "tree", "chain"]),
    eos_place=st.one_of(st.none(), st.integers(12, 43)),
)
def test_no_drafts_change_greedy_ids(
    call, accuracies, branches, seed, budget, verification, eos_place
):
    ends = [] if eos_place is None else call.plain[:2, eos_place].tolist()
    options = {"eos_token_id": ends or None, "pad_token_id": 0}
    plain = call.generate(**options)
    drafter = call.drafter(accuracies, branches, seed)
    options |= {"max_draft_tokens": budget, "verification": verification}
    assert call.generate(**options, candidate_generator=drafter).tolist() == plain.tolist()

    texts = [up_to_end(row[12:], ends) for row in plain]
    assert drafter.observed == texts[0]
    stats = drafter.stats
    assert stats.tokens == sum(map(len, texts)) == stats.accepted + sum(stats.accepted_lengths)
    assert sum(n * count for n, count in enumerate(stats.accepted_lengths)) == stats.accepted
    assert stats.accepted <= stats.drafted
    if budget != "auto":
        assert stats.drafted <= budget * sum(stats.accepted_lengths)


class Recorder(LogitsProcessor):
    """Records what it sees; copies share the list."""

    def __init__(self, seen):
        self.seen = seen

    def __deepcopy__(self, memo):
        return Recorder(self.seen)

    def __call__(self, input_ids, scores):
        assert len(input_ids) == len(scores)
        self.seen += input_ids.tolist()
        return scores - 0.1 * torch.arange(scores.shape[-1])


@pytest.mark.parametrize("do_sample", [False, True])
def test_logits_processors_see_each_prefix_once_in_order(call, do_sample):
    texts, recorded = [], []
    for drafts in (False, True):
        torch.manual_seed(0)
        seen = []
        drafter = Prophets(call.inputs, texts[0], 0.8) if drafts else None
        ids = call.generate(
            do_sample=do_sample,
            logits_processor=LogitsProcessorList([Recorder(seen)]),
            candidate_generator=drafter,
            max_draft_tokens=8,
        )
        texts.append(ids)
        recorded.append(seen)
        for row in ids.tolist():
            of_row = [prefix for prefix in seen if prefix[:12] == row[:12]]
            assert of_row == [row[:length] for length in range(12, 12 + 32)]
        assert len(seen) == 32 * len(ids)
    if call.rows == 1 or not do_sample:
        assert texts[0].tolist() == texts[1].tolist()
        assert drafter.stats.mat > 1.5
    if call.rows == 1:
        assert recorded[0] == recorded[1]


PROCESSED = {
    "repetition penalty": {"repetition_penalty": 1.4},
    "no repeated bigrams": {"no_repeat_ngram_size": 2},
    "least new tokens": {"min_new_tokens": 9, "eos_token_id": list(range(40)), "pad_token_id": 0},
    "forced end": {"forced_eos_token_id": 5, "eos_token_id": 5, "pad_token_id": 0},
    "bad words": {"bad_words_ids": [[5], [6, 7], [30, 31, 32]]},
    "constrained by row": {
        "prefix_allowed_tokens_fn": lambda row, ids: list(range(3 + 7 * row, 40 + 7 * row))
    },
    "SynthID": {
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 14, 15], ngram_len=3),
        "do_sample": True,
        "top_k": 1,
    },
}


@pytest.mark.parametrize("processed", PROCESSED)
def test_transformers_logits_processors_see_each_rows_prefix(call, processed):
    call.assert_lossless([0.6, 0.0, 0.3, 1.0], **PROCESSED[processed])


class StopAtCall(StoppingCriteria):
    """Stops at its n-th call."""

    def __init__(self, calls: int):
        self.calls = calls
        self.lengths = []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return torch.full((input_ids.shape[0],), len(self.lengths) >= self.calls)


@pytest.mark.parametrize("calls", [1, 9, 10])
def test_stopping_criteria_are_asked_after_every_token_and_nothing_stays_behind_a_stop(call, calls):
    criterion = StopAtCall(calls)
    drafter = call.drafter(1.0)
    output = call.generate(
        stopping_criteria=StoppingCriteriaList([criterion]),
        candidate_generator=drafter,
        max_draft_tokens=8,
        return_dict_in_generate=True,
    )
    length = 12 + calls
    assert output.sequences.tolist() == call.plain[:, :length].tolist()
    assert criterion.lengths == list(range(13, length + 1))
    assert int(output.past_key_values.get_seq_length()) == length - 1
    if call.rows == 1:  # of several, a row may be ahead of the others
        assert drafter.observed == call.plain[0, 12:length].tolist()


@pytest.mark.parametrize("accuracies", [1.0, UNEQUAL])
@pytest.mark.parametrize("place", range(12, 40, 9))
def test_an_end_of_text_inside_a_draft_ends_the_text(call, place, accuracies):
    ends = call.plain[:3, place].tolist()
    call.assert_lossless(accuracies, eos_token_id=ends, pad_token_id=7)


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 8, 13])
def test_max_new_tokens_is_never_overrun(call, new_tokens):
    call.assert_lossless([1.0, 0.5, 0.0, 1.0], max_new_tokens=new_tokens)


def test_the_shortest_of_several_maximal_lengths_holds(call):
    criteria = StoppingCriteriaList([MaxLengthCriteria(14), MaxLengthCriteria(20)])
    call.assert_lossless(1.0, stopping_criteria=criteria, max_new_tokens=None)


class ForcedRows(LogitsProcessor):
    """Forces each row to emit the text that begins as the row does."""

    def __init__(self, texts: torch.Tensor):
        self.texts = texts

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -float("inf"))
        for row, ids in enumerate(input_ids):
            length = min(len(ids), self.texts.shape[1] - 1)
            text = (self.texts[:, :8] == ids[:8]).all(dim=-1).nonzero()[0, 0]
            forced[row, self.texts[text, length]] = 0
        return forced


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("eos_token_id", [2, None])
@pytest.mark.parametrize("stops", [["\n"], ["ab", "zz"], ["ab", "sat o"], ["e"], ["never"]])
def test_stop_strings_end_each_row_as_plain_generate_does(
    byte_llama, tokenizer, stops, eos_token_id, rows
):
    """Without an end-of-text token an ended row goes on until all have ended."""
    tokenizer.padding_side = "left"
    texts = tokenizer(
        [
            "the cat sat on the mat\nthe cat sat abzze on\nthe end of it",
            "a dog ran to a dog ran absolutely not to the end of a dog ",
            "no, it is one more of those days that go on and on and go ",
        ][:rows],
        padding=True,
        return_tensors="pt",
    )
    inputs = {name: texts[name][:, :26] for name in ("input_ids", "attention_mask")}
    options = {
        **inputs,
        "max_new_tokens": 30,
        "do_sample": False,
        "stop_strings": stops,
        "tokenizer": tokenizer,
        "eos_token_id": eos_token_id,
        "logits_processor": LogitsProcessorList([ForcedRows(texts["input_ids"])]),
    }
    plain = byte_llama.generate(**options)
    if rows == 1 and stops != ["never"]:
        assert plain.shape[1] < 26 + 30, "the stop strings were not met"
    drafter = Prophets(inputs, texts["input_ids"], [1.0, 0.3, 0.8][:rows])
    drafted = byte_llama.generate(**options, candidate_generator=drafter, max_draft_tokens=8)
    assert drafted.tolist() == plain.tolist()
    assert rows > 1 or drafter.stats.mat > 1.5


# --- the cache


@pytest.mark.parametrize(
    ("model_type", "verification", "rows", "room"),
    [
        ("llama", "tree", 1, None),
        ("llama", "chain", 1, None),
        ("mistral", "chain", 1, None),
        ("qwen3_next", "chain", 1, None),
        ("llama", "tree", 4, None),
        ("gpt2", "tree", 4, None),
        ("llama", "auto", 1, 96),
        ("llama", "auto", 3, 96),
    ],
)
def test_turns_go_on_from_a_given_cache_which_holds_all_but_the_last_token(
    models_by_type, model_type, verification, rows, room
):
    """With `room` the cache is a static one."""
    first = Call(models_by_type(model_type), rows)
    texts = []
    for drafts in (False, True):
        config = first.model.config
        cache = StaticCache(config, max_cache_len=room) if room else DynamicCache(config=config)
        ids, mask = first.inputs["input_ids"], first.inputs["attention_mask"]
        for turn in range(3):
            options = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 15}
            if drafts:
                drafter = Prophets(options, texts[turn], UNEQUAL[:rows])
                options |= {"candidate_generator": drafter, "max_draft_tokens": 8}
                options["verification"] = verification
            ids = first.generate(past_key_values=cache, **options)
            if drafts:
                assert ids.tolist() == texts[turn].tolist()
                assert drafter.stats.mat > 1.2
            texts.append(ids)
            assert int(cache.get_seq_length()) == ids.shape[1] - 1
            ids = torch.cat([ids, first.inputs["input_ids"][:, -3:]], dim=-1)
            mask = torch.cat([mask, mask.new_ones((rows, ids.shape[1] - mask.shape[1]))], dim=-1)


@dynamic
@pytest.mark.parametrize("ends", [False, True])
def test_the_returned_cache_equals_that_of_plain_decoding(call, ends):
    options = {"return_dict_in_generate": True}
    if ends:  # rows at different times
        places = call.plain[-1, 22], call.plain[call.rows // 2, 30]
        options |= {"eos_token_id": [int(place) for place in places], "pad_token_id": 0}
    plain = call.generate(**options)
    drafter = call.drafter(UNEQUAL, branches=4)
    options |= {"candidate_generator": drafter, "max_draft_tokens": 8}
    drafted = call.generate(**options)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    pairs = zip(plain.past_key_values.layers, drafted.past_key_values.layers, strict=True)
    for one, other in pairs:
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            if hasattr(one, name):
                mine, theirs = getattr(other, name), getattr(one, name)
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


# --- drafters


def test_a_zero_budget_decodes_plainly(call):
    stats = call.assert_lossless(1.0, max_draft_tokens=0)
    assert (stats.drafted, stats.tokens, stats.forward_passes) == (0, 32 * call.rows, 32)


def test_stats_add_up(call):
    """Further sums are those of `test_no_drafts_change_greedy_ids`."""
    stats = call.assert_lossless(0.7)
    assert stats.forward_passes <= sum(stats.accepted_lengths) <= call.rows * stats.forward_passes
    assert min(stats.prefill_seconds, stats.drafting_seconds, stats.verifying_seconds) > 0


class Broken(rs.Drafter):
    """Returns or raises what a function of the budget does."""

    def __init__(self, draft):
        self.draft = draft


def failing(budget):
    raise KeyError("broken")


@pytest.mark.parametrize(
    ("draft", "error", "message"),
    [
        (lambda n: rs.DraftTree.chain([5] * (n + 1)), ValueError, "Broken was asked .* at most 8"),
        (lambda n: None, ValueError, "Broken was asked for .* at most 8"),
        (lambda n: rs.DraftTree.chain([3, 10_000]), ValueError, "10000"),
        (failing, KeyError, "broken"),
    ],
)
def test_a_broken_draft_is_an_error_and_frees_the_drafter_for_the_next_call(
    call, draft, error, message
):
    drafter = Broken(draft)
    for _ in range(2):
        with pytest.raises(error, match=message):
            call.generate(candidate_generator=drafter, max_draft_tokens=8)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model_type", ["mamba", "rwkv"])
def test_a_model_that_cannot_verify_is_decoded_plainly_with_a_warning(
    models_by_type, model_type, rows, caplog
):
    stats = Call(models_by_type(model_type), rows).assert_lossless(drafter=Noise())
    assert "decodes plainly, with the same text" in caplog.text
    assert (stats.tokens, stats.mat) == (32 * rows, 1.0)
