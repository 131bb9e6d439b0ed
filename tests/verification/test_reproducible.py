"""Reproducible passes: drafts change no bit of the logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from transformers import DynamicCache, StaticCache
from transformers.generation import GenerateDecoderOnlyOutput

import hf_refspec as rs
from tests.helpers.architectures import small
from tests.helpers.calls import GREEDY, Call, compiled_anywhere
from tests.helpers.calls import RANDOM_PROMPT as PROMPT
from tests.helpers.drafters import Noise, Prophet

MODELS = ["llama", "qwen3", "gemma2", "gpt2", "mistral"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SAMPLING = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_p": 0.9}}


RETURNED = dict.fromkeys(("return_dict_in_generate", "output_logits", "output_scores"), True)


def generate(model, drafter=None, **options) -> GenerateDecoderOnlyOutput:
    torch.manual_seed(7)
    options = {**GREEDY, "max_new_tokens": 32, **RETURNED, **options}
    options = {"inputs": PROMPT, "verification": "reproducible", **options}
    return model.generate(candidate_generator=drafter, **options)


def assert_same_bits(one: GenerateDecoderOnlyOutput, other: GenerateDecoderOnlyOutput) -> None:
    assert one.sequences.tolist() == other.sequences.tolist()
    for name in ("logits", "scores"):
        pairs = zip(getattr(one, name), getattr(other, name), strict=True)
        assert all(torch.equal(*pair) for pair in pairs), name


@pytest.mark.parametrize(
    ("dtype", "sampling"),
    [*((dtype, "greedy") for dtype in DTYPES), (torch.bfloat16, "sampled")],
    ids=str,
)
@pytest.mark.parametrize("model_type", MODELS)
def test_no_drafter_changes_a_bit(models_by_type, model_type, dtype, sampling):
    model, options = models_by_type(model_type, dtype), SAMPLING[sampling]
    plain = generate(model, **options)
    good = Prophet(plain.sequences, accuracy=0.9)
    for drafter, nodes in ((good, "auto"), (good, 15), (Noise(), 5), (rs.ReferenceCopy(), 64)):
        drafted = generate(model, drafter, max_draft_tokens=nodes, **options)
        assert_same_bits(drafted, plain)
    assert good.stats.mat > 1.5


@settings(max_examples=25)
@given(
    st.floats(0, 1),
    st.integers(0, 3),
    st.integers(0, 15),
    st.integers(0, 2**31),
    st.booleans(),
    st.sampled_from(["llama", "mistral"]),
)
def test_no_draft_of_any_length_changes_a_bit(
    models_by_type, accuracy, branches, nodes, seed, samples, model_type
):
    model = models_by_type(model_type, torch.bfloat16)
    options = SAMPLING["sampled" if samples else "greedy"]
    plain = generate(model, **options)
    drafter = Prophet(plain.sequences, accuracy, branches, seed)
    assert_same_bits(generate(model, drafter, max_draft_tokens=nodes, **options), plain)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_have_the_same_texts(models_by_type, dtype, sampling):
    options = {"verification": "reproducible", **SAMPLING[sampling]}
    call = Call(models_by_type("llama", dtype), rows=3, **options)
    for accuracies in ([0.9, 0.5, 0.1], [0.2, 0.95, 0.0]):
        call.assert_lossless(accuracies)


@pytest.mark.parametrize("attached", [True, False])
def test_an_attached_drafter_and_the_explicit_loop_change_no_id(models_by_type, attached):
    model = models_by_type("llama", torch.bfloat16)
    call = Call(model, inputs={"input_ids": PROMPT}, verification="reproducible")
    if attached:
        with rs.attach(model, verification="reproducible") as attachment:
            ids = model.generate(PROMPT, **GREEDY | {"max_new_tokens": 32})
        assert attachment.stats.tokens == 32
    else:
        ids = call.generate(custom_generate=rs.speculate)
    assert ids.tolist() == call.plain.tolist()


def mixture(dtype):
    """Large enough that a product over several tokens runs another kernel than over one."""
    config = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "num_experts": 8}
    config |= {"num_experts_per_tok": 2, "initializer_range": 0.1, "num_key_value_heads": 2}
    return small("qwen3_moe", dtype, **config)


def test_a_mixture_whose_shapes_depend_on_other_tokens_is_refused():
    with pytest.raises(ValueError, match='load it with `experts_implementation="batched_mm"`'):
        generate(mixture(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mixture_that_runs_each_token_alone_has_the_same_bits(dtype):
    model = mixture(dtype)
    model.set_experts_implementation("batched_mm")
    for token in (3, 8):  # short prompts, so that experts get few tokens
        options = {"inputs": torch.tensor([[token]]), "max_new_tokens": 24}
        plain = generate(model, **options)
        drafted = generate(model, Prophet(plain.sequences, 0.7), max_draft_tokens=8, **options)
        assert_same_bits(drafted, plain)


@pytest.mark.parametrize("given", [True, False])
def test_a_cache_that_is_not_static_is_refused(llama, given):
    cache = {"past_key_values": DynamicCache(config=llama.config)}
    with pytest.raises(ValueError, match="`verification='reproducible'` needs a static cache"):
        generate(llama, **(cache if given else {"cache_implementation": "dynamic"}))


def test_a_cache_without_room_for_a_pass_is_refused(llama):
    cache = StaticCache(config=llama.config, max_cache_len=43)
    with pytest.raises(ValueError, match="`max_cache_len` of 44 or more, but it has 43"):
        generate(llama, past_key_values=cache)
    plain, drafted = [
        generate(llama, drafter, past_key_values=StaticCache(llama.config, max_cache_len=44))
        for drafter in (None, rs.ReferenceCopy())
    ]
    assert_same_bits(drafted, plain)


def test_the_models_default_cache_does_not_matter():
    model = small("qwen3")
    plain = generate(model)
    model.generation_config.cache_implementation = "dynamic"
    assert_same_bits(generate(model), plain)


def test_compiled_passes_have_the_same_bits(models_by_type):
    """Of one graph, which the probe compiles."""
    torch._dynamo.reset()
    counters.clear()
    options = {"compile_config": compiled_anywhere(backend="aot_eager")}
    model = models_by_type("llama", torch.bfloat16)
    plain = generate(model, **options)
    drafter = Prophet(plain.sequences, accuracy=0.8)
    assert_same_bits(generate(model, drafter, **options), plain)
    assert counters["stats"]["unique_graphs"] == 1
