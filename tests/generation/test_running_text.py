"""One text of a running batch: what its prompt shares with others, and what it leaves behind."""

import gc
import weakref

import pytest
import torch

import hf_refspec as rs
from hf_refspec.generation.running_batch import RunningBatch
from tests.helpers.calls import ListStreamer
from tests.helpers.calls import random_ids as ids
from tests.helpers.drafters import Prophet
from tests.helpers.running_texts import add, finish, generated


def test_a_prompt_may_begin_with_what_another_text_has_accepted(llama):
    """Wrong branches stand before the accepted nodes."""
    plain = generated(llama, ids(20), 40)
    batch = RunningBatch(llama, max_draft_tokens=7)
    first = add(batch, ids(20), 40, candidate_generator=Prophet(plain, 1.0, branches=3))
    for _ in range(4):
        batch.step()
        prompt = torch.cat([first.sequences, ids(3)], dim=-1)
        second = add(batch, prompt, 2)
        batch.step()
        assert second.shared_tokens >= prompt.shape[1] - 4  # the last token is not cached yet
        assert second.finished
        assert second.sequences.tolist() == generated(llama, prompt, 2)
    finish(batch)
    assert first.sequences.tolist() == plain


@pytest.mark.parametrize("tokens", [0, 200])
def test_a_prefix_is_read_once(llama, tokens):
    batch = RunningBatch(llama, max_rows=4, prefix_tokens=tokens)
    prompts = [torch.cat([ids(40), ids(5, n)], dim=-1) for n in range(1, 4)]
    texts = [add(batch, prompt) for prompt in prompts]
    finish(batch)
    again = add(batch, prompts[0])
    finish(batch)
    assert [text.shared_tokens >= 40 for text in texts] == [False, tokens > 0, tokens > 0]
    assert again.shared_tokens == (44 if tokens else 0)
    assert again.sequences.tolist() == texts[0].sequences.tolist()


def test_no_prefix_is_shared_after_the_model_has_changed(fresh_llama):
    batch = RunningBatch(fresh_llama)

    def shared_tokens() -> int:
        text = add(batch, ids(30), 12)
        finish(batch)
        assert text.sequences.tolist() == generated(fresh_llama, ids(30), 12)
        return text.shared_tokens

    assert [shared_tokens(), shared_tokens()] == [0, 29]
    with torch.no_grad():
        fresh_llama.model.layers[0].self_attn.v_proj.weight += 0.2
    assert [shared_tokens(), shared_tokens()] == [0, 29]
    fresh_llama.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    assert [shared_tokens(), shared_tokens()] == [0, 29]
    fresh_llama.model.rotary_emb.inv_freq.mul_(3)
    assert [shared_tokens(), shared_tokens()] == [0, 29]
    fresh_llama.lm_head.weight.data.mul_(-1)
    assert [shared_tokens(), shared_tokens()] == [0, 29]


def test_a_padded_prompt_is_the_text_without_its_padding_and_shares_nothing(llama):
    batch = RunningBatch(llama, prefill_tokens=6)
    text, mask = ids(40), torch.ones(1, 40, dtype=torch.int64)
    text[:, :10] = mask[:, :10] = 0
    texts = [add(batch, text, 12, attention_mask=each) for each in (mask, mask * 0 + 1)]
    finish(batch)
    for each, own in zip(texts, (mask, mask * 0 + 1), strict=True):
        assert each.shared_tokens == 0
        assert each.sequences.tolist() == generated(llama, text, 12, attention_mask=own)


def test_a_long_text_does_not_take_the_place_of_kept_prefixes(llama):
    batch = RunningBatch(llama, prefix_tokens=100)
    texts = []
    for prompt in (ids(40), ids(150, 1), ids(40)):
        texts.append(add(batch, prompt, 3))
        finish(batch)
    assert [text.shared_tokens for text in texts] == [0, 0, 39]


def test_prompts_at_other_positions_share_nothing(models_by_type):
    model = models_by_type("gpt2")
    batch = RunningBatch(model)
    for positions in ({}, {"position_ids": torch.arange(40)[None] * 2 + 3}, {}):
        text = add(batch, ids(40), **positions)
        finish(batch)
        assert text.sequences.tolist() == generated(model, ids(40), **positions)


def test_a_text_without_a_seed_follows_torchs(llama):
    def sampled() -> list[int]:
        torch.manual_seed(3)
        batch = RunningBatch(llama)
        text = batch.add(input_ids=ids(4), do_sample=True, max_new_tokens=20, pad_token_id=0)
        finish(batch)
        return text.sequences[0].tolist()

    assert sampled() == sampled()


def test_ended_texts_keep_no_keys_and_values(llama):
    def cached() -> int:
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        return sum(each.ndim == 4 and each.shape[2] >= 35 for each in tensors)

    before, batch = cached(), RunningBatch(llama, prefix_tokens=0)
    mask = torch.ones(1, 40, dtype=torch.int64)
    mask[:, :5] = 0
    texts = [add(batch, ids(40, n), 3, attention_mask=each) for n, each in enumerate((mask, None))]
    batch.step()
    assert cached() > before
    finish(batch)
    assert cached() == before and all(text.finished for text in texts)


def test_a_drafter_is_freed_with_its_text_before_garbage_is_collected(llama):
    """A server that isolates its clients has one for each request."""
    batch = RunningBatch(llama, prefix_tokens=0)
    gc.collect()
    gc.disable()
    try:
        drafter = rs.ReferenceCopy() | rs.TokenRecycling()
        add(batch, ids(40), candidate_generator=drafter)
        finish(batch)
        batched, drafter = weakref.ref(drafter), rs.ReferenceCopy() | rs.TokenRecycling()
        generated(llama, ids(40), candidate_generator=drafter)
        called, drafter = weakref.ref(drafter), None
        assert batched() is None and called() is None
    finally:
        gc.enable()


def test_texts_that_are_dropped_end(llama):
    batch, streamer = RunningBatch(llama), ListStreamer()
    add(batch, ids(4), streamer=streamer)
    batch.step()
    assert not streamer.ended
    del batch
    gc.collect()
    assert streamer.ended
