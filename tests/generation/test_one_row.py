"""What only a call with one row has: random numbers, streamers, scores, a cache that survives an
exception."""

from __future__ import annotations

import pytest
import torch
from architectures import small
from calls import GREEDY, PROMPT, ListStreamer
from drafters import Noise, Prophet
from transformers import DynamicCache, StaticCache
from transformers.generation import stopping_criteria


@pytest.mark.parametrize("verification", ["tree", "chain"])
def test_scores_and_logits_match(llama, verification):
    options = {
        "max_new_tokens": 30,
        "do_sample": False,
        "repetition_penalty": 1.2,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    plain = llama.generate(PROMPT, **options)
    drafter = Prophet(plain.sequences, accuracy=0.8)
    options |= {"max_draft_tokens": 8, "verification": verification}
    drafted = llama.generate(PROMPT, candidate_generator=drafter, **options)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        mine, theirs = getattr(drafted, name), getattr(plain, name)
        assert isinstance(mine, tuple) and len(mine) == len(theirs)
        torch.testing.assert_close(torch.cat(mine), torch.cat(theirs), rtol=1e-4, atol=1e-4)
    assert drafted.scores[0].dtype == torch.float32


class CancellingStreamer(ListStreamer):
    def __init__(self, tokens: int):
        super().__init__()
        self.tokens = tokens

    def put(self, value):
        if len(self.puts) > self.tokens:  # the prompt comes first
            raise KeyboardInterrupt
        super().put(value)


@pytest.mark.parametrize(
    ("model_type", "static"),
    [("llama", False), ("mistral", False), ("qwen3_next", False), ("llama", True)],
)
@pytest.mark.parametrize("tokens", [0, 5, 8])
def test_a_cancelled_call_leaves_a_cache_to_go_on_from(models_by_type, model_type, static, tokens):
    model = models_by_type(model_type)
    options = {**GREEDY, "max_new_tokens": 30}
    plain = model.generate(PROMPT, **options)
    config = model.config
    cache = StaticCache(config, max_cache_len=64) if static else DynamicCache(config=config)
    drafter = Prophet(plain, accuracy=1.0)
    with pytest.raises(KeyboardInterrupt):
        model.generate(
            PROMPT,
            past_key_values=cache,
            streamer=CancellingStreamer(tokens),
            candidate_generator=drafter,
            max_draft_tokens=8,
            **options,
        )
    length = PROMPT.shape[1] + tokens + 1  # the last one was chosen and not streamed
    assert cache.get_seq_length() < length
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    options["max_new_tokens"] = 29 - tokens
    gone_on = model.generate(plain[:, :length], past_key_values=cache, **options)
    assert gone_on.tolist() == plain.tolist()


def test_a_model_that_cannot_verify_streams_as_plain_decoding_does(models_by_type):
    model = models_by_type("mamba")
    options = {**GREEDY, "max_new_tokens": 12}
    streamers = ListStreamer(), ListStreamer()
    model.generate(PROMPT, streamer=streamers[0], **options)
    drafter = Noise()
    model.generate(PROMPT, streamer=streamers[1], candidate_generator=drafter, **options)
    assert streamers[0].puts == streamers[1].puts
    assert streamers[1].ended == 1
    assert (drafter.stats.tokens, drafter.stats.mat) == (12, 1.0)


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
