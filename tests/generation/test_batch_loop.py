"""Several rows at once give what plain batched `generate` gives, however unequal their drafts."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, VOCAB_SIZE
from calls import ListStreamer
from drafters import Noise, Prophets
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_refspec as rs
from hf_refspec.verification import tree as tree_verification
from hf_refspec.verification.facts import facts_about
from hf_refspec.verification.tree import TreeVerifier

TREES = [a for a in ARCHITECTURES if a.verification == "tree"]
OTHERS = [a for a in ARCHITECTURES if a.verification != "tree"]
PADDING = (0, 5, 2, 9, 0)


def padded_prompts(rows: int, length: int = 12, seed: int = 1) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB_SIZE, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in enumerate(PADDING[:rows]):
        ids[row, :padding] = 0
        mask[row, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("architecture", TREES, ids=str)
def test_greedy_ids_equal_plain_batched_generates(architecture, models_by_type):
    model = models_by_type(architecture.model_type)
    for rows in (2, 5):
        inputs = padded_prompts(rows, seed=rows)
        options = {**inputs, "max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
        plain = model.generate(**options)
        unequal = Prophets(inputs, plain, np.linspace(0.95, 0.2, rows))
        chains = {"candidate_generator": unequal, "verification": "chain"}
        options["max_draft_tokens"] = 12
        assert model.generate(**options, **chains).tolist() == plain.tolist()
        for drafter in (Noise(), unequal):
            drafted = model.generate(**options, candidate_generator=drafter)
            assert drafted.tolist() == plain.tolist(), type(drafter).__name__
        assert unequal.stats.mat > 1.2


@pytest.mark.parametrize("architecture", OTHERS, ids=str)
def test_a_model_without_exact_trees_is_decoded_plainly(architecture, models_by_type, caplog):
    model = models_by_type(architecture.model_type)
    options = {**padded_prompts(3), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**options)
    drafter = Noise()
    drafted = model.generate(**options, candidate_generator=drafter)
    assert drafted.tolist() == plain.tolist()
    assert "decoding plainly" in caplog.text
    assert (drafter.stats.tokens, drafter.stats.mat) == (18, 1.0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3_moe"])
def test_eager_attention_and_sdpa_both_give_the_same_ids(model_type, attention, models_by_type):
    model = models_by_type(model_type)
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        inputs = padded_prompts(3)
        options = {**inputs, "max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
        plain = model.generate(**options)
        drafter = Prophets(inputs, plain, [0.9, 0.5, 0.1])
        drafted = model.generate(**options, candidate_generator=drafter)
        assert drafted.tolist() == plain.tolist()
    finally:
        model.set_attn_implementation(before)


INPUTS = padded_prompts(4)
GREEDY = {**INPUTS, "max_new_tokens": 32, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def plain_ids(llama) -> torch.Tensor:
    return llama.generate(**GREEDY)


@settings(max_examples=30, deadline=None)
@given(
    accuracies=st.lists(st.floats(0, 1), min_size=4, max_size=4),
    branches=st.integers(0, 5),
    seed=st.integers(0, 2**16),
    budget=st.one_of(st.just("auto"), st.integers(0, 20)),
    verification=st.sampled_from(["auto", "tree", "chain"]),
    eos_place=st.integers(12, 43),
)
def test_no_drafts_change_greedy_ids(
    llama, plain_ids, accuracies, branches, seed, budget, verification, eos_place
):
    options = {**GREEDY, "eos_token_id": plain_ids[:2, eos_place].tolist(), "pad_token_id": 0}
    plain = llama.generate(**options)
    drafter = Prophets(INPUTS, plain_ids, accuracies, branches, seed)
    drafted = llama.generate(
        **options,
        candidate_generator=drafter,
        max_draft_tokens=budget,
        verification=verification,
    )
    assert drafted.tolist() == plain.tolist()
    stats = drafter.stats
    assert stats.tokens == stats.accepted + sum(stats.accepted_lengths)
    assert stats.tokens <= plain[:, 12:].numel()


@pytest.mark.parametrize("place", range(13, 40, 3))
@pytest.mark.parametrize("accuracy", [1.0, 0.6])
def test_rows_end_by_end_of_text_at_different_times(llama, plain_ids, place, accuracy):
    ends = plain_ids[:, place].tolist()[:3]
    options = {**GREEDY, "eos_token_id": ends, "pad_token_id": 7}
    plain = llama.generate(**options)
    drafter = Prophets(INPUTS, plain_ids, accuracy)
    drafted = llama.generate(**options, candidate_generator=drafter)
    assert drafted.tolist() == plain.tolist()


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 9, 10])
def test_max_new_tokens_is_never_overrun(llama, plain_ids, new_tokens):
    options = {**GREEDY, "max_new_tokens": new_tokens}
    drafter = Prophets(INPUTS, plain_ids, [1.0, 0.5, 0.0, 1.0])
    drafted = llama.generate(**options, candidate_generator=drafter)
    assert drafted.tolist() == plain_ids[:, : 12 + new_tokens].tolist()


class ForcedRows(LogitsProcessor):
    """Makes the model say one of some texts, each row that which begins as it does."""

    def __init__(self, texts: torch.Tensor):
        self.texts = texts

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -float("inf"))
        for row, ids in enumerate(input_ids):
            length = min(len(ids), self.texts.shape[1] - 1)
            text = (self.texts[:, :8] == ids[:8]).all(dim=-1).nonzero()[0, 0]
            forced[row, self.texts[text, length]] = 0
        return forced


@pytest.mark.parametrize("eos_token_id", [2, None])
@pytest.mark.parametrize("stops", [["\n"], ["ab", "sat o"], ["e"], ["never"]])
def test_stop_strings_end_each_row_as_plain_generate_does(
    byte_llama, tokenizer, stops, eos_token_id
):
    """Without an end-of-text token an ended row goes on until all have ended."""
    tokenizer.padding_side = "left"
    texts = tokenizer(
        [
            "the cat sat on the mat\nthe cat sat abzze on\nthe end of it",
            "a dog ran to a dog ran absolutely not to the end of a dog ",
            "no, it is one more of those days that go on and on and go ",
        ],
        padding=True,
        return_tensors="pt",
    )
    inputs = {name: texts[name][:, :25] for name in ("input_ids", "attention_mask")}
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
    drafter = Prophets(inputs, texts["input_ids"], [1.0, 0.3, 0.8])
    drafted = byte_llama.generate(**options, candidate_generator=drafter, max_draft_tokens=8)
    assert drafted.tolist() == plain.tolist()


class StopAtLength(StoppingCriteria):
    """Keeps state: stops a row once it has been asked as often as the row's first id says."""

    def __init__(self):
        self.asked = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.asked += 1
        return input_ids[:, 11] % 9 + 5 <= self.asked


