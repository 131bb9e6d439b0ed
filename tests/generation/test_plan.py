"""Drafts stay where plain decoding of the accepted tokens is the same computation.

They end before a length at which attention may change, and go on where a probe crosses it.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig
from transformers.generation import stopping_criteria

from hf_refspec.generation.plan import DraftLimits
from hf_refspec.verification.caches import find_cache
from hf_refspec.verification.verifier import TREE
from tests.helpers.architectures import WINDOW, small
from tests.helpers.calls import (
    GREEDY,
    PROMPT,
    ListStreamer,
    assert_lossless,
    new_cache,
    random_ids,
)
from tests.helpers.drafters import Noise, Prophet
from tests.helpers.own_forward import own_forward

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "factor": 4.0,
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 32,
}
LONG_PHI = {
    "rope_parameters": LONG,
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 32,
}
SCALED = {
    "dynamic llama": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
    "longrope llama": ("llama", {"rope_parameters": LONG, "max_position_embeddings": 128}),
    "longrope phi3": ("phi3", LONG_PHI),
    "longrope phi3 with a window": ("phi3", {**LONG_PHI, "sliding_window": 16}),
}


def build(case: str):
    """A new model for each text: the frequencies are state of the model."""
    model_type, config = SCALED[case]
    return small(model_type, **config)


def drafted_as_plain(case: str, ids: torch.Tensor, **options):
    """Asserts it of two new models; returns the drafter's stats."""
    options = {**GREEDY, **options}
    plain = build(case).generate(ids, **options)
    drafter = Prophet(plain, accuracy=0.9)
    drafting = {"candidate_generator": drafter, "max_draft_tokens": 8}
    drafted = build(case).generate(ids, **drafting, **options)
    assert drafted.tolist() == plain.tolist()
    return drafter.stats


@pytest.mark.parametrize("case", SCALED)
def test_frequencies_that_depend_on_the_length_change_as_in_plain_decoding(case):
    stats = drafted_as_plain(case, PROMPT, max_new_tokens=50)
    assert stats.mat > 1.3 and not stats.reason


@pytest.mark.parametrize("case", SCALED)
def test_a_probe_keeps_the_frequencies_of_the_longest_text_so_far(case):
    """Plain decoding goes on with them."""
    texts = []
    for drafter in (None, Noise()):
        model = build(case)
        long = torch.cat([PROMPT] * 5, dim=-1)
        model.generate(long, **GREEDY)
        texts.append(model.generate(long[:, :34], candidate_generator=drafter, **GREEDY).tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("padding", [1, 3, 9])
def test_a_cache_that_is_rebuilt_at_a_length_is_rebuilt_behind_padding_too(padding):
    """Phi-3 counts the padding: its cache goes before its frequencies change."""
    for seed in range(5):
        ids = random_ids(padding + 17, seed)
        ids[:, :padding] = 0
        mask = (ids != 0).long()
        drafted_as_plain("longrope phi3", ids, attention_mask=mask, max_new_tokens=40)


def test_drafts_stay_within_learned_positions(models_by_type):
    """GPT-2 has 512 positions; a draft past them would index outside of the table."""
    model = models_by_type("gpt2")
    prompt = random_ids(490)
    options = {"inputs": prompt, "max_new_tokens": None}
    assert_lossless(model, 1.0, max_length=512, **options)
    # An end of text keeps plain decoding within the table although max_length does not.
    end = int(model.generate(prompt, **{**GREEDY, "max_new_tokens": 22})[0, 510])
    assert_lossless(model, Noise(), max_length=600, eos_token_id=end, **options)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize("new_tokens", [21, 30])
def test_past_the_models_positions_the_user_sees_what_plain_decoding_shows(
    model_type, new_tokens, monkeypatch
):
    model = small(model_type, max_position_embeddings=32)
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([[5, 6, 7, 8] * 3])
    warnings: list[str] = []
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", warnings.append)

    def seen(**options) -> tuple:
        warnings.clear()
        streamer, raised = ListStreamer(), None
        try:
            model.generate(
                prompt, max_new_tokens=new_tokens, do_sample=False, streamer=streamer, **options
            )
        except IndexError as error:  # gpt2 has no position to look up
            raised = str(error)
        return streamer.puts, raised, {*warnings}

    plain = seen()
    assert (plain[1] is not None) == (model_type == "gpt2" and new_tokens == 30)
    assert bool(plain[2]) == (new_tokens == 30)
    assert seen(candidate_generator=Noise(), max_draft_tokens=8) == plain


@pytest.mark.parametrize("case", ["given cache", "given positions", "padding"])
def test_the_position_counts_and_not_the_length(models_by_type, case):
    """GPT-2 has a table of 512 positions; an index past its end would fail."""
    model, long = models_by_type("gpt2"), random_ids(497)
    padded = torch.nn.functional.pad(long, (23, 0))
    inputs = {
        "given cache": {"input_ids": long[:, 495:], "attention_mask": torch.ones_like(long)},
        "given positions": {
            "input_ids": PROMPT,
            "position_ids": torch.arange(490, 490 + PROMPT.shape[1])[None],
        },
        "padding": {"input_ids": padded, "attention_mask": (padded != 0).long()},
    }[case]

    def generate(drafter=None):
        cache = new_cache(model) if case == "given cache" else None
        if cache is not None:
            with torch.no_grad():
                model(long[:, :495], past_key_values=cache)
        options = {**inputs, **GREEDY, "max_new_tokens": 14, "past_key_values": cache}
        return model.generate(**options, candidate_generator=drafter)

    plain = generate()
    for drafter in (Noise(), Prophet(plain, 1.0)):
        assert generate(drafter).tolist() == plain.tolist()


@pytest.mark.parametrize(
    ("rope", "position", "depth"),
    [
        (None, 50, 49),
        (None, 100, sys.maxsize),  # past the table already
        (DYNAMIC, 50, 49),
        (DYNAMIC, 120, 0),
        (LONG, 20, 11),
        (LONG, 32, 0),
        (LONG, 33, 66),
    ],
)
def test_how_deep_a_draft_goes_behind_a_position(rope, position, depth):
    shape = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 100}
    config = AutoConfig.for_model("llama", **shape, **({"rope_parameters": rope} if rope else {}))
    model = SimpleNamespace(config=config, get_output_embeddings=lambda: None)
    verifier = SimpleNamespace(kind=TREE, model=model, model_kwargs={})
    verifier.inputs = SimpleNamespace(last_position=lambda row, length: length - 1)
    assert DraftLimits(verifier).depth(0, position + 1) == depth


