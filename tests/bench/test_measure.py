"""A prompt is decoded in all ways in turn, timed, counted and compared."""

from __future__ import annotations

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

import hf_refspec as rs
from hf_refspec.bench import measure
from hf_refspec.bench.measure import Bench, ContextTooShortError, IdsDifferError
from hf_refspec.bench.models import random_model
from hf_refspec.bench.ways import LOOK_UP, Way, make_ways

PROMPT, ANSWER = [5, 6, 7, 8] * 3, [5, 6, 7, 8, 5, 6, 9, 10, 2]


def begun(model, tokenizer, ways=make_ways, replay=True) -> Bench:
    bench = Bench(model, tokenizer, ways, replay)
    bench.begin()
    return bench


def test_every_way_says_the_recorded_answer(tokenizer):
    bench = begun(random_model("tiny", len(tokenizer)), tokenizer)
    entry, ids = bench.ask("a prompt", PROMPT, ANSWER)
    assert ids == ANSWER
    assert (entry["name"], entry["prompt_tokens"]) == ("a prompt", 12)
    assert [(s["way"], s["nodes"]) for s in entry["samples"]] == [
        (way.name, way.nodes) for way in bench.ways
    ]
    for sample in entry["samples"]:
        assert sample["other_tokens"] == 0
        assert sample["tokens"] == 9
        assert sample["prefill_seconds"] > 0 and sample["decoding_seconds"] > 0
    passes = {(s["way"], s["nodes"]): s["forward_passes"] for s in entry["samples"]}
    assert passes["plain generate", 0] == 9
    assert passes["prompt look-up of transformers", 10] < 9
    assert passes["ReferenceCopy", 64] == 4  # 5 | 6 7 8 5 6, 9 | 10 | 2, some in one pass
    ours = entry["samples"][-1]
    assert sum(ours["accepted_lengths"]) == ours["forward_passes"]


def test_what_a_model_says_by_itself_is_that_of_plain_decoding(tokenizer, byte_llama, monkeypatch):
    monkeypatch.setattr(measure, "NEW_TOKENS", 12)
    bench = begun(byte_llama, tokenizer, replay=False)
    entry, ids = bench.ask("a prompt", PROMPT)
    assert all(sample["other_tokens"] == 0 for sample in entry["samples"])
    expected = byte_llama.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)
    assert ids == expected[0, len(PROMPT) :].tolist() == bench.answer("a prompt", PROMPT)


def test_ways_take_turns_in_another_order_for_each_prompt(tokenizer, monkeypatch):
    bench = begun(random_model("tiny", len(tokenizer)), tokenizer)
    asked, say = [], bench.say

    def noted(prompt_ids, answer_ids, **kwargs):
        asked.append(kwargs)
        return say(prompt_ids, answer_ids, **kwargs)

    monkeypatch.setattr(bench, "say", noted)
    for name in ("a prompt", "another"):
        bench.ask(name, PROMPT, ANSWER)
    given = [way.kwargs for way in bench.ways]
    turns = asked[: len(given)], asked[len(given) :]
    for turn in turns:
        assert turn != given and all(kwargs in turn for kwargs in given)
    assert turns[0] != turns[1]


def test_a_token_that_the_model_has_not_is_named(tokenizer):
    bench = begun(random_model("tiny", 20), tokenizer)
    with pytest.raises(ValueError, match="a prompt has the token 20, but the model a vocabulary"):
        bench.ask("a prompt", [5, 20], [3])


def test_a_loop_that_computes_something_else_is_found_out_in_a_replay(tokenizer):
    """Though the text is forced, and so the same."""
    model = random_model("tiny", len(tokenizer))
    ways = [make_ways()[0], Way("ReferenceCopy", 8, rs.ReferenceCopy())]
    bench = begun(model, tokenizer, lambda: ways)
    bench.ask("a prompt", PROMPT, ANSWER)  # the probe has passed

    def spoil(model, arguments, output):
        if output.logits.shape[1] > 1:
            output.logits = torch.randn_like(output.logits)
        return output

    model.register_forward_hook(spoil)
    with pytest.raises(IdsDifferError, match=r"ReferenceCopy \(8 nodes\) gives other ids"):
        bench.ask("a prompt", PROMPT, ANSWER)


def other_ways() -> list[Way]:
    return [Way("plain generate", 0), Way("another", 0, options={"min_new_tokens": 12})]


