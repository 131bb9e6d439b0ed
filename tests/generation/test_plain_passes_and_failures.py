"""Calls without drafts on models that take no trees, and caches after passes that raised."""

from __future__ import annotations

import numpy as np
import pytest
from architectures import small
from calls import assert_lossless, padded_prompts
from drafters import Prophet, Prophets
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

import hf_refspec as rs

OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("rows", [slice(1, 2), slice(0, 2)])
@pytest.mark.parametrize("model_type", ["falcon", "openai-gpt", "git"])
def test_no_drafts_behind_padding(model_type, rows):
    """Under the 4D mask of a tree these have other logits (ALiBi, no positions)."""
    model = small(model_type, **({"alibi": True} if model_type == "falcon" else {}))
    inputs = {name: value[rows] for name, value in padded_prompts(2).items()}
    assert_lossless(model, rs.ReferenceCopy(), inputs, max_draft_tokens=0, pad_token_id=0)


class Interrupt:
    """Raises at the fourth call of a module."""

    only_reads = True  # so that the model is not probed anew

    def __init__(self):
        self.calls = 0

    def __call__(self, *_):
        self.calls += 1
        if self.calls == 4:
            raise KeyboardInterrupt


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("verification", ["auto", "chain"])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_pass_that_raises_leaves_a_usable_cache(model_type, verification, layer):
    model, inputs = small(model_type), padded_prompts(1)
    plain = model.generate(**inputs, max_new_tokens=40, **OPTIONS)
    options = {"max_draft_tokens": 8, "verification": verification, **OPTIONS}
    warm = Prophet(plain, accuracy=0.8)
    model.generate(**inputs, max_new_tokens=4, candidate_generator=warm, **options)  # probes
    cache = DynamicCache(config=model.config)
    hook = (model.model.layers[1] if layer else model).register_forward_pre_hook(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        model.generate(
            **inputs,
            max_new_tokens=40,
            past_key_values=cache,
            candidate_generator=Prophet(plain, accuracy=0.8),
            **options,
        )
    hook.remove()
    length = cache.get_seq_length()
    assert {each.get_seq_length() for each in cache.layers} == {length}
    assert length >= 12
    ids = plain[:, : length + 1]
    left = plain.shape[1] - length - 1
    again = model.generate(ids, past_key_values=cache, max_new_tokens=left, **OPTIONS)
    assert again.tolist() == plain.tolist()


class EndsWith(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


def test_the_cache_where_rows_go_on_until_all_are_stopped():
    """Without an end-of-text token; the rows run past the returned ids."""
    model, inputs = small("llama"), padded_prompts(3)
    free = model.generate(**inputs, max_new_tokens=50, **OPTIONS)
    token = int(free[0, 12 + 7])
    options = {"max_new_tokens": 50, "return_dict_in_generate": True, **OPTIONS}
    plain, drafted = (
        model.generate(
            **inputs,
            stopping_criteria=StoppingCriteriaList([EndsWith(token)]),
            **options,
            **each,
        )
        for each in (
            {},
            {"candidate_generator": Prophets(inputs, free, [0.9, 0.5, 0.2]), "max_draft_tokens": 8},
        )
    )
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert drafted.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()


class Listener(rs.Drafter):
    def __init__(self):
        self.observed: list[list[int]] = []

    def begin(self, prompt_ids, vocab_size):
        self.tokens: list[int] = []
        self.observed.append(self.tokens)

    def draft(self, budget):
        return rs.DraftTree.empty()

    def observe(self, observation):
        assert observation.logits is None and len(observation.verified) == 0
        self.tokens += observation.tokens.tolist()

    def fork(self):
        fork = Listener()
        fork.observed = self.observed
        return fork


def test_plainly_decoded_rows_are_observed_without_their_padding_and_without_logits():
    model, inputs = small("mamba"), padded_prompts(2, seed=0)
    free = model.generate(**inputs, max_new_tokens=20, **OPTIONS)
    options = {**OPTIONS, "max_new_tokens": 20, "eos_token_id": int(free[0, 12 + 3])}
    plain = model.generate(**inputs, **options)
    drafter = Listener()
    drafted = model.generate(**inputs, candidate_generator=drafter, **options)
    assert drafted.tolist() == plain.tolist()
    ends = [
        int(np.argmax(row == options["eos_token_id"])) + 1 if options["eos_token_id"] in row else 20
        for row in plain[:, 12:].numpy()
    ]
    assert min(ends) < 20
    assert [len(tokens) for tokens in drafter.observed] == ends
