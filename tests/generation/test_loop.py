"""The lossless contract, point by point, for each verifier, one row and several."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)

import hf_refspec as rs
from hf_refspec.generation import row as rows
from hf_refspec.verification.caches import find_cache
from tests.helpers.calls import (
    Alternating,
    Call,
    Forced,
    ListStreamer,
    StopAtCall,
    up_to_end,
)
from tests.helpers.drafters import Listening, Noise, Prophets

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


def of(*names: str):
    """Runs a test with these calls alone."""
    return pytest.mark.parametrize("call", names, indirect=True)


@pytest.fixture(scope="module", params=CALLS)
def call(request, models_by_type) -> Call:
    model_type, attention, rows, options = CALLS[request.param]
    model = copy.deepcopy(models_by_type(model_type))
    model.set_attn_implementation(attention)
    return Call(model, rows, **options)


@of("tree", "packed, 4 rows", "rectangle, 4 rows")
@settings(max_examples=20)
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
    ending = Call(call.model, call.rows, eos_token_id=ends or None, pad_token_id=0)
    drafter = call.drafter(accuracies, branches, seed)
    stats = ending.assert_lossless(drafter, verification, budget)

    texts = [up_to_end(row[12:], ends) for row in ending.plain]
    assert drafter.observed == texts[0]
    assert stats.tokens == sum(map(len, texts)) == stats.accepted + sum(stats.accepted_lengths)
    assert sum(n * count for n, count in enumerate(stats.accepted_lengths)) == stats.accepted
    assert stats.accepted <= stats.drafted
    if budget != "auto":
        assert stats.drafted <= budget * sum(stats.accepted_lengths)


SAMPLING = {
    "temperature": {"temperature": 0.8, "top_k": 0},
    "top-p": {"top_p": 0.9, "top_k": 0},
    "a processor that reads the text": {"repetition_penalty": 1.2},
    "ended rows": {"eos_token_id": list(range(20)), "pad_token_id": 0},
}


@of("packed, 4 rows")  # one row is sampled in `test_architectures`
@pytest.mark.parametrize("keeps_noise", [True, False])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_the_same_seed_gives_the_same_texts_and_random_numbers(
    call, sampling, keeps_noise, monkeypatch
):
    if not keeps_noise:  # beyond one column: slow rows draw theirs again
        monkeypatch.setattr(rows, "_KEPT_BYTES", 1)
    assert call.assert_lossless(UNEQUAL, do_sample=True, **SAMPLING[sampling]).mat > 1.1


@of("tree", "packed, 4 rows", "rectangle, 4 rows")
def test_the_callers_default_device_is_used_for_nothing(call):
    """Tensors on the device "meta" have no contents."""
    for do_sample in (False, True):
        own = Call(call.model, call.rows, do_sample=do_sample)
        with torch.device("meta"):
            assert own.assert_lossless(drafting={"streamer": ListStreamer()}).accepted > 0


@of("packed, 4 rows")
def test_the_callers_default_type_is_not_that_of_random_numbers(call):
    torch.set_default_dtype(torch.bfloat16)
    options = {"do_sample": True, "temperature": 5.0, "top_k": 0}
    try:
        for seed in (2, 18, 31, 34):  # near-ties among the tokens that they draw
            texts = []
            for drafter in (None, rs.ReferenceCopy()):
                torch.manual_seed(seed)
                texts.append(call.generate(**options, candidate_generator=drafter).tolist())
            assert texts[0] == texts[1]
    finally:
        torch.set_default_dtype(torch.float32)


def test_probabilities_that_are_not_numbers_are_refused_as_in_plain_decoding(call):
    def broken(input_ids, scores):
        return scores.fill_(float("nan"))

    options = {"do_sample": True, "logits_processor": [broken]}
    for drafting in ({}, {"candidate_generator": call.drafter(0.9)}):
        with pytest.raises(RuntimeError, match=r"probabilit.*nan"):
            call.generate(**options, **drafting)


# --- logits processors


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_processor_that_keeps_state_sees_each_prefix_of_all_rows_once_in_order(call, do_sample):
    plain, drafted = Alternating(), Alternating()
    options = {**call.options, "do_sample": do_sample, "logits_processor": [plain]}
    processed = Call(call.model, inputs=call.inputs, **options)
    stats = processed.assert_lossless(drafting={"logits_processor": [drafted]})
    texts = processed.plain.tolist()
    assert drafted.seen == [[row[:length] for row in texts] for length in range(12, 12 + 32)]
    assert drafted.seen == plain.seen
    assert (stats.mat > 1.2) == (call.rows == 1)


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
    # These two hold the prompt of their row.
    "penalty of the prompt": {"encoder_repetition_penalty": 3.0},
    "no tokens of the prompt": {"encoder_no_repeat_ngram_size": 1},
}


@pytest.mark.parametrize("processed", PROCESSED)
def test_transformers_logits_processors_see_each_rows_prefix(call, processed):
    call.assert_lossless([0.6, 0.0, 0.3, 1.0], **PROCESSED[processed])


@of("tree", "chain", "running state", "static")
def test_scores_and_logits_match(call):
    """Those of several rows are refused."""
    names = ("return_dict_in_generate", "output_scores", "output_logits")
    options = {"repetition_penalty": 1.2, **dict.fromkeys(names, True)}
    call.assert_lossless(**options)
    drafted = call.generate(candidate_generator=call.drafter(), **options)
    for returned in (drafted.scores, drafted.logits):
        assert isinstance(returned, tuple) and returned[0].dtype == torch.float32


# --- stopping criteria, streamers and the returned cache


class StopTogether(StoppingCriteria):
    """Keeps state for all rows: stops when each has had its token."""

    def __init__(self, plain: torch.Tensor):
        self.tokens = plain[:, [20, 17, 25, 14]].diagonal().tolist()
        self.done = [False] * len(self.tokens)

    def __call__(self, input_ids, scores, **kwargs):
        for row, token in enumerate(self.tokens):
            self.done[row] |= int(input_ids[row, -1]) == token
        return all(self.done)


class Asked(StoppingCriteria):
    """Records the texts that it is asked about, and stops nothing."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool)


