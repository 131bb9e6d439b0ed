"""The lossless contract, point by point."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from calls import PROMPT, Forced, ListStreamer
from drafters import Noise, Prophet
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import hf_refspec as rs


@pytest.fixture(scope="module")
def plain_ids(llama) -> np.ndarray:
    return llama.generate(PROMPT, max_new_tokens=48, do_sample=False, eos_token_id=None)[0].numpy()


@settings(max_examples=60, deadline=None)
@given(
    accuracy=st.floats(0, 1),
    branches=st.integers(0, 5),
    seed=st.integers(0, 2**16),
    budget=st.integers(0, 20),
    verification=st.sampled_from(["tree", "chain"]),
)
def test_no_draft_changes_greedy_ids(
    llama, plain_ids, accuracy, branches, seed, budget, verification
):
    drafter = Prophet(plain_ids, accuracy, branches, seed)
    drafted = llama.generate(
        PROMPT,
        max_new_tokens=48,
        do_sample=False,
        eos_token_id=None,
        candidate_generator=drafter,
        max_draft_tokens=budget,
        verification=verification,
    )
    assert drafted[0].tolist() == plain_ids.tolist()
    assert drafter.observed == plain_ids[PROMPT.shape[1] :].tolist()
    stats = drafter.stats
    assert stats.tokens == 48
    assert stats.accepted <= stats.drafted <= budget * stats.forward_passes


@settings(max_examples=25, deadline=None)
@given(sampling_seed=st.integers(0, 2**16), accuracy=st.floats(0, 1), seed=st.integers(0, 2**16))
def test_no_draft_changes_sampled_ids_or_uses_up_other_random_numbers(
    llama, sampling_seed, accuracy, seed
):
    options = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.8, "top_k": 30}
    torch.manual_seed(sampling_seed)
    plain = llama.generate(PROMPT, **options)
    state = torch.get_rng_state()
    torch.manual_seed(sampling_seed)
    drafter = Prophet(plain, accuracy, seed=seed)
    drafted = llama.generate(PROMPT, candidate_generator=drafter, max_draft_tokens=8, **options)
    assert drafted.tolist() == plain.tolist()
    assert torch.equal(torch.get_rng_state(), state)


class Recorder(LogitsProcessor):
    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append((input_ids[0].tolist(), scores.shape))
        return scores - 0.1 * torch.arange(scores.shape[-1])


@pytest.mark.parametrize("do_sample", [False, True])
def test_logits_processors_see_each_prefix_once_in_order(llama, do_sample):
    seen = []
    for drafter in (None, "prophet"):
        torch.manual_seed(0)
        recorder = Recorder()
        if drafter:
            drafter = Prophet(seen[0][-1][0] + [0], accuracy=0.8)
        llama.generate(
            PROMPT,
            max_new_tokens=30,
            do_sample=do_sample,
            eos_token_id=None,
            logits_processor=LogitsProcessorList([recorder]),
            candidate_generator=drafter,
            max_draft_tokens=8,
        )
        seen.append(recorder.seen)
    assert seen[0] == seen[1]
    assert drafter.stats.mat > 1.5


class StopAtCall(StoppingCriteria):
    def __init__(self, calls: int):
        self.calls = calls
        self.lengths = []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return torch.full((input_ids.shape[0],), len(self.lengths) >= self.calls)


@pytest.mark.parametrize("calls", [1, 2, 9, 10, 11])
def test_stopping_criteria_are_asked_after_every_token_and_nothing_stays_behind_a_stop(
    llama, plain_ids, calls
):
    criterion = StopAtCall(calls)
    drafter = Prophet(plain_ids, accuracy=1.0)
    output = llama.generate(
        PROMPT,
        max_new_tokens=48,
        do_sample=False,
        eos_token_id=None,
        stopping_criteria=StoppingCriteriaList([criterion]),
        candidate_generator=drafter,
        max_draft_tokens=8,
        return_dict_in_generate=True,
    )
    length = PROMPT.shape[1] + calls
    assert output.sequences[0].tolist() == plain_ids[:length].tolist()
    assert criterion.lengths == list(range(PROMPT.shape[1] + 1, length + 1))
    assert output.past_key_values.get_seq_length() == length - 1
    assert drafter.observed == plain_ids[PROMPT.shape[1] : length].tolist()


@pytest.mark.parametrize("position", range(12, 24))
def test_an_end_of_text_inside_a_draft_ends_the_text(llama, plain_ids, position):
    options = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": int(plain_ids[position])}
    plain = llama.generate(PROMPT, **options)
    drafter = Prophet(plain_ids, accuracy=1.0)
    drafted = llama.generate(PROMPT, candidate_generator=drafter, max_draft_tokens=8, **options)
    assert drafted.tolist() == plain.tolist()


@pytest.mark.parametrize("new_tokens", range(1, 14))
def test_max_new_tokens_is_never_overrun(llama, plain_ids, new_tokens):
    drafter = Prophet(plain_ids, accuracy=1.0)
    drafted = llama.generate(
        PROMPT,
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        candidate_generator=drafter,
        max_draft_tokens=8,
    )
    assert drafted[0].tolist() == plain_ids[: PROMPT.shape[1] + new_tokens].tolist()


def test_drafts_stay_within_learned_positions(models_by_type):
    """GPT-2 has 512 positions; a draft past them would index outside of the table."""
    model = models_by_type("gpt2")
    prompt = torch.randint(3, 97, (1, 490), generator=torch.Generator().manual_seed(0))
    options = {"max_length": 512, "do_sample": False, "eos_token_id": None}
    plain = model.generate(prompt, **options)
    drafting = {"candidate_generator": Prophet(plain, 1.0), "max_draft_tokens": 8}
    drafted = model.generate(prompt, **drafting, **options)
    assert drafted.tolist() == plain.tolist()
    # An end of text keeps plain decoding within the table although max_length does not.
    options = {"max_length": 600, "do_sample": False, "eos_token_id": int(plain[0, 510])}
    plain = model.generate(prompt, **options)
    drafting["candidate_generator"] = Noise()
    drafted = model.generate(prompt, **drafting, **options)
    assert drafted.tolist() == plain.tolist()


@pytest.mark.parametrize("stops", [["\n"], ["ab", "zz"], ["e"]])
def test_stop_strings_leave_no_overshoot(byte_llama, tokenizer, stops):
    inputs = tokenizer("the cat sat on the mat\nthe cat", return_tensors="pt")
    target = tokenizer(
        "the cat sat on the mat\nthe cat sat abzze on\nthe end of it", return_tensors="pt"
    ).input_ids
    force = LogitsProcessorList([Forced(target)])
    options = {
        "max_new_tokens": 40,
        "do_sample": False,
        "stop_strings": stops,
        "tokenizer": tokenizer,
        "logits_processor": force,
    }
    plain = byte_llama.generate(**inputs, **options)
    assert plain.shape[1] < inputs.input_ids.shape[1] + 30, "the stop strings were not met"
    drafter = Prophet(target, accuracy=1.0)
    drafted = byte_llama.generate(
        **inputs, candidate_generator=drafter, max_draft_tokens=16, **options
    )
    assert drafted.tolist() == plain.tolist()
    assert drafter.stats.mat > 1.5


def test_streamers_get_what_plain_decoding_gives_them(llama, plain_ids):
    streamers = ListStreamer(), ListStreamer()
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    llama.generate(PROMPT, streamer=streamers[0], **options)
    options |= {"candidate_generator": Prophet(plain_ids, accuracy=0.8), "max_draft_tokens": 8}
    llama.generate(PROMPT, streamer=streamers[1], **options)
    assert streamers[0].puts == streamers[1].puts
    assert streamers[0].ended == streamers[1].ended == 1


@pytest.mark.parametrize("verification", ["tree", "chain"])
def test_scores_and_logits_match(llama, plain_ids, verification):
    options = {
        "max_new_tokens": 30,
        "do_sample": False,
        "repetition_penalty": 1.2,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    plain = llama.generate(PROMPT, **options)
    drafter = Prophet(plain.sequences, accuracy=0.8)
    options |= {"max_draft_tokens": 8, "verification": verification}
    drafted = llama.generate(PROMPT, candidate_generator=drafter, **options)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        mine, theirs = getattr(drafted, name), getattr(plain, name)
        assert isinstance(mine, tuple) and len(mine) == len(theirs)
        torch.testing.assert_close(torch.cat(mine), torch.cat(theirs), rtol=1e-4, atol=1e-4)
    assert drafted.scores[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("model_type", "verification"),
    [("llama", "tree"), ("llama", "chain"), ("mistral", "chain"), ("qwen3_next", "chain")],
)
def test_a_given_cache_is_gone_on_with_and_holds_all_but_the_last_token(
    models_by_type, model_type, verification
):
    model = models_by_type(model_type)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    texts = []
    for drafts in (False, True):
        cache = DynamicCache(config=model.config)
        ids = PROMPT
        for _turn in range(3):
            if drafts:
                options["candidate_generator"] = Prophet(texts[0], accuracy=0.8)
                options |= {"verification": verification, "max_draft_tokens": 8}
            ids = model.generate(ids, past_key_values=cache, **options)
            assert cache.get_seq_length() == ids.shape[1] - 1
            ids = torch.cat([ids, PROMPT[:, :4]], dim=-1)
        texts.append(ids)
    assert texts[0].tolist() == texts[1].tolist()


def test_cached_keys_and_values_equal_plain_decodings(llama, plain_ids):
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    caches = []
    for drafter in (None, Prophet(plain_ids, accuracy=0.9, branches=4)):
        cache = DynamicCache(config=llama.config)
        options |= {"candidate_generator": drafter, "max_draft_tokens": 8}
        llama.generate(PROMPT, past_key_values=cache, **options)
        caches.append(cache)
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys)
        torch.testing.assert_close(one.values, other.values)


def test_a_zero_budget_decodes_plainly(llama, plain_ids):
    drafter = Prophet(plain_ids, accuracy=1.0)
    drafted = llama.generate(
        PROMPT,
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        candidate_generator=drafter,
        max_draft_tokens=0,
    )
    assert drafted[0].tolist() == plain_ids[: PROMPT.shape[1] + 20].tolist()
    assert drafter.stats.drafted == 0
    assert drafter.stats.tokens == 20


def test_stats_add_up(llama, plain_ids):
    drafter = Prophet(plain_ids, accuracy=0.7)
    llama.generate(
        PROMPT,
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        candidate_generator=drafter,
        max_draft_tokens=8,
    )
    stats = drafter.stats
    assert stats.tokens == 40 == stats.accepted + stats.forward_passes
    assert sum(stats.accepted_lengths) == stats.forward_passes
    assert sum(n * count for n, count in enumerate(stats.accepted_lengths)) == stats.accepted
    assert min(stats.prefill_seconds, stats.drafting_seconds, stats.verifying_seconds) > 0


class Cancelled(Exception):
    pass


class CancellingStreamer(BaseStreamer):
    def __init__(self, tokens: int):
        self.left = tokens + 1  # the prompt comes first

    def put(self, value):
        if self.left == 0:
            raise Cancelled
        self.left -= 1

    def end(self):
        pass


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3_next"])
@pytest.mark.parametrize("tokens", [0, 4, 5, 6, 7, 8])
def test_a_cancelled_call_leaves_a_cache_to_go_on_from(models_by_type, model_type, tokens):
    model = models_by_type(model_type)
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    plain = model.generate(PROMPT, **options)
    cache = DynamicCache(config=model.config)
    drafter = Prophet(plain, accuracy=1.0)
    with pytest.raises(Cancelled):
        model.generate(
            PROMPT,
            past_key_values=cache,
            streamer=CancellingStreamer(tokens),
            candidate_generator=drafter,
            max_draft_tokens=8,
            **options,
        )
    length = PROMPT.shape[1] + tokens + 1  # the last one was chosen and not streamed
    assert cache.get_seq_length() < length
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    options["max_new_tokens"] = 29 - tokens
    gone_on = model.generate(plain[:, :length], past_key_values=cache, **options)
    assert gone_on.tolist() == plain.tolist()


def test_the_shortest_of_two_maximal_lengths_holds(llama, plain_ids):
    criteria = StoppingCriteriaList([MaxLengthCriteria(14), MaxLengthCriteria(20)])
    options = {"stopping_criteria": criteria, "do_sample": False, "eos_token_id": None}
    drafting = {"candidate_generator": Prophet(plain_ids, 1.0), "max_draft_tokens": 8}
    drafted = llama.generate(PROMPT, **drafting, **options)
    assert drafted.tolist() == llama.generate(PROMPT, **options).tolist()


class TooMuch(rs.Drafter):
    def draft(self, budget):
        return rs.DraftTree.chain([5] * (budget + 1))


class Nothing(rs.Drafter):
    def draft(self, budget):
        return None


@pytest.mark.parametrize("drafter", [TooMuch(), Nothing()])
def test_a_drafter_that_does_not_keep_to_its_budget_is_named(llama, drafter):
    with pytest.raises(ValueError, match=f"{type(drafter).__name__} was asked for .* at most 8"):
        llama.generate(PROMPT, max_new_tokens=10, candidate_generator=drafter, max_draft_tokens=8)


class BadTree(rs.Drafter):
    def draft(self, budget):
        return rs.DraftTree.chain(np.array([3, 10_000]))


def test_a_drafter_that_leaves_the_vocabulary_is_named(llama):
    with pytest.raises(ValueError, match="10000"):
        llama.generate(PROMPT, max_new_tokens=10, candidate_generator=BadTree())


class Failing(rs.Drafter):
    def draft(self, budget):
        raise KeyError("broken")


def test_an_exception_in_a_drafter_frees_it_for_the_next_call(llama):
    drafter = Failing()
    for _ in range(2):
        with pytest.raises(KeyError, match="broken"):
            llama.generate(PROMPT, max_new_tokens=10, candidate_generator=drafter)


def test_a_model_that_cannot_verify_streams_and_counts_as_plain_decoding_does(models_by_type):
    model = models_by_type("mamba")
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    streamers = ListStreamer(), ListStreamer()
    model.generate(PROMPT, streamer=streamers[0], **options)
    drafter = Noise()
    model.generate(PROMPT, streamer=streamers[1], candidate_generator=drafter, **options)
    assert streamers[0].puts == streamers[1].puts
    assert streamers[1].ended == 1
    assert (drafter.stats.tokens, drafter.stats.mat) == (12, 1.0)