def test_criteria_that_keep_state_have_one_for_each_row(llama, plain_ids):
    options = {**GREEDY, "eos_token_id": 2, "pad_token_id": 0}
    criteria = [StoppingCriteriaList([StopAtLength()]) for _ in range(2)]
    plain = llama.generate(**options, stopping_criteria=criteria[0])
    assert plain.shape[1] < 12 + 32
    drafter = Prophets(INPUTS, plain_ids, [0.9, 0.2, 0.5, 1.0])
    drafted = llama.generate(**options, stopping_criteria=criteria[1], candidate_generator=drafter)
    assert drafted.tolist() == plain.tolist()


class Alternating(LogitsProcessor):
    """Keeps state: forbids even tokens at every second call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls % 2:
            scores[:, ::2] = -float("inf")
        return scores


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
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 14, 15], ngram_len=3)
    },
}


@pytest.mark.parametrize("processed", PROCESSED)
def test_logits_processors_see_each_rows_prefix(llama, processed):
    options = {**GREEDY, **PROCESSED[processed]}
    if processed == "SynthID":
        options["do_sample"], options["top_k"] = True, 1
    plain = llama.generate(**options)
    for accuracies in ([0.9, 0.2, 0.5, 1.0], 0.0):
        drafter = Prophets(INPUTS, plain, accuracies)
        drafted = llama.generate(**options, candidate_generator=drafter)
        assert drafted.tolist() == plain.tolist()


def test_processors_that_keep_state_have_one_for_each_row(llama):
    plain = llama.generate(**GREEDY, logits_processor=LogitsProcessorList([Alternating()]))
    drafter = Prophets(INPUTS, plain, [0.9, 0.2, 0.5, 1.0])
    given_processor = Alternating()
    drafted = llama.generate(
        **GREEDY,
        logits_processor=LogitsProcessorList([given_processor]),
        candidate_generator=drafter,
    )
    assert drafted.tolist() == plain.tolist()
    assert given_processor.calls == 0
    assert drafter.stats.mat > 1.2


class Uncopyable(LogitsProcessor):
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, input_ids, scores):
        return scores


REFUSED = {
    "a streamer": ({"streamer": ListStreamer()}, "4 rows cannot be combined with `streamer`"),
    "scores": (
        {"output_scores": True, "return_dict_in_generate": True},
        "`output_scores=True`",
    ),
    "logits": (
        {"output_logits": True, "return_dict_in_generate": True},
        "`output_logits=True`",
    ),
    "guidance": ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
    "prompt penalties": ({"encoder_repetition_penalty": 1.5}, "EncoderRepetitionPenalty"),
    "a processor that cannot be copied": (
        {"logits_processor": LogitsProcessorList([Uncopyable()])},
        "`logits_processor` has a Uncopyable that cannot be copied",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_rows_cannot_have_is_refused(llama, case):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        llama.generate(**{**GREEDY, **options}, candidate_generator=Noise())


def test_dropout_at_work_is_decoded_plainly():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.3,
        pad_token_id=0,
    )
    model, texts = LlamaForCausalLM(config).train(), []
    for drafter in (None, Noise()):
        torch.manual_seed(1)
        texts.append(model.generate(**GREEDY, candidate_generator=drafter).tolist())
    assert texts[0] == texts[1]


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
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5]]).repeat_interleave(rows // 2, dim=0)
    options = {
        "attention_mask": (ids != 0).long(),
        "do_sample": True,
        "eos_token_id": None,
        **SAMPLING[sampling],
    }
    drafted = torch.cat(
        [
            model.generate(
                ids, max_new_tokens=3, candidate_generator=Fan(), max_draft_tokens=30, **options
            )
            for _ in range(4)
        ]
    )
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


def test_several_sequences_of_one_prompt_are_a_batch(llama):
    prompt = INPUTS["input_ids"][:1]
    torch.manual_seed(0)
    options = {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 3}
    drafted = llama.generate(prompt, candidate_generator=rs.ReferenceCopy(), **options)
    assert drafted.shape == (3, 24)
    assert len({tuple(row) for row in drafted.tolist()}) == 3
    greedy = llama.generate(prompt, max_new_tokens=12, do_sample=False)
    options |= {"top_k": 1}
    drafted = llama.generate(prompt, candidate_generator=rs.ReferenceCopy(), **options)
    assert drafted.tolist() == greedy.repeat(3, 1).tolist()


def test_equal_rows_give_equal_texts(llama, plain_ids):
    ids = INPUTS["input_ids"][:1].repeat(3, 1)
    for drafter in (Noise(), rs.ReferenceCopy()):
        drafted = llama.generate(
            ids,
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
            candidate_generator=drafter,
        )
        assert drafted.tolist() == plain_ids[:1].repeat(3, 1).tolist()


@pytest.fixture
def passes(monkeypatch):
    """The rows of each pass after the prefill, and the widths of the cache and its longest row."""
    seen = []
    run = TreeVerifier._run

    def recorded(self, rows, drafts):
        seen.append((len(drafts), self.cache.get_seq_length(), self.cached.max()))
        assert self.cache.layers[0].keys.shape[0] == len(drafts)
        return run(self, rows, drafts)

    monkeypatch.setattr(TreeVerifier, "_run", recorded)
    return seen


def test_the_cache_is_never_wider_than_its_longest_row(llama, plain_ids, passes):
    drafter = Prophets(INPUTS, plain_ids, [1.0, 0.0, 0.5, 0.3])
    llama.generate(**GREEDY, candidate_generator=drafter, max_draft_tokens=12)
    assert len(passes) > 10
    assert all(width == longest for _rows, width, longest in passes)
    assert max(longest for _rows, _width, longest in passes) <= 12 + 32 - 1


class Counted(Prophets):
    """Notes in a list that all forks share when each row drafts."""

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


def test_rows_that_have_ended_draft_nothing_and_leave_the_passes(llama, plain_ids, passes):
    end = int(plain_ids[1, 15])
    options = {**GREEDY, "eos_token_id": end, "pad_token_id": 0}
    plain = llama.generate(**options)
    log = []
    drafter = Counted(INPUTS, plain_ids, 0.2, log=log)
    drafted = llama.generate(**options, candidate_generator=drafter, max_draft_tokens=4)
    assert drafted.tolist() == plain.tolist()
    assert log
    assert all(last_token != end for _prompt, last_token in log)
    rows = [rows for rows, _width, _longest in passes]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] == 4 > rows[-1]
    assert drafter.stats.tokens == sum(1 + row.tolist().index(end) for row in ended(plain, end))


def ended(plain: torch.Tensor, end: int):
    """The new tokens of each row, with an end of text behind those that have none."""
    for row in plain[:, 12:]:
        yield row if end in row.tolist() else torch.cat([row[1:], torch.tensor([end])])


def test_the_returned_cache_is_plain_generates(llama, plain_ids):
    options = {
        **GREEDY,
        "eos_token_id": [int(plain_ids[1, 15]), int(plain_ids[2, 30])],
        "pad_token_id": 0,
        "return_dict_in_generate": True,
    }
    plain = llama.generate(**options)
    drafter = Prophets(INPUTS, plain_ids, [0.9, 0.5, 0.1, 0.7], branches=4)
    drafted = llama.generate(**options, candidate_generator=drafter)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    pairs = zip(plain.past_key_values.layers, drafted.past_key_values.layers, strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.values, other.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_given_cache_is_gone_on_with(models_by_type, model_type):
    model = models_by_type(model_type)
    texts = []
    for drafts in (False, True):
        cache = DynamicCache(config=model.config)
        ids, mask = INPUTS["input_ids"], INPUTS["attention_mask"]
        options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
        for _turn in range(3):
            if drafts:
                options["candidate_generator"] = rs.ReferenceCopy()
            ids = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
            assert cache.get_seq_length() == ids.shape[1] - 1
            ids = torch.cat([ids, INPUTS["input_ids"][:, -3:]], dim=-1)
            mask = torch.cat([mask, mask.new_ones((4, ids.shape[1] - mask.shape[1]))], dim=-1)
        texts.append(ids.tolist())
    assert texts[0] == texts[1]


class Cancelled(Exception):
    pass


class Cancelling(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == 20:
            raise Cancelled
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_a_cancelled_call_leaves_the_prompts_in_the_cache(llama, plain_ids):
    cache = DynamicCache(config=llama.config)
    drafter = Prophets(INPUTS, plain_ids, [1.0, 0.1, 0.5, 0.5])
    for _ in range(2):  # the drafter is free again as well
        with pytest.raises(Cancelled):
            llama.generate(
                **GREEDY,
                past_key_values=cache,
                stopping_criteria=StoppingCriteriaList([Cancelling()]),
                candidate_generator=drafter,
            )
        assert cache.get_seq_length() == 12
        cache.crop(-1)  # generate needs a token to begin with
    assert llama.generate(**GREEDY, past_key_values=cache).tolist() == plain_ids.tolist()


def test_a_candidate_generator_drafts_for_each_row(llama, plain_ids):
    generator = PromptLookupCandidateGenerator(num_output_tokens=6, max_matching_ngram_size=2)
    drafted = llama.generate(**GREEDY, candidate_generator=generator)
    assert drafted.tolist() == plain_ids.tolist()


@pytest.mark.parametrize(
    "drafter",
    [
        rs.ReferenceCopy(references=[[5, 6, 7, 8]]),
        rs.ReferenceCopy() | rs.ReferenceCopy(references=[[5, 6, 7, 8]]),
    ],
    ids=["ReferenceCopy", "Blend"],
)
def test_forks_draft_independently(drafter):
    prompts = [np.array([1, 2, 3, 1]), np.array([9, 5]), np.array([4, 3, 4])]
    with drafter.sessions(prompts, vocab_size=50) as rows:
        assert rows[0] is drafter
        assert len(set(map(id, rows))) == 3
        drafts = [row.draft(2).tokens.tolist() for row in rows]
        assert drafts == [[2, 3], [6, 7], [3, 4]]
        rows[1].observe(np.array([40, 41, 40]), rs.DraftTree.empty(), None)
        assert rows[1].draft(1).tokens.tolist() == [41]
        assert rows[0].draft(2).tokens.tolist() == [2, 3]
        with pytest.raises(RuntimeError, match="in use"), drafter.session(prompts[0], 50):
            pass
    with drafter.sessions(prompts[:1], vocab_size=50) as rows:
        assert rows[0].draft(2).tokens.tolist() == [2, 3]


def test_a_move_to_wrong_places_is_found_out(monkeypatch, models_by_type, caplog):
    model = models_by_type("qwen2")
    facts_about(model).clear()
    monkeypatch.setattr(tree_verification, "move_entries", lambda *_: None)
    with pytest.raises(ValueError, match=r"`verification='tree'` is not exact .* with 4 rows"):
        model.generate(**GREEDY, candidate_generator=Noise(), verification="tree")
    plain = model.generate(**GREEDY)
    assert model.generate(**GREEDY, candidate_generator=Noise()).tolist() == plain.tolist()
    assert "decoding plainly" in caplog.text
    facts_about(model).clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3_moe"])
def test_short_types_are_not_refused(model_type, dtype, models_by_type):
    model = models_by_type(model_type)
    model = type(model)(model.config).to(dtype).eval()
    drafted = model.generate(**GREEDY, candidate_generator=rs.ReferenceCopy())
    assert drafted.shape == (4, 44)
