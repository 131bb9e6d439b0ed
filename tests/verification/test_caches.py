"""Caches that are given and returned."""

import pytest
import torch

from hf_refspec.transformers_names import CACHE_NAME
from tests.helpers.architectures import MODEL_TYPES, small
from tests.helpers.calls import GREEDY, PROMPT, Call, assert_same_entries, new_cache
from tests.helpers.drafters import Noise

UNEQUAL = [0.95, 0.2, 0.5, 1.0]  # accuracies of rows
STATIC = {"cache_implementation": "static"}
# A type that adds layers to its cache, which the oldest transformers does not have.
ADDS_LAYERS = pytest.param(
    *("dory", "auto", 3, 96),
    marks=pytest.mark.skipif("dory" not in MODEL_TYPES, reason="new type"),
)


@pytest.mark.parametrize(
    ("model_type", "verification", "rows", "room"),
    [
        ("llama", "tree", 1, None),
        ("llama", "chain", 1, None),
        ("mistral", "chain", 1, None),
        ("qwen3_next", "chain", 1, None),
        ("llama", "tree", 4, None),
        ("gpt2", "tree", 4, None),
        ("gemma2", "tree", 1, None),
        ("qwen3_moe", "chain", 1, None),
        ("deepseek_v3", "tree", 1, None),
        ("llama", "auto", 1, 96),
        ("llama", "auto", 3, 96),
        ("gemma2", "auto", 3, 96),
        ("mistral", "auto", 1, 96),
        ("mistral", "auto", 3, 96),
        ("gpt_oss", "auto", 3, 96),
        ADDS_LAYERS,
    ],
)
def test_turns_go_on_from_a_given_cache_which_holds_all_but_the_last_token(
    models_by_type, model_type, verification, rows, room
):
    """The first turn crosses the window of 16; behind it static windows take no drafts."""
    first = Call(models_by_type(model_type), rows)
    plain, drafted = (new_cache(first.model, room) for _ in range(2))
    ids = first.inputs["input_ids"]
    for turn, new_tokens in enumerate((15, 2, 15)):
        inputs = {"input_ids": ids, "attention_mask": first.mask(ids.shape[1])}
        options = {"max_new_tokens": new_tokens, "past_key_values": plain}
        call = Call(first.model, inputs=inputs, **options)
        stats = call.assert_lossless(UNEQUAL, verification, drafting={"past_key_values": drafted})
        has_static_windows = room is not None and model_type != "llama"
        assert stats.mat > 1.2 or turn == 1 or has_static_windows
        length = call.plain.shape[1] - 1
        assert int(plain.get_seq_length()) == int(drafted.get_seq_length()) == length
        ids = torch.cat([call.plain, first.inputs["input_ids"][:, -3:]], dim=-1)
    assert_same_entries(drafted, plain, first.mask(length))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("room", [-1, 0, 5])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_short_static_cache_cuts_drafts_and_not_the_text(models_by_type, model_type, rows, room):
    """The shortest one holds all tokens but the last, whose keys nobody needs."""
    model, length = models_by_type(model_type), 12 + 32
    plain, drafted = (new_cache(model, length + room) for _ in range(2))
    call = Call(model, rows, past_key_values=plain)
    call.assert_lossless(UNEQUAL, drafting={"past_key_values": drafted})
    assert int(drafted.get_seq_length()) == length - 1
    assert_same_entries(drafted, plain, call.mask(length - 1))


def test_a_static_cache_without_room_for_the_text_is_an_error_that_says_so(llama):
    cache = new_cache(llama, 20)
    with pytest.raises(ValueError, match="The static cache has room for 20 tokens"):
        llama.generate(PROMPT, past_key_values=cache, candidate_generator=Noise(), **GREEDY)
    assert int(cache.get_seq_length()) == 20  # a prefix of the text


@pytest.mark.parametrize("verification", ["auto", "reproducible"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_prefill_in_chunks_leaves_room_for_drafts(models_by_type, model_type, verification):
    """transformers then allocates a static cache before the prefill."""
    call = Call(models_by_type(model_type), rows=3)
    options = {**STATIC, "prefill_chunk_size": 5, "verification": verification}
    assert call.assert_lossless(UNEQUAL, **options).mat > 1.2


@pytest.mark.parametrize("static", [False, True])
def test_rows_of_all_positions_that_a_model_has_stand_still(static):
    """No position is left for the last token of a row that ended first."""
    options = {"max_length": 49, "max_new_tokens": None, "return_dict_in_generate": True}
    options |= STATIC if static else {}
    Call(small("gpt2", n_positions=48), rows=3, **options).assert_lossless(UNEQUAL)


@pytest.mark.parametrize("room", [None, 64])
@pytest.mark.parametrize("given", [None, *sorted({"past_key_values", CACHE_NAME})])
def test_a_cache_is_returned_under_each_name_that_transformers_has_for_it(llama, given, room):
    cache = new_cache(llama, room)
    options = {"return_dict_in_generate": True, **GREEDY, **({given: cache} if given else {})}
    output = llama.generate(PROMPT, candidate_generator=Noise(), **options)
    assert output.past_key_values is output[CACHE_NAME]
    assert (output[CACHE_NAME] is cache) == (given is not None)
    assert output.keys() == llama.generate(PROMPT, return_dict_in_generate=True, **GREEDY).keys()
