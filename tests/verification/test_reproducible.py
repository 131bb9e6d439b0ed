"""The same bits with drafts and without, whatever was drafted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from architectures import VOCAB_SIZE, Architecture, build
from calls import Call
from drafters import Noise, Prophet, Prophets
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache, StaticCache
from transformers.generation import GenerateDecoderOnlyOutput

import hf_refspec as rs

PROMPT = torch.randint(3, VOCAB_SIZE, (1, 12), generator=torch.Generator().manual_seed(1))
MODELS = ["llama", "qwen3", "gemma2", "gpt2", "mistral"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SAMPLING = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_p": 0.9}}


@pytest.fixture(scope="module")
def models():
    """Of each model type and dtype, once."""
    from architectures import ARCHITECTURES

    by_type = {architecture.model_type: architecture for architecture in ARCHITECTURES}
    built: dict = {}

    def get(model_type: str, dtype: torch.dtype):
        if (model_type, dtype) not in built:
            built[model_type, dtype] = build(by_type[model_type], dtype)
        return built[model_type, dtype]

    return get


def generate(model, drafter=None, **options) -> GenerateDecoderOnlyOutput:
    torch.manual_seed(7)
    return model.generate(
        **{
            "inputs": PROMPT,
            "max_new_tokens": 32,
            "eos_token_id": None,
            "do_sample": False,
            "verification": "reproducible",
            "candidate_generator": drafter,
            "return_dict_in_generate": True,
            "output_logits": True,
            "output_scores": True,
            **options,
        }
    )


class Watched(Prophet):
    """Counts the verified drafts that have branches."""

    def begin(self, prompt_ids, vocab_size):
        super().begin(prompt_ids, vocab_size)
        self.trees = 0

    def observe(self, observation):
        super().observe(observation)
        self.trees += not observation.verified.is_chain


def assert_same_bits(one: GenerateDecoderOnlyOutput, other: GenerateDecoderOnlyOutput) -> None:
    assert one.sequences.tolist() == other.sequences.tolist()
    for name in ("logits", "scores"):
        pairs = zip(getattr(one, name), getattr(other, name), strict=True)
        assert all(torch.equal(*pair) for pair in pairs), name


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model_type", MODELS)
def test_no_drafter_leaves_a_trace(models, model_type, dtype, sampling):
    model, options = models(model_type, dtype), SAMPLING[sampling]
    plain = generate(model, **options)
    good = Prophet(plain.sequences, accuracy=0.9)
    for drafter, nodes in ((good, 15), (good, "auto"), (Noise(), 5), (rs.ReferenceCopy(), 64)):
        drafted = generate(model, drafter, max_draft_tokens=nodes, **options)
        assert_same_bits(drafted, plain)
    assert good.stats.mat > 1.5


@settings(max_examples=25, deadline=None)
@given(
    st.floats(0, 1),
    st.integers(0, 3),
    st.integers(0, 15),
    st.integers(0, 2**31),
    st.booleans(),
    st.sampled_from(["llama", "mistral"]),
)
def test_no_trees_of_any_shape_leave_a_trace(
    models, accuracy, branches, nodes, seed, samples, model_type
):
    model = models(model_type, torch.bfloat16)
    options = SAMPLING["sampled" if samples else "greedy"]
    plain = generate(model, **options)
    drafter = Prophet(plain.sequences, accuracy, branches, seed)
    assert_same_bits(generate(model, drafter, max_draft_tokens=nodes, **options), plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [2, 4])
def test_rows_of_different_lengths_have_the_same_texts(models, dtype, rows):
    call = Call(models("llama", dtype), rows)
    plain = call.generate(verification="reproducible")
    for accuracies in ([0.9, 0.5, 0.1, 0.7], [0.2, 0.95, 0.6, 0.0]):
        drafter = Prophets(call.inputs, plain, accuracies[:rows])
        drafted = call.generate(candidate_generator=drafter, verification="reproducible")
        assert drafted.tolist() == plain.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_trees_where_torch_attends_and_chains_where_the_model_does(models, dtype):
    for model_type, has_trees in (("llama", True), ("mistral", True), ("gemma2", False)):
        model = models(model_type, dtype)
        plain = generate(model)
        drafter = Watched(plain.sequences, accuracy=0.8)
        assert_same_bits(generate(model, drafter, max_draft_tokens=15), plain)
        assert (drafter.trees > 0) == has_trees, model_type


def test_texts_longer_than_a_window_leave_no_trace(models):
    model = models("mistral", torch.bfloat16)
    plain = generate(model, max_new_tokens=80)
    drafter = Watched(plain.sequences, accuracy=0.8)
    assert_same_bits(generate(model, drafter, max_draft_tokens=15, max_new_tokens=80), plain)
    assert drafter.trees > 0


def test_calls_beside_it_attend_as_they_always_do(models):
    """Nothing of a model or of torch is switched for the passes over trees."""
    model = models("llama", torch.bfloat16)
    ordinary = {"verification": "auto", "cache_implementation": "static"}
    alone = generate(model), generate(model, Prophet([0], 0), **ordinary)

    def drafted(i: int) -> GenerateDecoderOnlyOutput:
        drafter = Prophet(alone[i % 2].sequences, 0.8 * (1 - i % 2))
        return generate(model, drafter, **(ordinary if i % 2 else {}))

    with ThreadPoolExecutor(4) as pool:
        for i, output in enumerate(pool.map(drafted, range(12))):
            assert_same_bits(output, alone[i % 2])


def test_what_drafters_remember_leaves_no_trace(models):
    model = models("llama", torch.bfloat16)
    drafter = rs.ReferenceCopy() | rs.RetrievalCache() | rs.TokenRecycling()
    outputs = [generate(model, drafter) for _ in range(3)]
    assert drafter.stats.mat > 2  # the third time it has seen it all
    for output in outputs:
        assert_same_bits(output, generate(model))


def test_an_attached_drafter_leaves_no_trace(models):
    model = models("llama", torch.bfloat16)
    plain = generate(model)
    options = {"max_new_tokens": 32, "eos_token_id": None, "do_sample": False}
    with rs.attach(model, verification="reproducible") as attachment:
        ids = model.generate(PROMPT, **options)
    assert ids.tolist() == plain.sequences.tolist()
    assert attachment.stats.tokens == 32


def mixture(dtype):
    """Large enough that the product over several tokens is another kernel than that over one."""
    config = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "num_experts": 8}
    config |= {"num_experts_per_tok": 2, "initializer_range": 0.1, "num_key_value_heads": 2}
    return build(Architecture("qwen3_moe", "tree", config), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mixture_whose_shapes_depend_on_other_tokens_is_refused(dtype):
    with pytest.raises(ValueError, match='load it with `experts_implementation="batched_mm"`'):
        generate(mixture(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mixture_that_runs_each_token_by_itself_has_the_same_bits(dtype):
    model = mixture(dtype)
    model.set_experts_implementation("batched_mm")
    for token in range(3, 9):  # short prompts, so that experts get few tokens
        options = {"inputs": torch.tensor([[token]]), "max_new_tokens": 24}
        plain = generate(model, **options)
        drafted = generate(model, Prophet(plain.sequences, 0.7), max_draft_tokens=8, **options)
        assert_same_bits(drafted, plain)


def test_a_cache_that_is_not_static_is_refused(llama):
    cache = DynamicCache(config=llama.config)
    with pytest.raises(ValueError, match="`verification='reproducible'` needs a static cache"):
        generate(llama, past_key_values=cache)
    with pytest.raises(ValueError, match="`verification='reproducible'` needs a static cache"):
        generate(llama, cache_implementation="dynamic")


def test_a_cache_without_room_for_a_pass_is_refused(llama):
    cache = StaticCache(config=llama.config, max_cache_len=43)
    with pytest.raises(ValueError, match="`max_cache_len` of 44 or more, but it has 43"):
        generate(llama, past_key_values=cache)
    plain, drafted = [
        generate(llama, drafter, past_key_values=StaticCache(llama.config, max_cache_len=44))
        for drafter in (None, rs.ReferenceCopy())
    ]
    assert_same_bits(drafted, plain)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_rows_draw_from_random_numbers_of_their_own(models, sampling):
    call = Call(models("llama", torch.bfloat16), rows=3)
    options = {"verification": "reproducible", **SAMPLING[sampling]}
    torch.manual_seed(3)
    plain = call.generate(**options)
    for accuracies in ([0.9, 0.5, 0.1], [0.2, 0.95, 0.6]):
        torch.manual_seed(3)
        drafter = Prophets(call.inputs, plain, accuracies)
        assert call.generate(candidate_generator=drafter, **options).tolist() == plain.tolist()


def test_what_the_model_is_configured_with_does_not_matter(models):
    model = models("qwen3", torch.float32)
    plain = generate(model)
    model.generation_config.cache_implementation = "dynamic"
    try:
        assert_same_bits(generate(model), plain)
    finally:
        model.generation_config.cache_implementation = None


def test_as_a_loop_by_name_it_drafts_by_default(models):
    model = models("llama", torch.bfloat16)
    ids = model.generate(
        PROMPT,
        max_new_tokens=32,
        eos_token_id=None,
        do_sample=False,
        custom_generate=rs.speculate,
        verification="reproducible",
    )
    assert ids.tolist() == generate(model).sequences.tolist()


def test_compiled_passes_have_the_same_bits(models):
    """Of one graph, which the probe compiles."""
    torch._dynamo.reset()
    counters.clear()
    config = CompileConfig(mode="default", backend="aot_eager")
    config._compile_all_devices = True
    model, options = models("llama", torch.bfloat16), {"compile_config": config}
    plain = generate(model, **options)
    drafter = Prophet(plain.sequences, accuracy=0.8)
    assert_same_bits(generate(model, drafter, **options), plain)
    assert counters["stats"]["unique_graphs"] == 1