def test_other_ids_stop_it_in_float32_and_are_counted_in_bfloat16(tokenizer, monkeypatch):
    monkeypatch.setattr(measure, "NEW_TOKENS", 12)
    model = random_model("tiny", len(tokenizer))
    ids = begun(model, tokenizer, other_ways, replay=False).answer("a prompt", PROMPT)
    model.generation_config.eos_token_id = ids[3]
    stops_at = ids.index(ids[3])
    with pytest.raises(IdsDifferError, match=rf"a prompt: another .* new token {stops_at} on"):
        begun(model, tokenizer, other_ways, replay=False).ask("a prompt", PROMPT)
    model = random_model("tiny", len(tokenizer), dtype=torch.bfloat16)
    ids = begun(model, tokenizer, other_ways, replay=False).answer("a prompt", PROMPT)
    model.generation_config.eos_token_id = ids[3]
    bench = begun(model, tokenizer, other_ways, replay=False)
    entry, _ = bench.ask("a prompt", PROMPT)
    assert [sample["other_tokens"] > 0 for sample in entry["samples"]] == [False, True]


def test_a_tie_is_counted_and_stops_nothing(tokenizer, monkeypatch):
    """Both tokens have the same logit to the last bit, and one way may not say the first."""
    monkeypatch.setattr(measure, "NEW_TOKENS", 4)
    model = random_model("tiny", len(tokenizer))
    [first, *_] = begun(model, tokenizer, other_ways, replay=False).answer("a prompt", PROMPT)
    twin = first - 1
    with torch.no_grad():
        model.get_output_embeddings().weight[twin] = model.get_output_embeddings().weight[first]

    def suppressing(token: int):
        options = {"suppress_tokens": [token]}
        return lambda: [Way("plain generate", 0), Way("another", 0, options=options)]

    [tied, *_] = begun(model, tokenizer, other_ways, replay=False).answer("a prompt", PROMPT)
    assert tied in (first, twin)
    bench = begun(model, tokenizer, suppressing(tied), replay=False)
    entry, _ = bench.ask("a prompt", PROMPT)
    assert [sample["other_tokens"] > 0 for sample in entry["samples"]] == [False, True]
    with torch.no_grad():
        model.get_output_embeddings().weight[twin] *= 0.99
    with pytest.raises(IdsDifferError):
        begun(model, tokenizer, suppressing(first), replay=False).ask("a prompt", PROMPT)


def test_a_prompt_that_the_context_does_not_hold_is_refused(tokenizer):
    model = random_model("tiny", len(tokenizer))
    model.config.max_position_embeddings = 20
    bench = begun(model, tokenizer)
    with pytest.raises(ContextTooShortError, match=r"12 tokens and up to 9 new ones.* 20"):
        bench.ask("a prompt", PROMPT, ANSWER)
    with pytest.raises(ContextTooShortError, match=f"up to {measure.NEW_TOKENS} new ones"):
        bench.answer("a prompt", PROMPT)


def test_first_calls_leave_nothing_behind(tokenizer):
    bench = Bench(random_model("tiny", len(tokenizer)), tokenizer, make_ways, replay=True)
    bench.warm_up()
    bench.begin()
    assert [len(way.cache) for way in bench.ways if way.cache is not None] == [0] * 6
    bench.remember(PROMPT, ANSWER)
    assert [len(way.cache) for way in bench.ways if way.cache is not None] == [1] * 6
    bench.begin()
    assert [len(way.cache) for way in bench.ways if way.cache is not None] == [0] * 6


def test_prompt_look_up_is_left_out_where_transformers_refuses_it(tokenizer):
    config = MambaConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1)
    bench = begun(MambaForCausalLM(config).eval(), tokenizer)
    assert LOOK_UP not in [way.name for way in bench.ways]
    bench.warm_up()
    entry, _ = bench.ask("a prompt", PROMPT, ANSWER)
    assert [sample["way"] for sample in entry["samples"]] == [way.name for way in bench.ways]


def test_a_datastore_adds_its_ways(tmp_path, tokenizer):
    store = rs.Datastore.build(["def f(): pass"] * 3, tokenizer, tmp_path / "s", progress=False)
    names = [way.name for way in make_ways(store)]
    assert [name for name in names if name not in {way.name for way in make_ways()}] == [
        "REST's algorithm",
        "DatastoreDrafts",
    ]
    compact = store.compact(tmp_path / "c", max_bytes=5000, progress=False)
    assert "REST's algorithm" not in [way.name for way in make_ways(compact)]
