"""Iterative RaLM with tiny models: whatever is speculated, the ids are those of the definition."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import hf_refspec as rs
from hf_refspec.ralm import iterative
from hf_refspec.ralm.checked_search import RalmError
from hf_refspec.ralm.iterative import PassageEntries
from hf_refspec.ralm.options import RalmSpeculation
from hf_refspec.ralm.stats import RalmStats
from hf_refspec.verification import passes
from tests.helpers.architectures import small
from tests.helpers.bag_of_tokens import BagOfTokens
from tests.helpers.drafters import Fixed
from tests.helpers.iterative_texts import BOS, GREEDY, PROMPT, by_definition, generate
from tests.helpers.pass_times import passes_take
from tests.helpers.passes import passes_of
from tests.helpers.walks import assert_no_search_goes_on

SPECULATIONS = [
    "",
    "p",
    "s",
    "a",
    "psa",
    RalmSpeculation.published("psa"),
    RalmSpeculation(stride=1, asynchronous=False),
    RalmSpeculation(stride=5, prefetch=2),
]


@pytest.fixture(scope="module")
def retriever() -> BagOfTokens:
    return BagOfTokens()


@pytest.mark.parametrize(
    "model_type",
    # Trees, ALiBi, a sliding window, running states, inexact passes over several tokens, no cache.
    ["llama", "gpt2", "bloom", "mistral", "mamba2", "lfm2", "mamba", "rwkv"],
)
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:, 1:]], ids=["bos", "no bos"])
def test_the_ids_are_those_of_the_definition(models_by_type, retriever, model_type, prompt):
    model = models_by_type(model_type)
    expected = by_definition(model, retriever, prompt, new_tokens=22)
    for speculation in (None, "", "psa"):
        for drafter in (None, rs.ReferenceCopy()):
            options = {"speculation": speculation, "drafter": drafter}
            ids = generate(model, retriever, prompt, max_new_tokens=22, **options, **GREEDY)
            assert ids[0].tolist() == expected


@pytest.fixture(scope="module")
def scored(llama, retriever):
    """A call's output with scores, its stats and the state of the random numbers after it."""

    @cache  # each speculation is compared with the same call without one
    def run(speculation, sample):
        torch.manual_seed(7)
        stats = RalmStats()
        options = {"max_new_tokens": 41, "do_sample": sample, "eos_token_id": None}
        returned = ("return_dict_in_generate", "output_scores", "output_logits")
        options |= dict.fromkeys(returned, True)
        output = generate(llama, retriever, speculation=speculation, ralm_stats=stats, **options)
        return output, stats, torch.get_rng_state()

    return run


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("speculation", SPECULATIONS, ids=str)
def test_speculation_changes_no_ids_and_not_one_bit_of_a_score(scored, speculation, sample):
    plain, plain_stats, plain_state = scored(None, sample)
    speculated, stats, state = scored(speculation, sample)
    assert speculated.sequences.tolist() == plain.sequences.tolist()
    assert torch.equal(torch.cat(speculated.scores), torch.cat(plain.scores))
    assert torch.equal(torch.cat(speculated.logits), torch.cat(plain.logits))
    assert len(plain.scores) == 41
    assert torch.equal(state, plain_state)
    assert stats.best_ids == plain_stats.best_ids
    assert plain_stats.steps == 11
    assert speculated.past_key_values is None


