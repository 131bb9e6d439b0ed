"""`generate_batch` with drafts emits what it emits without them, and what `generate` emits of each
prompt alone, whatever is scheduled with what."""

from __future__ import annotations

import logging
import time
from functools import cache

import numpy as np
import pytest
import torch
from architectures import VOCAB_SIZE
from drafters import Noise
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import requests, scheduler
from transformers.generation.continuous_batching.cache import PagedAttentionCache

import hf_refspec as rs
from hf_refspec import Drafter, DraftTree

logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
NEW_TOKENS = 24
COMMON = [(7 * i) % 90 + 3 for i in range(20)]  # two and a half pages
PROMPTS = [[5, 9, 12, 7, 5, 9], [*COMMON, 4], [*COMMON, 8, 9], COMMON[:17], [33], [*COMMON[:9], 3]]


_FIELDS = ContinuousBatchingConfig.__dataclass_fields__


class Knowing(Drafter):
    """Drafts texts that it knows, each token right with a given chance, beside wrong siblings that
    it may hold more probable."""

    def __init__(self, texts: list[list[int]], accuracy: float = 0.8, top_k: int = 0):
        self.texts = texts
        self.accuracy = accuracy
        self.observed_top_k = top_k
        self.seen = []  # of all forks

    def fork(self):
        fork = Knowing(self.texts, self.accuracy, self.observed_top_k)
        fork.seen = self.seen
        return fork

    def begin(self, prompt_ids, vocab_size):
        self.text = prompt_ids.tolist()
        self.rng = np.random.default_rng(len(self.text))

    def observe(self, observation):
        self.text += observation.tokens.tolist()
        self.seen.append(observation)

    def draft(self, budget):
        tokens, parents, probs, parent, prob = [], [], [], -1, 1.0
        for token in self.known(budget).tolist():
            for wrong in range(self.rng.integers(0, 3)):
                tokens.append((token + 1 + wrong) % VOCAB_SIZE)
                parents.append(parent)
                probs.append(prob * self.rng.random())
            if self.rng.random() >= self.accuracy:
                break
            prob *= self.rng.random()
            tokens, parents, probs = [*tokens, token], [*parents, parent], [*probs, prob]
            parent = len(tokens) - 1
        columns = (np.array(each[:budget]) for each in (tokens, parents, probs))
        types = np.int64, np.int32, np.float32
        return DraftTree(
            *(column.astype(kind) for column, kind in zip(columns, types, strict=True))
        )

    def draft_chain(self, budget):
        chain = self.known(budget)
        wrong = self.rng.random(len(chain)) >= self.accuracy
        return DraftTree.chain(np.where(wrong, (chain + 1) % VOCAB_SIZE, chain))

    def known(self, budget):
        length = len(self.text)
        known = next((text for text in self.texts if text[:length] == self.text), [])
        return np.array(known[length : length + budget], dtype=np.int64)


def small(**options) -> ContinuousBatchingConfig:
    """A cache of few, short pages."""
    options = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 64, **options}
    if "page_size" not in _FIELDS:  # transformers 5.17
        options["block_size"] = options.pop("page_size")
    return ContinuousBatchingConfig(**options)


def greedy(**options) -> GenerationConfig:
    base = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": -1}
    return GenerationConfig(**{**base, **options})


def batch(model, prompts=PROMPTS, config=None, batching=None, **options):
    """The outputs of all prompts."""
    outputs = model.generate_batch(
        prompts,
        generation_config=greedy() if config is None else config,
        continuous_batching_config=small() if batching is None else batching,
        **options,
    )
    assert all(output.error is None for output in outputs.values())
    return outputs


def tokens(outputs) -> list[list[int]]:
    return [output.generated_tokens for output in outputs.values()]


def results(manager, request_ids) -> list[list[int]]:
    """The tokens of requests, once all have ended."""
    outputs = {}
    while len(outputs) < len(request_ids):
        output = manager.get_result(timeout=1)
        if output is not None:
            outputs[output.request_id] = output.generated_tokens
    return [outputs[each] for each in request_ids]


