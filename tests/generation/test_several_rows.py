"""What only several rows have: refusals, sampling, ended rows, the width of the cache."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from architectures import small
from calls import Alternating, Call, ListStreamer, assert_lossless, up_to_end
from drafters import Noise, Prophets
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_refspec as rs
from hf_refspec.verification.cache import find_cache

UNEQUAL = [0.9, 0.2, 0.5, 1.0]  # accuracies of rows


@pytest.fixture(scope="module")
def call(llama) -> Call:
    return Call(llama, rows=4)


class StopAtLength(StoppingCriteria):
    """Keeps state: stops a row at the call that an id of the row's prompt says."""

    def __init__(self):
        self.asked = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.asked += 1
        return input_ids[:, 11] % 9 + 5 <= self.asked


class StopTogether(StoppingCriteria):
    """Keeps state for all rows: stops when each has had its token."""

    def __init__(self, tokens: list[int]):
        self.tokens = tokens
        self.done = [False] * len(tokens)

    def __call__(self, input_ids, scores, **kwargs):
        for row, token in enumerate(self.tokens):
            self.done[row] |= int(input_ids[row, -1]) == token
        return all(self.done)


class Recording(StoppingCriteria):
    """Records all that it is asked about, and stops nothing."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool)


CRITERIA = {
    "each row by itself": lambda plain: StopAtLength(),
    "all rows together": lambda plain: StopTogether(plain[:, [20, 17, 25, 14]].diagonal().tolist()),
    "none": lambda plain: Recording(),
}


@pytest.mark.parametrize("end", [None, 2, "a row's"])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_criteria_are_asked_about_all_rows_at_once_as_in_plain_decoding(call, criterion, end):
    """With an end-of-text token ended rows are padded; without one they go on."""
    end_id = int(call.plain[1, 16]) if end == "a row's" else end
    options = {"eos_token_id": end_id, "pad_token_id": 0, "return_dict_in_generate": True}
    outputs, seen = [], []
    for drafting in (
        {},
        {"candidate_generator": call.drafter(UNEQUAL), "max_draft_tokens": 8},
        {"candidate_generator": call.drafter(1.0), "max_draft_tokens": 8},
    ):
        recording = Recording()
        criteria = StoppingCriteriaList([CRITERIA[criterion](call.plain), recording])
        outputs.append(call.generate(**options, **drafting, stopping_criteria=criteria))
        seen.append(recording.seen)
    assert seen[0] == seen[1] == seen[2]
    if criterion != "none" and end is None:
        assert outputs[0].sequences.shape[1] < 12 + 32
    for output in outputs[1:]:
        assert output.sequences.tolist() == outputs[0].sequences.tolist()
        for one, other in zip(
            output.past_key_values.layers, outputs[0].past_key_values.layers, strict=True
        ):
            torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("end", [None, "a row's"])
def test_a_streamer_gets_the_tokens_of_all_rows_at_once_as_in_plain_decoding(llama, rows, end):
    call = Call(llama, rows)
    end_id = None if end is None else int(call.plain[-1, 16])
    streams = []
    for drafting in ({}, {"candidate_generator": call.drafter(UNEQUAL), "max_draft_tokens": 8}):
        streamer = ListStreamer()
        criteria = StoppingCriteriaList([CRITERIA["all rows together"](call.plain)])
        options = {"eos_token_id": end_id, "pad_token_id": 0, "stopping_criteria": criteria}
        ids = call.generate(**options, **drafting, streamer=streamer)
        assert streamer.puts[1:] == ids.T[12:].tolist()
        streams.append((streamer.puts, streamer.ended))
    assert streams[0] == streams[1]


def test_each_row_has_a_copy_of_a_processor_that_keeps_state(call):
    plain = call.generate(logits_processor=LogitsProcessorList([Alternating()]))
    drafter = Prophets(call.inputs, plain, UNEQUAL)
    given = Alternating()
    options = {"candidate_generator": drafter, "max_draft_tokens": 8}
    drafted = call.generate(logits_processor=LogitsProcessorList([given]), **options)
    assert drafted.tolist() == plain.tolist()
    assert given.calls == 0
    assert drafter.stats.mat > 1.2


@pytest.mark.parametrize(
    ("options", "sequences"),
    [
        ({"encoder_repetition_penalty": 3.0}, 1),
        ({"encoder_no_repeat_ngram_size": 1}, 1),
        ({"encoder_no_repeat_ngram_size": 1}, 2),
    ],
    ids=str,
)
def test_processors_that_hold_the_prompts_hold_that_of_their_row(call, options, sequences):
    options = {**options, "num_return_sequences": sequences, "do_sample": sequences > 1, "top_k": 1}
    plain = call.generate(**options)
    inputs = {name: each.repeat_interleave(sequences, 0) for name, each in call.inputs.items()}
    assert len({tuple(row) for row in plain.tolist()}) == 4
    assert plain[::sequences].tolist() != call.plain.tolist()
    drafter = Prophets(inputs, plain, 0.8)
    drafted = call.generate(**options, candidate_generator=drafter, max_draft_tokens=8)
    assert drafted.tolist() == plain.tolist()
    assert drafter.stats.mat > 1.2


class Uncopyable(LogitsProcessor):
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, input_ids, scores):
        return scores


REFUSED = {
    "`output_scores=True`": {"output_scores": True, "return_dict_in_generate": True},
    "`output_logits=True`": {"output_logits": True, "return_dict_in_generate": True},
    "EncoderRepetitionPenalty": {
        "encoder_repetition_penalty": 1.5,
        "num_return_sequences": 2,
        "do_sample": True,
    },
    "UnbatchedClassifierFreeGuidance": {"guidance_scale": 1.5},
    "`logits_processor` has a Uncopyable that cannot be copied": {
        "logits_processor": LogitsProcessorList([Uncopyable()])
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_rows_cannot_have_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call.generate(**REFUSED[message], candidate_generator=Noise())


def deviation(counts: np.ndarray, probs: np.ndarray) -> float:
    """How far counts are off what `probs` (of the same shape) say, in standard deviations of the
    chi-squared statistic; outcomes that are expected less than five times are taken together."""
    expected = probs * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    statistic = ((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    freedom = len(observed) - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


SAMPLING = {
    "temperature": {"temperature": 0.6, "top_k": 0},
    "top-k": {"temperature": 1.3, "top_k": 6},
    "top-p": {"top_p": 0.8, "top_k": 0},
}


@pytest.mark.parametrize("sampling", SAMPLING)
def test_sampled_tokens_are_distributed_as_the_model_says(sampling):
    """Three tokens of two prompts in hundreds of rows, against the model's own probabilities."""
    vocab_size, rows = 20, 600
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = small("llama", vocab_size=vocab_size, initializer_range=0.2, **shape)
    ids = torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5]]).repeat_interleave(rows // 2, dim=0)
    options = {"attention_mask": (ids != 0).long(), "do_sample": True, "eos_token_id": None}
    options |= SAMPLING[sampling]
    drafting = {"candidate_generator": Fan(), "max_draft_tokens": 30}
    calls = [model.generate(ids, max_new_tokens=3, **drafting, **options) for _ in range(4)]
    drafted = torch.cat(calls)
    wrong = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    for row in (0, -1):
        prompt = ids[row][None]
        sampled = drafted[(drafted[:, :5] == prompt).all(dim=-1)][:, 5:].numpy()  # (1200, 3)
        for first, second in ((0, 1), (1, 2)):
            counts = np.zeros((vocab_size, vocab_size))
            np.add.at(counts, (sampled[:, first], sampled[:, second]), 1)
            right = pair_probabilities(model, prompt, first, options)
            assert deviation(counts, right) < 4
            other = pair_probabilities(model, prompt, first, {**options, **wrong})
            assert deviation(counts, other) > 4


def pair_probabilities(model, prompt, skipped: int, options) -> np.ndarray:
    """The probability of each pair of new tokens after `skipped` others, by plain decoding."""
    options = {k: v for k, v in options.items() if k != "attention_mask"}
    vocab_size = model.config.vocab_size
    texts, weights = prompt, torch.ones(1)
    for _step in range(skipped + 2):
        scores = model.generate(
            texts,
            attention_mask=(torch.cumsum(texts != 0, dim=-1) > 0).long(),
            max_new_tokens=1,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        ).scores[0]
        weights = (weights[:, None] * scores.softmax(dim=-1)).flatten()
        tokens = torch.arange(vocab_size).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(vocab_size, dim=0), tokens], dim=-1)
    return weights.reshape(-1, vocab_size, vocab_size).sum(dim=0).numpy()