CRITERIA = {
    "the first token": lambda plain: StopAtCall(1),
    "inside a draft": lambda plain: StopAtCall(9),
    "each row by itself": lambda plain: StopAtCall(),
    "all rows together": StopTogether,
}


@pytest.mark.parametrize("end", [None, "a row's"])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_criteria_streamers_and_the_cache_get_what_plain_decoding_gives_them(call, criterion, end):
    """With an end-of-text token ended rows are padded; without one they go on."""
    end_id = int(call.plain[call.rows // 2, 16]) if end else None
    options = {"eos_token_id": end_id, "pad_token_id": 0, "return_dict_in_generate": True}

    def own() -> dict:
        criteria = StoppingCriteriaList([CRITERIA[criterion](call.plain), Asked()])
        return {"stopping_criteria": criteria, "streamer": ListStreamer()}

    def shown(own: dict) -> tuple:
        streamer = own["streamer"]
        return own["stopping_criteria"][1].seen, streamer.puts, streamer.ended

    plain = own()
    ended = Call(call.model, inputs=call.inputs, **{**call.options, **options, **plain})
    ids = ended.plain_ids
    assert plain["streamer"].puts[1:] == ids.T[12:].tolist()
    assert int(ended.plain.past_key_values.get_seq_length()) == ids.shape[1] - 1
    for accuracies in (UNEQUAL, 1.0):
        drafter, drafted = call.drafter(accuracies), own()
        ended.assert_lossless(drafter, drafting=drafted)
        assert shown(drafted) == shown(plain)
        if call.rows == 1:  # of several, a row may be ahead of the others
            assert drafter.observed == ids[0, 12:].tolist()
    if end is None:
        assert ids.shape[1] < 12 + 32


@pytest.mark.parametrize("new_tokens", [1, 2, 13])
def test_max_new_tokens_is_never_overrun(call, new_tokens):
    call.assert_lossless([1.0, 0.5, 0.0, 1.0], max_new_tokens=new_tokens)


def test_the_shortest_of_several_maximal_lengths_holds(call):
    criteria = StoppingCriteriaList([MaxLengthCriteria(14), MaxLengthCriteria(20)])
    call.assert_lossless(1.0, stopping_criteria=criteria, max_new_tokens=None)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("eos_token_id", [2, None])
@pytest.mark.parametrize("stops", [["\n"], ["ab", "zz"], ["ab", "sat o"], ["never"]])
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
    options = {"stop_strings": stops, "tokenizer": tokenizer, "eos_token_id": eos_token_id}
    options["logits_processor"] = LogitsProcessorList([Forced(texts["input_ids"])])
    call = Call(byte_llama, inputs=inputs, max_new_tokens=30, **options)
    if rows == 1 and stops != ["never"]:
        assert call.plain.shape[1] < 26 + 30, "the stop strings were not met"
    drafter = Prophets(inputs, texts["input_ids"], [1.0, 0.3, 0.8])
    assert call.assert_lossless(drafter).mat > 1.5 or rows > 1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])  # packed, or in one rectangle
