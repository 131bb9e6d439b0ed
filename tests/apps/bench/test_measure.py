"""A prompt is decoded by all methods in turn, timed, counted and compared."""

from __future__ import annotations

import copy

import pytest
import torch
from bench_samples import results
from transformers import MambaConfig, MambaForCausalLM

import hf_refspec as rs
from hf_refspec.apps.bench.measure import Bench, IdsDifferError
from hf_refspec.apps.bench.methods import (
    LOOK_UP,
    Method,
    decoding_methods,
    transformers_methods,
)
from hf_refspec.apps.bench.models import random_model
from hf_refspec.apps.bench.report import report
from hf_refspec.apps.bench.suites import chat_prompt
from hf_refspec.apps.shared.loading import load

PROMPT, ANSWER = [5, 6, 7, 8] * 3, [5, 6, 7, 8, 5, 6, 9, 10, 2]


def begun(model, tokenizer, methods=decoding_methods, new_tokens=None) -> Bench:
    bench = Bench(model, tokenizer, methods, new_tokens is None, new_tokens)
    bench.begin()
    return bench


def test_every_method_returns_the_recorded_answer(tokenizer):
    bench = begun(random_model("tiny", len(tokenizer)), tokenizer)
    entry, ids = bench.measure("a prompt", [PROMPT], ANSWER)
    assert ids == ANSWER
    assert (entry["name"], entry["prompt_tokens"]) == ("a prompt", 12)
    assert [(s["method"], s["nodes"]) for s in entry["samples"]] == [
        (method.name, method.nodes) for method in bench.methods
    ]
    for sample in entry["samples"]:
        assert sample["other_tokens"] == 0
        assert sample["tokens"] == 9
        assert sample["prefill_seconds"] > 0 and sample["decoding_seconds"] > 0
    passes = {(s["method"], s["nodes"]): s["forward_passes"] for s in entry["samples"]}
    assert passes["plain generate", 0] == 9
    assert passes["prompt look-up of transformers", 10] < 9
    assert passes["ReferenceCopy", 64] == 4  # 5 | 6 7 8 5 6, 9 | 10 | 2, some in one pass


def test_rows_of_a_batch_are_counted_and_compared_one_by_one(tokenizer, byte_llama):
    """One of them ends early: what stands behind its end is padding."""
    prompts = [PROMPT, PROMPT[:4], PROMPT[2:]]
    rows = [begun(byte_llama, tokenizer, new_tokens=8).measure("x", [each])[1] for each in prompts]
    model = copy.deepcopy(byte_llama)
    model.generation_config.eos_token_id = rows[1][3]
    model.generation_config.pad_token_id = 0
    lengths = [row.index(rows[1][3]) + 1 if rows[1][3] in row else 8 for row in rows]
    methods = [Method("plain"), Method("ours", 8, rs.ReferenceCopy() | rs.TokenRecycling())]
    bench = Bench(model, tokenizer, lambda: methods, False, 8)
    bench.begin()
    entry, _ = bench.measure("three", prompts)
    for sample in entry["samples"]:
        assert (sample["tokens"], sample["other_tokens"]) == (sum(lengths), 0)
    assert entry["samples"][0]["forward_passes"] == sum(lengths)
    assert entry["samples"][1]["forward_passes"] <= sum(lengths)


def test_methods_take_turns_in_another_order_for_each_prompt(tokenizer, monkeypatch):
    bench = begun(random_model("tiny", len(tokenizer)), tokenizer)
    turns, call = {"a prompt": [], "another": []}, Bench.call
    for name, turn in turns.items():

        def noted(self, method, *args, turn=turn):
            turn.append(bench.methods.index(method))
            return call(self, method, *args)

        monkeypatch.setattr(Bench, "call", noted)
        bench.measure(name, [PROMPT], ANSWER)
        assert turn != sorted(turn) == list(range(len(bench.methods)))
    assert turns["a prompt"] != turns["another"]


def test_a_token_that_the_model_has_not_is_named(tokenizer):
    bench = begun(random_model("tiny", 20), tokenizer)
    with pytest.raises(ValueError, match="has the token 20, but the model has a vocabulary"):
        bench.measure("a prompt", [[5, 20]], [3])


def spoil(model, change) -> None:
    """Changes the logits of passes over drafts."""

    def hook(model, arguments, output):
        if output.logits.shape[1] > 1:
            output.logits = change(output.logits)
        return output

    hook.only_reads = True  # a lie, so that the model is not probed again
    model.register_forward_hook(hook)


def plain_and_drafted() -> list[Method]:
    return [Method("plain generate"), Method("ReferenceCopy", 8, rs.ReferenceCopy())]


def test_a_loop_that_computes_something_else_is_found_out_in_a_replay(tokenizer):
    """Though the text is forced, and so the same."""
    model = random_model("tiny", len(tokenizer))
    bench = begun(model, tokenizer, plain_and_drafted)
    bench.measure("a prompt", [PROMPT], ANSWER)  # the probe has passed
    spoil(model, torch.randn_like)
    with pytest.raises(IdsDifferError, match=r"ReferenceCopy \(8 nodes\) returns other ids"):
        bench.measure("a prompt", [PROMPT], ANSWER)