class Fan(rs.Drafter):
    """Drafts five tokens after the last one, and five after each of them."""

    def draft(self, budget):
        tokens = np.array([3, 4, 5, 6, 7] * 6)
        parents = np.repeat(np.arange(-1, 5), 5).astype(np.int32)
        return rs.DraftTree(tokens, parents, np.ones(30, dtype=np.float32))


def test_several_sequences_of_one_prompt_are_a_batch(llama, call):
    prompt = call.inputs["input_ids"][:1]
    torch.manual_seed(0)
    options = {"do_sample": True, "num_return_sequences": 3, "eos_token_id": None}
    options |= {"max_new_tokens": 32, "candidate_generator": rs.ReferenceCopy()}
    assert len({tuple(row) for row in llama.generate(prompt, **options).tolist()}) == 3
    greedy = llama.generate(prompt, **options, top_k=1)
    assert greedy.tolist() == call.plain[:1].repeat(3, 1).tolist()


def test_a_prompt_that_several_rows_have_is_run_once(call):
    """Rows of one prompt that are padded differently have two, for their positions differ."""
    ids = call.inputs["input_ids"][[0, 1, 0, 0, 1]]
    mask = torch.ones_like(ids)
    mask[3, 0] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    widths = []
    embeddings = call.model.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape))
    try:
        # It learns from prompts.
        assert_lossless(call.model, rs.TokenRecycling(), inputs)
    finally:
        hook.remove()
    assert (3, ids.shape[1]) in widths