def test_passages_are_read_by_the_kernels_that_read_prompts(monkeypatch, llama, retriever):
    read, real = [], passes.pass_kernels

    def kernels(model, quantised, is_prefill=False):
        read.append(is_prefill)
        return real(model, quantised, is_prefill)

    monkeypatch.setattr(passes, "pass_kernels", kernels)
    generate(llama, retriever, max_new_tokens=12, **GREEDY)
    assert read.count(True) >= 2  # a passage, and the prompt after it


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**16),
    stride=st.integers(1, 9),
    query_length=st.integers(1, 20),
    speculation=st.sampled_from(SPECULATIONS),
    drafts=st.booleans(),
    model_type=st.sampled_from(["llama", "mistral", "mamba2"]),
)
def test_sampled_ids_are_those_of_the_baseline(
    models_by_type, retriever, seed, stride, query_length, speculation, drafts, model_type
):
    options = {
        "max_new_tokens": 18,
        "do_sample": True,
        "temperature": 0.7,
        "generation_stride": stride,
        "query_length": query_length,
    }
    model, results = models_by_type(model_type), []  # building it sets a seed
    for each, drafter in ((None, None), (speculation, rs.ReferenceCopy() if drafts else None)):
        torch.manual_seed(seed)
        ids = generate(model, retriever, speculation=each, drafter=drafter, **options)
        results.append((ids.tolist(), torch.get_rng_state().tolist()))
    assert results[0] == results[1]


def test_passes_behind_further_passages_are_as_narrow_as_behind_the_first(llama, retriever):
    with passes_take(float) as passes:
        generate(llama, retriever, drafter=Fixed(), max_new_tokens=40, **GREEDY)
    assert len(passes.sizes) > 16 and {*passes.sizes} == {1}


class WholeSpans(rs.ReferenceCopy):
    decides_length = True  # what passes cost does not cut its drafts


def test_a_drafter_saves_forward_passes(models_by_type, retriever):
    drafter = WholeSpans(published=True)
    options = {"max_new_tokens": 60, "repetition_penalty": 0.4, **GREEDY}  # below 1 it repeats
    model = models_by_type("gemma2")
    ids = generate(model, retriever, drafter=drafter, **options)
    assert ids.tolist() == generate(model, retriever, **options).tolist()
    assert drafter.stats.forward_passes < drafter.stats.tokens
    blend = drafter | "auto"
    assert generate(model, retriever, drafter=blend, **options).tolist() == ids.tolist()
    assert [source.name for source in blend.stats.sources][:2] == ["WholeSpans", "ReferenceCopy"]


def test_padding_is_not_seen(llama, retriever):
    expected = generate(llama, retriever, max_new_tokens=12, **GREEDY)[0].tolist()
    padded = torch.cat([torch.zeros((1, 3), dtype=torch.long), PROMPT], dim=-1)
    mask = (padded != 0).long()
    ids = generate(llama, retriever, padded, attention_mask=mask, max_new_tokens=12, **GREEDY)
    assert ids[0].tolist() == [0, 0, 0, *expected]


def test_the_bos_token_is_the_tokenizers(llama, retriever, tokenizer):
    expected = generate(llama, retriever, max_new_tokens=12, **GREEDY).tolist()
    options = {"max_new_tokens": 12, "tokenizer": tokenizer, **GREEDY}
    assert generate(llama, retriever, **options, bos_token_id=77).tolist() == expected


class OnePassage(BagOfTokens):
    def __init__(self, tokens):
        super().__init__(passages=1)
        self.passages = [np.array(tokens)]

    def encode(self, token_ids):
        return np.ones(16, dtype=np.float32)


def test_a_passage_that_is_too_long_is_cut_at_its_end():
    model = small("llama", max_position_embeddings=64)
    tokens = np.arange(3, 93)
    room = 64 - PROMPT.shape[1] - 20
    long = generate(model, OnePassage(tokens), max_new_tokens=20, **GREEDY).tolist()
    assert long == generate(model, OnePassage(tokens[:room]), max_new_tokens=20, **GREEDY).tolist()
    other = OnePassage(tokens[: room - 1])
    assert long != generate(model, other, max_new_tokens=20, **GREEDY).tolist()


def test_an_empty_passage_leaves_plain_generation(llama):
    plain = llama.generate(PROMPT, max_new_tokens=20, **GREEDY).tolist()
    empty = OnePassage(np.empty(0, dtype=np.int64))
    assert generate(llama, empty, max_new_tokens=20, **GREEDY).tolist() == plain


