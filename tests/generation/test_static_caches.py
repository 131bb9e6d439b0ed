"""Static caches: the ids of plain decoding, compiled or not, and no graph too many."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
from architectures import MODEL_TYPES, VOCAB_SIZE, small
from calls import GREEDY, Call
from drafters import Noise, Prophet, Prophets
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig, StaticCache

import hf_refspec as rs
from hf_refspec.verification.static import WIDTHS

PROMPT = torch.randint(3, VOCAB_SIZE, (1, 12), generator=torch.Generator().manual_seed(1))
UNEQUAL = [0.95, 0.5, 0.2]
STATIC = {"cache_implementation": "static"}
ATTENTIVE = ["llama", "gpt2", "qwen3_moe", "deepseek_v3", "mistral", "gemma2"]
# Without position ids, with running states, or outside of transformers' caches.
OTHERS = ["bloom", "qwen3_next", "mamba"]
# A type that adds layers to its cache, which the oldest transformers does not have.
ADDS_LAYERS = pytest.param(
    "dory", marks=pytest.mark.skipif("dory" not in MODEL_TYPES, reason="new type")
)
COMPILED = ["llama", "gemma2", "gpt2", "mixtral"]
HAS_COMPILER = any(map(shutil.which, ("g++", "clang++", "c++")))


def on_any_device(**options) -> CompileConfig:
    """A configuration with which `generate` compiles on a CPU too."""
    config = CompileConfig(mode="default", **options)
    config._compile_all_devices = True
    return config


def generate(model, drafter=None, **options):
    torch.manual_seed(5)
    options = {**GREEDY, **options}
    if options.get("past_key_values") is None:
        options["cache_implementation"] = "static"
    if drafter is not None:
        options = {"candidate_generator": drafter, "max_draft_tokens": 12, **options}
    return model.generate(**{"inputs": PROMPT, **options})


@pytest.mark.parametrize("model_type", ATTENTIVE)
def test_ids_equal_plain_decoding_in_the_same_cache(model_type, models_by_type, caplog):
    model = models_by_type(model_type)
    for verification, sampling in (("tree", {}), ("chain", {"do_sample": True, "top_k": 5})):
        plain = generate(model, **sampling)
        good = Prophet(plain, accuracy=0.9)
        for drafter in (good, Noise()):
            drafted = generate(model, drafter, verification=verification, **sampling)
            assert drafted.tolist() == plain.tolist()
        assert good.stats.mat > 1.5
    assert "decodes plainly" not in caplog.text


@pytest.mark.parametrize("model_type", ATTENTIVE)
def test_rows_equal_plain_batched_decoding(model_type, models_by_type):
    call = Call(models_by_type(model_type), rows=3, seed=3)
    assert call.assert_lossless(UNEQUAL, max_draft_tokens=12, **STATIC).mat > 1.2


@pytest.mark.parametrize("model_type", OTHERS)
def test_what_keeps_no_static_keys_decodes_as_without_a_drafter(model_type, models_by_type):
    model = models_by_type(model_type)
    plain = generate(model)
    assert generate(model, Prophet(plain, accuracy=0.9)).tolist() == plain.tolist()


# --- caches that are passed in


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("room", [-1, 0, 1, 5, 40])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_short_cache_cuts_drafts_and_not_the_text(models_by_type, model_type, rows, room):
    """The shortest one holds all tokens but the last, whose keys nobody needs."""
    call = Call(models_by_type(model_type), rows)
    length = call.plain.shape[1] + room
    drafter = Prophets(call.inputs, call.plain, UNEQUAL[:rows])
    caches = [StaticCache(config=call.model.config, max_cache_len=length) for _ in range(2)]
    plain = call.generate(past_key_values=caches[0])
    drafted = call.generate(past_key_values=caches[1], candidate_generator=drafter)
    assert drafted.tolist() == plain.tolist() == call.plain.tolist()
    cached = call.plain.shape[1] - 1
    assert int(caches[1].get_seq_length()) == cached
    seen = torch.ones((rows, cached), dtype=torch.bool)
    seen[:, :12] = call.inputs["attention_mask"].bool()
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        assert type(one) is type(other) and one.keys.shape == other.keys.shape
        shown = seen[:, -one.max_cache_len :]  # some keep the last tokens only
        kept = [layer.keys[:, :, :cached].transpose(1, 2)[shown] for layer in (one, other)]
        torch.testing.assert_close(*kept, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("new_tokens", [2, 24])  # less than the window, and more
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mistral", "gpt_oss", ADDS_LAYERS])
def test_a_given_cache_goes_on_as_that_of_plain_decoding(
    models_by_type, model_type, new_tokens, rows
):
    call, texts, layers = Call(models_by_type(model_type), rows), [], []
    for drafter in (None, call.drafter()):
        cache = StaticCache(config=call.model.config, max_cache_len=64)
        options = {"past_key_values": cache, "max_new_tokens": new_tokens}
        ids = call.generate(candidate_generator=drafter, **options)
        layers.append([(type(layer), layer.max_cache_len) for layer in cache.layers])
        ones = torch.ones((rows, new_tokens), dtype=torch.int64)
        options["attention_mask"] = torch.cat([call.inputs["attention_mask"], ones], dim=-1)
        texts.append(call.generate(**{**options, "input_ids": ids, "max_new_tokens": 20}).tolist())
    assert texts[0] == texts[1]
    assert layers[0] == layers[1]


@pytest.mark.parametrize("model_type", ["llama", "gemma2", ADDS_LAYERS])
def test_a_cache_that_generate_makes_is_returned_as_plain_decoding_does(models_by_type, model_type):
    call, caches = Call(models_by_type(model_type), rows=1), []
    for drafter in (None, call.drafter()):
        options = {"cache_implementation": "static", "return_dict_in_generate": True}
        output = call.generate(candidate_generator=drafter, **options)
        caches.append(output.past_key_values)
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        assert type(one) is type(other)
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-5)


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
    call = Call(small("gpt2", n_positions=48), rows=3)
    options = {"max_length": 49, "max_new_tokens": None, "return_dict_in_generate": True}
    options |= STATIC if static else {}
    plain = call.generate(**options).sequences
    drafter = Prophets(call.inputs, plain, UNEQUAL)
    drafted = call.generate(candidate_generator=drafter, **options).sequences
    assert drafted.tolist() == plain.tolist()


def test_a_given_cache_whose_layers_all_keep_a_window_stays_as_it_is(models_by_type):
    """It does not say how long texts may get."""
    model = models_by_type("mistral")
    texts = []
    for drafter in (None, Noise()):
        cache = StaticCache(config=model.config, max_cache_len=600)
        first = generate(model, drafter, past_key_values=cache)
        more = {"inputs": first, "max_new_tokens": 150, "past_key_values": cache}
        texts.append(generate(model, drafter, **more).tolist())
    assert texts[0] == texts[1]


def test_a_cache_without_room_for_the_text_is_an_error_that_says_so(llama):
    cache = StaticCache(config=llama.config, max_cache_len=20)
    with pytest.raises(ValueError, match="The static cache has room for 20 tokens"):
        generate(llama, Noise(), past_key_values=cache)
    assert int(cache.get_seq_length()) == 20  # a prefix of the text


# --- compiled passes


@pytest.fixture
def own(models_by_type):
    """Builds models for this test alone: one that has been compiled cannot be pickled."""
    return lambda model_type: deepcopy(models_by_type(model_type))


@pytest.fixture
def graphs():
    """What torch has compiled since the test began."""
    torch._dynamo.reset()
    counters.clear()
    return lambda: counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("model_type", COMPILED)
def test_each_width_is_one_graph_without_a_break(own, model_type, graphs):
    model = own(model_type)
    compiled = {"compile_config": on_any_device(backend="eager")}
    plain = generate(model)
    for nodes in (0, 7, 15, 31, 64, 3, 12, 40):
        drafter = Prophet(plain, accuracy=0.8, branches=10)
        drafted = generate(model, drafter, max_draft_tokens=nodes, **compiled)
        assert drafted.tolist() == plain.tolist()
    assert graphs() <= len(WIDTHS)
    assert not counters["graph_break"]


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler, which torch.compile needs")
@pytest.mark.parametrize("model_type", COMPILED[:2])
def test_compiled_passes_have_the_ids_of_plain_decoding(own, model_type, graphs):
    model = own(model_type)
    plain = generate(model)
    drafter = Prophet(plain, accuracy=0.8, branches=2)
    compiled = {"compile_config": on_any_device(), "max_draft_tokens": 7}
    for _ in range(2):
        assert generate(model, drafter, **compiled).tolist() == plain.tolist()
    assert drafter.stats.mat > 1.5
    assert 0 < graphs() <= 2  # passes over 1 and over 8 tokens


@pytest.mark.parametrize("rows", [1, 2])
def test_after_warmup_nothing_is_compiled(own, rows, graphs):
    llama = own("llama")
    compiled = {"compile_config": on_any_device(backend="eager")}
    rs.warmup(llama, max_length=60, rows=rows, **compiled)
    known = graphs()
    assert known == len(WIDTHS)
    call = Call(llama, rows)
    options = {"cache_implementation": "static", "max_length": 60, "max_new_tokens": None}
    for nodes in (5, 40, "auto"):
        drafter = call.drafter(0.8)
        drafted = call.generate(
            candidate_generator=drafter, max_draft_tokens=nodes, **options, **compiled
        )
        assert drafted[:, : call.plain.shape[1]].tolist() == call.plain.tolist()
    assert graphs() == known


def test_threads_compile_one_at_a_time(own, graphs):
    """Each would compile the same alone; one of them gets the kept layers."""
    llama = own("llama")
    compiled = {"compile_config": on_any_device(backend="eager"), "max_draft_tokens": 7}
    plain = generate(llama)

    def drafted(seed: int) -> list:
        return generate(llama, Prophet(plain, accuracy=0.8, seed=seed), **compiled).tolist()

    with ThreadPoolExecutor(2) as threads:
        assert all(ids == plain.tolist() for ids in threads.map(drafted, range(6)))


@pytest.mark.parametrize("wrong", [{"max_length": 0}, {"rows": 0}])
def test_warmup_names_what_is_wrong(llama, wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be at least 1, but is 0"):
        rs.warmup(llama, **wrong)


@torch._dynamo.config.patch(suppress_errors=False)  # which outlines sets when it is imported
def test_a_model_that_cannot_be_compiled_runs_as_it_is_with_one_warning(own, caplog):
    def fails(graph, inputs):
        raise RuntimeError("no such instruction")

    model = own("starcoder2")
    plain = generate(model)
    compiled = {"compile_config": on_any_device(backend=fails)}
    for _ in range(2):
        drafted = generate(model, Prophet(plain, accuracy=0.8), **compiled)
        assert drafted.tolist() == plain.tolist()
    warnings = [record.message for record in caplog.records if "compiled" in record.message]
    assert len(warnings) == 1
    assert "cannot be compiled, and runs as it is" in warnings[0]


class WrittenEntries(TorchDispatchMode):
    """Counts the numbers that are written into the layers of a cache."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.index_copy_.default, torch.ops.aten.scatter_.src):
            self.count += args[3].numel()
        return function(*args, **(kwargs or {}))


def test_a_pass_writes_its_own_tokens_and_no_more(llama):
    """A path that stands in order does not move, and nothing else of the cache is copied."""
    plain = generate(llama)
    chain = Prophet(plain, accuracy=1.0, branches=0)
    tokens: list[int] = []
    hook = llama.register_forward_pre_hook(
        lambda _, args, kwargs: tokens.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    generate(llama, chain, max_draft_tokens=7)  # what the probe writes is not counted
    tokens.clear()
    with hook, WrittenEntries() as written:
        generate(llama, chain, max_draft_tokens=7)
    assert set(tokens) <= {PROMPT.shape[1], 1, 8}
    config = llama.config
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert written.count == entry * sum(tokens)
