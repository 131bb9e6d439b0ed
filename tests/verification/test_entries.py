"""Keys and values of accepted tokens are kept, also in another type and by an interrupted call."""

import copy
from contextlib import nullcontext

import pytest
import torch
from transformers import StoppingCriteriaList

from tests.helpers.calls import Call, assert_same_entries, new_cache
from tests.helpers.drafters import Prophets

UNEQUAL = [0.95, 0.2, 0.5, 1.0]  # accuracies of rows


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("model_type", "attention"), [("llama", "sdpa"), ("gemma2", "eager")])
@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32])
def test_a_cache_goes_on_in_a_wider_type(models_by_type, model_type, attention, rows, first):
    """A call, or the next, runs under autocast, which leaves keys and values in bfloat16."""
    model = copy.deepcopy(models_by_type(model_type))
    model.set_attn_implementation(attention)
    call = Call(model, rows)
    caches, texts = [], []
    drafter = None
    for _ in range(2):  # plainly, then with drafts
        cache = new_cache(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=first == torch.bfloat16):
            ids = call.generate(past_key_values=cache, max_new_tokens=1)
        ids = torch.cat([ids, call.inputs["input_ids"][:, -3:]], dim=-1)
        inputs = {"input_ids": ids, "attention_mask": call.mask(ids.shape[1])}
        drafter = Prophets(inputs, texts[0], UNEQUAL) if texts else None
        with torch.autocast("cpu", torch.bfloat16, enabled=first != torch.bfloat16):
            options = {"past_key_values": cache, "candidate_generator": drafter, **inputs}
            texts.append(call.generate(max_draft_tokens=8, **options))
        caches.append(cache)
    assert drafter.stats.accepted > 0
    types = {layer.keys.dtype for cache in caches for layer in cache.layers}
    assert types == {torch.float32}
    if first == torch.bfloat16:  # near-ties may change places under autocast
        assert texts[1].tolist() == texts[0].tolist()
        assert_same_entries(*caches, call.mask(texts[0].shape[1] - 1))


class Interrupt:
    """Raises at its n-th call: as a hook, as a stopping criterion, or as a streamer."""

    only_reads = True  # so that the model is not probed anew

    def __init__(self, calls: int):
        self.left = calls

    def __call__(self, module_or_ids, *_, **__):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        is_ids = isinstance(module_or_ids, torch.Tensor)
        return torch.zeros(len(module_or_ids), dtype=torch.bool) if is_ids else None

    put = __call__

    def end(self):
        raise AssertionError("a call that was interrupted has ended")


# The type, the verification, the rows, and the room of a static cache.
INTERRUPTED = {
    "tree": ("llama", "tree", 1, None),
    "chain": ("llama", "chain", 1, None),
    "chain, window": ("mistral", "auto", 1, None),
    "running state": ("qwen3_next", "auto", 1, None),
    "static": ("llama", "auto", 1, 64),
    "4 rows": ("llama", "auto", 4, None),
}


@pytest.mark.parametrize("kind", INTERRUPTED)
@pytest.mark.parametrize(
    ("place", "calls"),
    [
        *(("streamer", 2), ("streamer", 9), ("criterion", 8)),
        *(("model", 1), ("model", 4), ("layer", 4)),
    ],
)
def test_an_interrupted_call_leaves_a_cache_to_go_on_from(models_by_type, kind, place, calls):
    model_type, verification, rows, room = INTERRUPTED[kind]
    call = Call(models_by_type(model_type), rows)
    drafting = {"candidate_generator": call.drafter(), "verification": verification}
    drafting["max_draft_tokens"] = 8
    probed = new_cache(call.model, room)
    call.generate(max_new_tokens=4, past_key_values=probed, **drafting)  # probes
    cache, interrupt = new_cache(call.model, room), Interrupt(calls)
    given = {
        "streamer": {"streamer": interrupt},
        "criterion": {"stopping_criteria": StoppingCriteriaList([interrupt])},
    }
    hooked = {"model": call.model, "layer": call.model.model.layers[1]}.get(place)
    hook = nullcontext() if hooked is None else hooked.register_forward_pre_hook(interrupt)
    with hook, pytest.raises(KeyboardInterrupt):
        call.generate(past_key_values=cache, **drafting, **given.get(place, {}))
    length = int(cache.get_seq_length())
    assert (12 if place != "model" or calls > 1 else 0) <= length < 12 + 32
    assert rows == 1 or length <= 12
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    begun = max(length + 1, 12)
    options = {"input_ids": call.plain[:, :begun], "attention_mask": call.mask(begun)}
    options["max_new_tokens"] = 12 + 32 - begun
    assert call.generate(past_key_values=cache, **options).tolist() == call.plain.tolist()