def test_passages_of_the_same_text_are_the_same(llama):
    retriever = BagOfTokens()
    plain = generate(llama, retriever, max_new_tokens=20, speculation=None, **GREEDY).tolist()
    retriever.passages = [*retriever.passages, *retriever.passages]
    retriever.vectors = np.concatenate([retriever.vectors] * 2)
    for speculation in (None, "psa"):
        options = {"max_new_tokens": 20, "speculation": speculation, **GREEDY}
        assert generate(llama, retriever, **options).tolist() == plain


@pytest.mark.parametrize("method", ["encode", "search", "score", "passage"])
def test_an_error_of_the_retriever_carries_the_text_so_far(llama, method):
    retriever, calls, original = BagOfTokens(), [], getattr(BagOfTokens, method)

    def failing(*args):
        calls.append(args)
        # A search scores as well, in its own thread.
        searching = threading.current_thread().name.startswith("retrieval")
        if len(calls) > 5 and searching == (method == "search"):
            raise ConnectionError("the server is gone")
        return original(retriever, *args)

    setattr(retriever, method, failing)
    options = {"max_new_tokens": 40, "generation_stride": 1, "query_length": 2, **GREEDY}
    plain = generate(llama, BagOfTokens(), **options)[0].tolist()
    with pytest.raises(RalmError, match=f"{method} raised.*the server is gone") as caught:
        generate(llama, retriever, **options, speculation=RalmSpeculation(stride=3))
    text_ids = caught.value.text_ids
    assert PROMPT.shape[1] <= len(text_ids) < len(plain)
    assert text_ids == plain[: len(text_ids)]
    assert_no_search_goes_on()


def test_a_text_begins_anew_if_ids_of_earlier_calls_are_known_no_more(llama):
    retriever, scored = BagOfTokens(), []

    def score(query, ids):
        if not threading.current_thread().name.startswith("retrieval"):
            scored.append(len(ids))
            if len(scored) == 2:  # the first step was guessed
                raise KeyError(ids[0])
        return BagOfTokens.score(retriever, query, ids)

    plain = generate(llama, retriever, max_new_tokens=20, speculation=None, **GREEDY).tolist()
    for _ in range(2):
        options = {"max_new_tokens": 20, "ralm_stats": (stats := RalmStats()), **GREEDY}
        options["speculation"] = RalmSpeculation(stride=3)  # guesses two steps, whatever they take
        assert generate(llama, retriever, **options).tolist() == plain
        assert stats.speculated == stats.verified + stats.mismatched + stats.discarded
        assert stats.searches == 1 + len(stats.strides)  # the initial retrieval
        retriever.score = score
    assert len(scored) > 2 and stats.discarded > 0