class Counted(Prophets):
    """Logs each draft of a row in a list that all forks share."""

    def __init__(self, *args, log):
        super().__init__(*args)
        self.log = log

    def fork(self):
        fork = super().fork()
        fork.log = self.log
        return fork

    def draft(self, budget):
        self.log.append((self.prompt, self.observed[-1]))
        return super().draft(budget)

    def begin(self, prompt_ids, vocab_size):
        super().begin(prompt_ids, vocab_size)
        self.prompt = tuple(prompt_ids)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])  # packed, or in one rectangle
def test_ended_rows_draft_nothing_and_leave_the_passes(fresh_llama, attention):
    """The cache of a rectangle is as long as its longest row, however many nodes were rejected."""
    fresh_llama.set_attn_implementation(attention)
    call = Call(fresh_llama, rows=4)
    end = int(call.plain[1, 15])
    options = {"eos_token_id": end, "pad_token_id": 0}
    plain = call.generate(**options)
    log, passes = [], []
    drafter = Counted(call.inputs, call.plain, 0.2, log=log)
    drafting = {"candidate_generator": drafter, "max_draft_tokens": 4}
    call.generate(**options, **drafting)  # probes
    log.clear()

    def record(_, args, kwargs):
        passes.append((*kwargs["input_ids"].shape, find_cache(kwargs).get_seq_length()))

    record.only_reads = True  # so that findings about the model stay valid
    with fresh_llama.register_forward_pre_hook(record, with_kwargs=True):
        drafted = call.generate(**options, **drafting)
    assert drafted.tolist() == plain.tolist()
    assert log and all(last_token != end for _prompt, last_token in log)
    assert drafter.stats.tokens == sum(len(up_to_end(row[12:], [end])) for row in plain)
    passes = passes[-drafter.stats.forward_passes + 1 :]  # without the probe's and the prefill
    assert max(width for _, _, width in passes) <= 12 + 32 - 1
    if attention == "eager":
        rows = [rows for rows, _, _ in passes]
        assert rows == sorted(rows, reverse=True) and rows[0] == 4 > rows[-1]
    else:
        assert passes[0][1] > 3 * (1 + 4) >= passes[-1][1]  # the tokens of three rows at most


class Cancelling(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == 20:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_a_cancelled_call_leaves_the_prompts_in_the_cache(call):
    cache = DynamicCache(config=call.model.config)
    drafter = call.drafter([1.0, 0.1, 0.5, 0.5])
    for _ in range(2):  # the drafter is free again as well
        with pytest.raises(KeyboardInterrupt):
            call.generate(
                past_key_values=cache,
                stopping_criteria=StoppingCriteriaList([Cancelling()]),
                candidate_generator=drafter,
            )
        assert cache.get_seq_length() == 12
        cache.crop(-1)  # generate needs a token to begin with
    assert call.generate(past_key_values=cache).tolist() == call.plain.tolist()


def test_a_candidate_generator_drafts_for_each_row(call):
    generator = PromptLookupCandidateGenerator(num_output_tokens=6, max_matching_ngram_size=2)
    drafted = call.generate(candidate_generator=generator)
    assert drafted.tolist() == call.plain.tolist()


def test_a_prefill_of_several_rows_that_raises_raises_that(llama, monkeypatch):
    prompts = torch.full((3, 6), 20)
    options = {"max_new_tokens": 4, "do_sample": False, "candidate_generator": "auto"}
    llama.generate(prompts, **options)  # probes

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(llama, "_prefill", fail)
    with pytest.raises(KeyboardInterrupt):
        llama.generate(prompts, **options)