def test_ended_rows_draft_nothing_and_leave_the_passes(fresh_llama, attention):
    """The cache of a rectangle is as long as its longest row, however many nodes were rejected."""
    fresh_llama.set_attn_implementation(attention)
    call = Call(fresh_llama, rows=4)
    end = int(call.plain[1, 15])
    options = {"eos_token_id": end, "pad_token_id": 0}
    plain = call.generate(**options)
    passes, drafter = [], Listening(call.inputs, call.plain, 0.2)
    drafting = {"candidate_generator": drafter, "max_draft_tokens": 4}
    call.generate(**options, **drafting)  # probes
    drafter.drafts.clear()

    def record(_, args, kwargs):
        passes.append((*kwargs["input_ids"].shape, find_cache(kwargs).get_seq_length()))

    record.only_reads = True  # so that findings about the model stay valid
    with fresh_llama.register_forward_pre_hook(record, with_kwargs=True):
        drafted = call.generate(**options, **drafting)
    assert drafted.tolist() == plain.tolist()
    assert drafter.drafts and all(text[-1] != end for text, _ in drafter.drafts)
    assert drafter.stats.tokens == sum(len(up_to_end(row[12:], [end])) for row in plain)
    passes = passes[-drafter.stats.forward_passes + 1 :]  # without the probe's and the prefill
    assert max(width for _, _, width in passes) <= 12 + 32 - 1
    if attention == "eager":
        rows = [rows for rows, _, _ in passes]
        assert rows == sorted(rows, reverse=True) and rows[0] == 4 > rows[-1]
    else:
        assert passes[0][1] > 3 * (1 + 4) >= passes[-1][1]  # the tokens of three rows at most


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

    def __init__(self, drafted):
        self.drafted = drafted

    def draft(self, budget, call):
        return self.drafted(budget)


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


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("model_type", ["mamba", "rwkv"])
def test_a_model_that_cannot_verify_is_decoded_plainly_with_a_warning(
    models_by_type, model_type, rows, caplog
):
    plain, drafted = ListStreamer(), ListStreamer()
    call = Call(models_by_type(model_type), rows, streamer=plain)
    stats = call.assert_lossless(Noise(), drafting={"streamer": drafted})
    assert plain.puts == drafted.puts and drafted.ended == 1
    assert "decodes plainly, with the same text" in caplog.text
    assert (stats.tokens, stats.mat) == (32 * rows, 1.0)