def test_tokens_outside_of_the_vocabulary_are_named(llama):
    with pytest.raises(RalmError, match=r"passage\(0\) has ids from 4 to 500.*vocabulary"):
        generate(llama, OnePassage([4, 500]), max_new_tokens=4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"generation_stride": 0}, ValueError, "generation_stride must be at least 1"),
        ({"query_length": 2.5}, TypeError, "query_length must be an int"),
        ({"speculation": "xyz"}, ValueError, "speculation must be of the letters"),
        ({"num_beams": 2}, ValueError, "`iterative_ralm` cannot be combined with `num_beams=2`"),
        ({"use_cache": False}, ValueError, "`iterative_ralm`.*`use_cache=False`"),
        ({"prompt": PROMPT.repeat(2, 1)}, ValueError, "one prompt at a time"),
        ({"past_key_values": DynamicCache()}, ValueError, "`(cache|past_key_values)` cannot"),
        ({"cache_implementation": "static"}, ValueError, "`iterative_ralm`.*a static cache"),
        ({"max_new_tokens": 600}, ValueError, "no room for a passage: LlamaForCausalLM takes 512"),
        ({"synced_gpus": True}, ValueError, "`synced_gpus=True`.*`iterative_ralm`"),
        ({"candidate_generator": rs.ReferenceCopy()}, ValueError, "`candidate_generator`"),
        ({"guidance_scale": 1.5}, ValueError, "it remembers tokens.*Pass `speculation=None`"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(llama, options, error, message):
    options = {"retriever": BagOfTokens(), "max_new_tokens": 4, **options}
    with pytest.raises(error, match=message):
        generate(llama, **options)


OTHER_PROMPT = torch.tensor([[BOS, 8, 44, 61, 8, 44]])
NEW_TOKENS = 22


@pytest.fixture
def fresh_retriever() -> BagOfTokens:
    return BagOfTokens()


def answer(model, retriever, prompt=PROMPT, **options) -> list[int]:
    options = {"max_new_tokens": NEW_TOKENS, "speculation": None, **GREEDY, **options}
    return generate(model, retriever, prompt, **options)[0].tolist()


@contextmanager
def passages_read(model, retriever):
    """Returns at each call the passages that the model has read until then, as tuples of ids."""
    known = {(BOS, *passage.tolist()) for passage in retriever.passages}
    with passes_of(model, seen=lambda ids: tuple(ids[0].tolist())) as passes:
        yield lambda: [ids for ids in passes if ids in known]


# Trees, ALiBi, eager attention, windows shorter than most passages, experts, chunks, layers of the
# cache that the model adds as it runs, no cache.
KEPT = ["llama", "gpt2", "bloom", "deepseek_v3", "mistral", "gemma2", "qwen3_moe", "llama4_text"]
KEPT += ["dory", "openai-gpt"]
RUNNING_STATES = ["mamba2", "mamba", "rwkv"]


@pytest.mark.parametrize("model_type", [*KEPT, *RUNNING_STATES])
def test_kept_passages_change_no_ids(models_by_type, fresh_retriever, model_type):
    model, prompts = models_by_type(model_type), (PROMPT, OTHER_PROMPT)
    first, other = (by_definition(model, fresh_retriever, each, NEW_TOKENS) for each in prompts)
    for speculation in (None, "psa"):
        reader = copy.deepcopy(model)
        for prompt, expected in ((PROMPT, first), (PROMPT, first), (OTHER_PROMPT, other)):
            assert answer(reader, fresh_retriever, prompt, speculation=speculation) == expected
        kept = len(PassageEntries.for_model(reader))
        assert kept == 0 if model_type in RUNNING_STATES else kept > 1


def test_a_passage_is_read_once_whatever_prompt_follows(fresh_llama, fresh_retriever):
    with passages_read(fresh_llama, fresh_retriever) as read:
        first = answer(fresh_llama, fresh_retriever)
        count = len(read())
        assert answer(fresh_llama, fresh_retriever) == first
        assert answer(fresh_llama, fresh_retriever, speculation="psa") == first
        assert len(read()) == len(set(read())) >= count > 0
        answer(fresh_llama, fresh_retriever, OTHER_PROMPT, max_new_tokens=40)
        assert len(read()) == len(set(read())) > count


def test_changed_passages_of_the_same_ids_are_read_again(fresh_llama, fresh_retriever):
    answer(fresh_llama, fresh_retriever)
    fresh_retriever.passages = [passage[::-1].copy() for passage in fresh_retriever.passages]
    expected = by_definition(fresh_llama, fresh_retriever, PROMPT, NEW_TOKENS)
    assert answer(fresh_llama, fresh_retriever) == expected


def change_in_place(model):
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(-1.5)


def write_data(model):
    """As libraries for training do."""
    model.model.embed_tokens.weight.data.mul_(-1.5)


def change_a_buffer(model):
    model.model.rotary_emb.inv_freq.mul_(3)


def load_state(model):
    weights = {name: value.flip(0) for name, value in model.state_dict().items()}
    model.load_state_dict(weights)


def replace_a_layer(model):
    model.model.layers[0].mlp.down_proj = torch.nn.Linear(48, 32, bias=False)


def hook_a_layer(model):
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * -1.5)