OPTIONS = {**GREEDY, "max_new_tokens": 40}


@pytest.fixture
def mistral():
    return small("mistral")


class Placed(Prophet):
    """Records where in the text drafts were accepted."""

    def begin(self, prompt_ids, vocab_size):
        super().begin(prompt_ids, vocab_size)
        self.accepted_at = []  # lengths of the text before an accepted token
        self.passes_at = []

    def observe(self, observation):
        self.passes_at.append(self.position)
        self.accepted_at += range(self.position, self.position + len(observation.tokens) - 1)
        super().observe(observation)


def placed(model, prompt_length: int, accuracy=0.9, plain=None, branches=0, nodes=4) -> Placed:
    prompt = random_ids(prompt_length, seed=1)
    plain = model.generate(prompt, **OPTIONS) if plain is None else plain
    drafter = Placed(plain, accuracy, branches)
    drafting = {"candidate_generator": drafter, "max_draft_tokens": nodes}
    assert model.generate(prompt, **drafting, **OPTIONS).tolist() == plain.tolist()
    return drafter


def test_drafts_end_before_a_window_past_which_they_are_inexact():
    """Past Doge's window equal tokens tie, and what else is in a pass decides between them."""
    model = small("doge")
    drafter = placed(model, 5)
    assert len(drafter.accepted_at) > 3
    assert max(drafter.accepted_at) < WINDOW
    assert placed(model, 20).accepted_at == []


@pytest.mark.parametrize("branches", [0, 2])
def test_drafts_see_a_window_that_several_tokens_of_the_model_see_past(branches):
    """Moshi's own mask for several tokens shows them more than its window; a draft's does not."""
    drafter = placed(small("moshi"), 5, branches=branches, nodes=8)
    assert max(drafter.accepted_at) > 2 * WINDOW


@pytest.mark.parametrize("prompt_length", [5, 20])
def test_drafts_go_on_across_a_window_that_a_chain_crosses_exactly(mistral, prompt_length):
    drafter = placed(mistral, prompt_length)
    past = [place for place in drafter.passes_at if place >= WINDOW]
    assert (45 - max(WINDOW, prompt_length)) / len(past) > 1.5
    assert max(drafter.accepted_at) > 2 * WINDOW
    if prompt_length < WINDOW:
        assert min(drafter.accepted_at) < WINDOW - 2


def test_each_side_of_a_boundary_is_probed_once(mistral):
    passes = []
    own_forward(mistral, lambda usual, **kwargs: passes.append(1) or usual(**kwargs))

    def probing_passes(prompt_length: int, new_tokens: int, nodes: int = 4) -> int:
        passes.clear()
        options = {**OPTIONS, "max_new_tokens": new_tokens, "candidate_generator": (n := Noise())}
        mistral.generate(random_ids(prompt_length), max_draft_tokens=nodes, **options)
        return len(passes) - n.stats.forward_passes

    assert probing_passes(5, 6, nodes=0) == 0
    assert probing_passes(5, 6) > 0
    assert probing_passes(5, 6) == 0
    assert probing_passes(WINDOW, 6) > 0
    assert probing_passes(5, 30) == 0


def test_drafts_end_where_passes_differ_only_past_a_boundary(mistral):
    """Exact on short texts: as if a mask for several tokens forgot the window."""
    plain = mistral.generate(random_ids(5, seed=1), **OPTIONS)

    def disturb(usual, **kwargs):
        outputs = usual(**kwargs)
        cache, tokens = find_cache(outputs), outputs.logits.shape[1]
        length = 0 if cache is None else cache.get_seq_length()
        if tokens > 1 and length > tokens and length > WINDOW:
            outputs.logits += torch.linspace(0, 3, outputs.logits.shape[-1])
        return outputs

    own_forward(mistral, disturb)
    drafter = placed(mistral, 5, accuracy=1.0, plain=plain)
    assert len(drafter.accepted_at) > 3
    assert max(drafter.accepted_at) < WINDOW
    assert "inexact at the length of the text" in drafter.stats.reason