@pytest.fixture(scope="module")
def texts(llama):
    """Prompt and output of each prompt alone."""
    options = {"max_new_tokens": 2 * NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    return [llama.generate(torch.tensor([each]), **options)[0].tolist() for each in PROMPTS]


@pytest.fixture(scope="module")
def alone(texts):
    """The output of each."""
    return [text[len(p) :][:NEW_TOKENS] for p, text in zip(PROMPTS, texts, strict=True)]


@pytest.mark.parametrize("verification", ["tree", "chain"])
@pytest.mark.parametrize(
    ("attention", "max_draft_tokens"), [("sdpa", "auto"), ("sdpa", 1), ("sdpa", 6), ("eager", 6)]
)
def test_tokens_are_those_of_a_batch_without_drafts(
    fresh_llama, texts, alone, attention, max_draft_tokens, verification
):
    fresh_llama.set_attn_implementation(attention)
    plain = tokens(batch(fresh_llama))
    assert plain == alone
    for drafter in (Knowing(texts), Noise(), rs.ReferenceCopy()):
        options = {"max_draft_tokens": max_draft_tokens, "verification": verification}
        assert tokens(batch(fresh_llama, candidate_generator=drafter, **options)) == plain
        assert drafter.stats.tokens == NEW_TOKENS * len(PROMPTS)
    assert fresh_llama.config._attn_implementation == attention


def test_a_right_draft_saves_passes(llama, texts):
    drafter = Knowing(texts, 1.0)
    options = {"candidate_generator": drafter, "max_draft_tokens": 6}
    batch(llama, verification="chain", **options)
    assert drafter.stats.drafted == drafter.stats.accepted > 0
    assert drafter.stats.forward_passes < NEW_TOKENS / 2


def test_a_right_branch_saves_passes_also_behind_wrong_ones(llama, texts):
    drafter = Knowing(texts, 1.0)
    batching = small(page_size=64, num_blocks=16, max_batch_tokens=128)
    batch(llama, batching=batching, candidate_generator=drafter, max_draft_tokens=12)
    assert drafter.stats.drafted > 1.5 * drafter.stats.accepted
    assert drafter.stats.forward_passes < NEW_TOKENS / 2


@pytest.mark.parametrize("drafter", ["auto", rs.ReferenceCopy() | rs.TokenRecycling()], ids=str)
def test_sources_of_the_default(llama, texts, drafter):
    plain = tokens(batch(llama))
    for _ in range(2):
        drafted = batch(llama, candidate_generator=drafter, max_draft_tokens=6)
        assert tokens(drafted) == plain
    if drafter != "auto":
        assert drafter.stats.sources[1].accepted > 0


def test_drafters_observe_each_token_once_with_what_the_target_expected(llama, texts):
    drafter = Knowing(texts, 0.7, top_k=4)
    outputs = batch(llama, candidate_generator=drafter, max_draft_tokens=5)
    emitted = [token for seen in drafter.seen for token in seen.tokens.tolist()]
    assert sorted(emitted) == sorted(token for each in tokens(outputs) for token in each)
    for seen in drafter.seen:
        assert seen.logits.shape == (1 + len(seen.verified), VOCAB_SIZE)
        assert seen.top_tokens.shape == seen.top_probs.shape == (1 + len(seen.verified), 4)
        chosen = seen.logits.argmax(dim=-1).numpy()
        assert (chosen == seen.top_tokens[:, 0]).all()
        node, children = -1, seen.verified.children()
        for token in seen.tokens.tolist():
            assert chosen[node + 1] == token
            node = children.get((node, token))


@pytest.mark.parametrize("place", [0, 1, 5, 11])
def test_ends_of_text_and_limits_in_the_middle_of_a_draft(llama, texts, place):
    ends = sorted({text[len(p) + place] for p, text in zip(PROMPTS, texts, strict=True)})
    for config in (greedy(eos_token_id=ends), greedy(max_new_tokens=place + 1)):
        drafter = Knowing(texts, 1.0)
        drafted = batch(llama, config=config, candidate_generator=drafter, max_draft_tokens=8)
        assert tokens(drafted) == tokens(batch(llama, config=config))
        assert drafter.stats.tokens == sum(map(len, tokens(drafted)))


@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
def test_drafts_take_no_token_of_a_pass_from_others(
    llama, texts, alone, monkeypatch, scheduler_type
):
    """Prompts are read by the same passes as without drafts, which have room for ten tokens."""
    kind = scheduler.SCHEDULER_MAPPING[scheduler_type]
    scheduled, process = [], kind._process_candidates

    def noting(self, *args):
        returned = process(self, *args)
        scheduled[-1].append([(f.state.request_id, f.query_length) for f in returned[0]])
        return returned

    monkeypatch.setattr(kind, "_process_candidates", noting)
    batching = small(max_batch_tokens=10, scheduler_type=scheduler_type, allow_block_sharing=False)
    for drafter in (None, Knowing(texts, 0.0)):  # none is right: all takes as many passes
        scheduled.append([])
        drafted = batch(llama, batching=batching, candidate_generator=drafter, max_draft_tokens=6)
        assert tokens(drafted) == [
            t[len(p) :][:NEW_TOKENS] for p, t in zip(PROMPTS, texts, strict=True)
        ]
    assert drafter.stats.drafted > 0
    assert scheduled[0] == scheduled[1]


def test_shared_pages_hold_no_rejected_token(llama, texts, monkeypatch):
    """Later requests read the pages that earlier ones have written, output included."""
    found, search = [], PagedAttentionCache.search_prefix_match
    monkeypatch.setattr(
        PagedAttentionCache,
        "search_prefix_match",
        lambda *args: found.append(search(*args)) or found[-1],
    )
    prompts = [text[: len(p) + 20] for p, text in zip(PROMPTS, texts, strict=True)]
    expected = [text[len(p) :][:NEW_TOKENS] for p, text in zip(prompts, texts, strict=True)]
    with llama.continuous_batching_context_manager(
        generation_config=greedy(),
        continuous_batching_config=small(),
        candidate_generator=Knowing(texts, 0.6),
        max_draft_tokens=6,
    ) as manager:
        results(manager, manager.add_requests(PROMPTS))
        found.clear()
        assert results(manager, manager.add_requests(prompts)) == expected
    assert sum(found) > sum(len(each) // 8 * 8 for each in PROMPTS)


@pytest.mark.parametrize("cpu_offload_space", [0.0, 0.01])
def test_requests_that_leave_the_cache_and_come_back(
    llama, texts, alone, monkeypatch, cpu_offload_space
):
    empty = torch.empty  # pinned memory needs a GPU
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **k: empty(*sizes, **k))
    resets, create = [], requests.RequestState.create_equivalent_initial_request
    monkeypatch.setattr(
        requests.RequestState,
        "create_equivalent_initial_request",
        lambda self: resets.append(self.request_id) or create(self),
    )
    batching = small(num_blocks=17, cpu_offload_space=cpu_offload_space, allow_block_sharing=False)
    drafter = Knowing(texts, 0.8)
    drafted = batch(llama, batching=batching, candidate_generator=drafter, max_draft_tokens=6)
    assert tokens(drafted) == [
        t[len(p) :][:NEW_TOKENS] for p, t in zip(PROMPTS, texts, strict=True)
    ]
    assert drafter.stats.accepted > 0
    assert bool(resets) == (cpu_offload_space == 0)


def test_forks_of_a_prompt(llama, texts):
    config = greedy(do_sample=True, top_k=1, num_return_sequences=3)
    plain = batch(llama, config=config)
    drafter = Knowing(texts, 0.8)
    drafted = batch(llama, config=config, candidate_generator=drafter, max_draft_tokens=6)
    assert list(drafted) == list(plain)
    assert tokens(drafted) == tokens(plain)
    assert drafter.stats.accepted > 0


def test_log_probabilities(llama, texts):
    batching = small(return_logprobs=True)
    plain = batch(llama, batching=batching)
    drafted = batch(
        llama, batching=batching, candidate_generator=Knowing(texts), max_draft_tokens=6
    )
    for name in plain:
        assert drafted[name].generated_tokens == plain[name].generated_tokens
        assert drafted[name].logprobs == pytest.approx(plain[name].logprobs, abs=1e-4)


def test_processors_with_arguments_of_each_request(llama, texts):
    """A temperature of almost 0 makes sampling greedy, that of another request does not."""
    config = greedy(do_sample=True, temperature=0.7, top_k=50)
    with llama.continuous_batching_context_manager(
        generation_config=config,
        continuous_batching_config=small(per_request_processors=True),
        candidate_generator=Knowing(texts, 0.8),
        max_draft_tokens=6,
    ) as manager:
        for i, prompt in enumerate(PROMPTS):
            cold = {"temperature": 1e-3} if i % 2 else {"temperature": 50.0}
            manager.add_request(prompt, request_id=str(i), max_new_tokens=NEW_TOKENS, **cold)
        outputs = results(manager, [str(i) for i in range(len(PROMPTS))])
    for i, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        assert (outputs[i] == text[len(prompt) :][:NEW_TOKENS]) == bool(i % 2)


def test_sampled_tokens_have_the_distribution_of_plain_sampling(llama, texts):
    """The third token of 600 texts; the second one is drafted where the first is the greedy one."""
    config = greedy(do_sample=True, max_new_tokens=3, top_k=3, temperature=1.5)
    prompts = [PROMPTS[4]] * 600
    batching = small(max_batch_tokens=512, num_blocks=2048, max_requests_per_batch=100, seed=3)
    counts = []
    for drafter in (None, Knowing(texts, 1.0)):
        options = {"candidate_generator": drafter, "max_draft_tokens": 2}
        drafted = tokens(batch(llama, prompts, config, batching, **options))
        counts.append(np.bincount([each[2] for each in drafted], minlength=VOCAB_SIZE))
    assert drafter.stats.accepted > 0
    assert np.abs(counts[0] - counts[1]).sum() / 1200 < 0.15


def test_streams_get_every_token(llama, texts):
    with llama.continuous_batching_context_manager(
        generation_config=greedy(),
        continuous_batching_config=small(),
        candidate_generator=Knowing(texts, 0.9),
        max_draft_tokens=6,
    ) as manager:
        request_id = manager.add_request(PROMPTS[0], streaming=True)
        streamed = [each.generated_tokens for each in manager.request_id_iter(request_id)]
    text = texts[0][len(PROMPTS[0]) :]
    assert streamed == [text[: i + 1] for i in range(NEW_TOKENS)]


def test_a_cancelled_request_ends_its_drafter(llama, texts):
    class Ending(Knowing):
        ended = 0

        def fork(self):
            return Ending(self.texts, self.accuracy)

        def end(self):
            type(self).ended += 1

    with llama.continuous_batching_context_manager(
        generation_config=greedy(max_new_tokens=400),
        continuous_batching_config=small(num_blocks=256),
        candidate_generator=Ending(texts),
        max_draft_tokens=6,
    ) as manager:
        long = manager.add_request(PROMPTS[0], streaming=True)
        next(manager.request_id_iter(long))
        manager.cancel_request(long)
        while manager.batch_processor.scheduler.active_requests:
            time.sleep(0.01)
        for _ in range(2):  # the second one under the name of the first
            manager.add_request(PROMPTS[1], request_id=long, max_new_tokens=9)
            output = None
            while output is None or not output.is_finished():
                output = manager.get_result(timeout=1)
    assert output.generated_tokens == texts[1][len(PROMPTS[1]) :][:9]
    assert Ending.ended == 3


@cache
def _alone(model, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    return model.generate(ids, **options)[0, len(prompt) :].tolist()


_REQUESTS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 20), st.integers(1, 20), st.integers(0, 12)),
    min_size=1,
    max_size=7,
)