def other_methods() -> list[Method]:
    return [Method("plain generate"), Method("another", options={"min_new_tokens": 12})]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_ids_stop_it_in_float32_and_are_counted_in_bfloat16(tokenizer, dtype):
    model = random_model("tiny", len(tokenizer), dtype=dtype)
    bench = begun(model, tokenizer, other_methods, new_tokens=12)
    ids = bench.answer("a prompt", PROMPT)
    model.generation_config.eos_token_id = ids[3]
    if dtype == torch.float32:
        with pytest.raises(IdsDifferError, match=rf"another .* new token {ids.index(ids[3])} on"):
            bench.measure("a prompt", [PROMPT])
        return
    entry, _ = bench.measure("a prompt", [PROMPT])
    assert [sample["other_tokens"] > 0 for sample in entry["samples"]] == [False, True]
    assert entry["samples"][0]["first_difference"] is None


@pytest.mark.parametrize("replay", [False, True])
def test_a_difference_that_is_no_near_tie_is_reported_with_its_margin(tokenizer, replay):
    model = random_model("tiny", len(tokenizer), dtype=torch.bfloat16)
    bench = begun(model, tokenizer, plain_and_drafted, None if replay else 12)
    answer = ANSWER if replay else None
    bench.measure("a prompt", [PROMPT], answer)  # the probe has passed
    spoil(model, torch.neg)
    entry, _ = bench.measure("a prompt", [PROMPT], answer)
    plain, drafted = entry["samples"]
    assert plain["first_difference"] is None
    assert drafted["first_difference"]["steps"] > 50
    assert f"| {drafted['first_difference']['steps']:g} |" in report(results("bfloat16", x=[entry]))


def test_a_tie_is_counted_and_stops_nothing(tokenizer):
    """Both tokens have the same logit to the last bit, and one method may not say the first."""
    model = random_model("tiny", len(tokenizer))
    [first, *_] = begun(model, tokenizer, other_methods, new_tokens=4).answer("a prompt", PROMPT)
    twin = first - 1
    with torch.no_grad():
        model.get_output_embeddings().weight[twin] = model.get_output_embeddings().weight[first]

    def suppressing(token: int):
        options = {"suppress_tokens": [token]}
        return lambda: [Method("plain generate"), Method("another", options=options)]

    [tied, *_] = begun(model, tokenizer, other_methods, new_tokens=4).answer("a prompt", PROMPT)
    assert tied in (first, twin)
    bench = begun(model, tokenizer, suppressing(tied), new_tokens=4)
    entry, _ = bench.measure("a prompt", [PROMPT])
    assert [sample["other_tokens"] > 0 for sample in entry["samples"]] == [False, True]
    with torch.no_grad():
        model.get_output_embeddings().weight[twin] *= 0.99
    with pytest.raises(IdsDifferError):
        begun(model, tokenizer, suppressing(first), new_tokens=4).measure("a prompt", [PROMPT])


@pytest.mark.parametrize(
    "prompt",
    [
        "Repeat this list twice: apples, pears, plums, apples, pears, cherries, apples, plums.",
        "Write a Python function that returns the names of all files in a folder, and one that "
        "returns the sizes of all files in a folder.",
    ],
)
def test_with_a_trained_model_in_bfloat16_only_near_ties_flip(prompt):
    """In float32 none does: another difference would raise [`IdsDifferError`]."""
    model, tokenizer = load(device_map="cpu", dtype=torch.bfloat16)

    def methods():
        drafters = (rs.ReferenceCopy(), rs.ReferenceCopy() | rs.RetrievalCache())
        return [*transformers_methods(), *(Method("drafts", 8, each) for each in drafters)]

    bench = begun(model, tokenizer, methods, new_tokens=24)
    entry, _ = bench.measure("a prompt", [chat_prompt([prompt], tokenizer)])
    for sample in entry["samples"]:
        assert (sample["first_difference"] is None) == (sample["other_tokens"] == 0)
        if sample["first_difference"] is not None:
            assert sample["first_difference"]["steps"] <= 8


def test_first_calls_leave_nothing_behind(tokenizer):
    bench = Bench(random_model("tiny", len(tokenizer)), tokenizer, decoding_methods, replay=True)
    bench.warm_up()
    for _ in range(2):
        bench.begin()
        caches = [method.cache for method in bench.methods if method.cache is not None]
        assert [len(cache) for cache in caches] == [0] * 5
        bench.remember(PROMPT, ANSWER)
        assert [len(cache) for cache in caches] == [1] * 5


def test_prompt_look_up_is_left_out_where_transformers_refuses_it(tokenizer):
    config = MambaConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1)
    bench = begun(MambaForCausalLM(config).eval(), tokenizer)
    assert LOOK_UP not in [method.name for method in bench.methods]
    bench.warm_up()
    entry, _ = bench.measure("a prompt", [PROMPT], ANSWER)
    assert [sample["method"] for sample in entry["samples"]] == [
        method.name for method in bench.methods
    ]
