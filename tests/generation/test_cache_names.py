"""A cache is taken under each name that the installed transformers has for it, and returned."""

from __future__ import annotations

import pytest
import torch
from calls import GREEDY, PROMPT
from drafters import Noise, Prophet
from transformers import DynamicCache, StaticCache

import hf_refspec as rs
from hf_refspec.transformers_names import CACHE_NAME

NAMES = sorted({"past_key_values", CACHE_NAME})
OPTIONS = {**GREEDY, "return_dict_in_generate": True}


def caches(model):
    yield DynamicCache(config=model.config)
    yield StaticCache(config=model.config, max_cache_len=64)


@pytest.mark.parametrize("kind", [0, 1], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", NAMES)
def test_a_given_cache_goes_on_and_is_returned(llama, name, kind):
    outputs = []
    for options in ({}, {"candidate_generator": Noise(), "max_draft_tokens": 6}):
        cache = list(caches(llama))[kind]
        first = llama.generate(PROMPT, **OPTIONS, **{name: cache}, **options)
        assert first[CACHE_NAME] is cache and first.past_key_values is cache
        more = torch.cat([first.sequences, torch.tensor([[7, 8]])], dim=1)
        second = llama.generate(more, **OPTIONS, **{name: cache}, **options)
        length = int(cache.get_seq_length())
        outputs.append((first.sequences.tolist(), second.sequences.tolist(), length))
    assert outputs[0] == outputs[1]


def test_an_own_cache_is_returned_under_both_names(llama):
    plain = llama.generate(PROMPT, **OPTIONS)
    drafter = Prophet(plain.sequences, 0.9)
    drafted = llama.generate(PROMPT, **OPTIONS, candidate_generator=drafter)
    assert drafted.past_key_values is drafted[CACHE_NAME]
    assert drafted[CACHE_NAME].get_seq_length() == plain[CACHE_NAME].get_seq_length()
    assert drafted.keys() == plain.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_for_a_text_of_a_running_batch_is_refused_by_its_name(llama, name):
    batch = rs.RunningBatch(llama)
    with pytest.raises(ValueError, match=f"`{name}` cannot be given"):
        batch.add(input_ids=PROMPT, **GREEDY, **{name: DynamicCache(config=llama.config)})


def test_sequences_of_one_prompt_are_constrained_as_in_plain_decoding(llama):
    def allowed(prompt, ids):
        return [10 * (1 + prompt) + n for n in range(4)]

    options = {
        **GREEDY,
        **{"do_sample": True, "num_return_sequences": 2, "prefix_allowed_tokens_fn": allowed},
    }
    texts = []
    for drafting in ({}, {"candidate_generator": Noise(), "max_draft_tokens": 6}):
        torch.manual_seed(0)
        texts.append(llama.generate(PROMPT.repeat(2, 1), **options, **drafting).tolist())
    assert texts[0] == texts[1]