@settings(max_examples=25)
@given(
    asked=_REQUESTS,
    page_size=st.sampled_from([4, 5, 8, 16]),
    pages=st.integers(12, 40),
    max_batch_tokens=st.integers(3, 40),
    sharing=st.booleans(),
    fifo=st.booleans(),
    accuracy=st.sampled_from([0.3, 0.8, 1.0]),
    nodes=st.integers(1, 9),
)
def test_requests_that_come_at_any_time(
    llama, asked, page_size, pages, max_batch_tokens, sharing, fifo, accuracy, nodes
):
    """Each comes when the ones before have emitted some tokens."""
    wanted = [(tuple(PROMPTS[n][:length]), count) for n, length, count, _ in asked]
    known = [[*prompt, *_alone(llama, prompt)] for prompt, _ in wanted]
    batching = small(
        page_size=page_size,
        num_blocks=pages,
        max_batch_tokens=max_batch_tokens,
        allow_block_sharing=sharing,
        scheduler_type="fifo" if fifo else "prefill_first",
    )
    outputs: dict[str, list[int]] = {}
    with llama.continuous_batching_context_manager(
        generation_config=greedy(),
        continuous_batching_config=batching,
        candidate_generator=Knowing(known, accuracy),
        max_draft_tokens=nodes,
    ) as manager:

        def read(count):
            while sum(map(len, outputs.values())) < count:
                output = manager.get_result(timeout=1)
                if output is not None:
                    assert output.error is None
                    outputs[output.request_id] = output.generated_tokens

        for i, (prompt, count) in enumerate(wanted):
            manager.add_request(list(prompt), str(i), max_new_tokens=count, streaming=True)
            more = sum(map(len, outputs.values())) + asked[i][3]
            read(min(more, sum(count for _, count in wanted[: i + 1])))
        read(sum(count for _, count in wanted))
    for i, (prompt, count) in enumerate(wanted):
        assert outputs[str(i)] == _alone(llama, prompt)[:count]