def change_nothing_but_the_format(model):
    model.to(torch.float64)


CHANGES = [change_in_place, write_data, change_a_buffer]
CHANGES += [load_state, replace_a_layer, hook_a_layer]


@pytest.mark.parametrize("change", [*CHANGES, change_nothing_but_the_format])
def test_a_changed_model_reads_its_passages_again(fresh_llama, fresh_retriever, change):
    before = answer(fresh_llama, fresh_retriever)
    change(fresh_llama)
    expected = by_definition(fresh_llama, fresh_retriever, PROMPT, NEW_TOKENS)
    assert answer(fresh_llama, fresh_retriever) == expected
    assert (expected != before) == (change in CHANGES)


def test_the_passage_used_longest_ago_makes_room(fresh_llama, fresh_retriever, monkeypatch):
    answer(fresh_llama, fresh_retriever)
    one = PassageEntries.for_model(fresh_llama).bytes // len(PassageEntries.for_model(fresh_llama))
    fresh_llama = copy.deepcopy(fresh_llama)
    weights = sum(parameter.nbytes for parameter in fresh_llama.parameters())
    room = 4 * one
    monkeypatch.setattr(iterative, "LEAST_BYTES", 0)
    monkeypatch.setattr(iterative, "FRACTION", room / weights)
    fresh_retriever = BagOfTokens(passages=60)
    options = {"generation_stride": 1, "query_length": 2, "max_new_tokens": 40}
    expected = answer(copy.deepcopy(fresh_llama), fresh_retriever, **options)
    with passages_read(fresh_llama, fresh_retriever) as read:
        assert answer(fresh_llama, fresh_retriever, **options) == expected
        kept, first = PassageEntries.for_model(fresh_llama), read()
        assert 0 < kept.bytes <= room
        assert len(kept) < len(set(first))
        answer(fresh_llama, fresh_retriever, **options)
        again = read()[len(first) :]
    assert first[-1] not in again[: len(kept) - 1]


def test_a_passage_larger_than_the_room_is_not_kept(fresh_llama, fresh_retriever, monkeypatch):
    monkeypatch.setattr(iterative, "LEAST_BYTES", 0)
    monkeypatch.setattr(iterative, "FRACTION", 1e-9)
    expected = by_definition(fresh_llama, fresh_retriever, PROMPT, NEW_TOKENS)
    assert answer(fresh_llama, fresh_retriever) == expected
    assert PassageEntries.for_model(fresh_llama).bytes == 0


def test_threads_share_the_passages_of_a_model(fresh_llama, fresh_retriever):
    prompts = [PROMPT, OTHER_PROMPT, PROMPT[:, :7], PROMPT[:, 2:]]
    expected = [
        by_definition(fresh_llama, fresh_retriever, prompt, NEW_TOKENS) for prompt in prompts
    ]

    def answers(prompt):
        return [answer(fresh_llama, BagOfTokens(), prompt) for _ in range(2)]

    with ThreadPoolExecutor(len(prompts)) as threads:
        for found, ids in zip(threads.map(answers, prompts), expected, strict=True):
            assert found == [ids, ids]
    kept = PassageEntries.for_model(fresh_llama)
    sizes = [size for _, size in kept._kept.values()]
    assert kept.bytes == sum(sizes)


def test_copies_and_pickles_of_a_model_begin_with_no_passage(fresh_llama, fresh_retriever):
    answer(fresh_llama, fresh_retriever)
    assert len(PassageEntries.for_model(fresh_llama)) > 0
    assert len(PassageEntries.for_model(copy.deepcopy(fresh_llama))) == 0
