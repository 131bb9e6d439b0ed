"""What holds on the CPU holds on a GPU: `scripts/gpu_bench` runs these tests there.

    HF_REFSPEC_DEVICE=pretended pytest tests/test_on_a_gpu.py

runs them on a pretended one, as `test_pretended_device.py` does.
"""

import copy

import numpy as np
import pytest
import torch

from hf_refspec.ralm.knn_datastore import KnnDatastore
from hf_refspec.retrieval.vector_index import (
    FaissFlatIndex,
    FlatIndex,
    finds_gpus,
    squared_lengths,
)
from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.calls import RANDOM_PROMPT as PROMPT
from tests.helpers.calls import compiled_anywhere
from tests.helpers.devices import DEVICE, needs_device
from tests.helpers.drafters import Noise, Prophet

pytestmark = needs_device
NEW_TOKENS = 24
STATIC = {"cache_implementation": "static", "disable_compile": True}
COMPILED = {"cache_implementation": "static"}
if DEVICE == "cpu":  # where `generate` compiles only if it is told to
    COMPILED["compile_config"] = compiled_anywhere()
TREES = [each for each in ARCHITECTURES if each.verification == "tree"]
MOST_DIFFERENT = 0.5  # of the texts of tiny random models in bfloat16, which have many near-ties


@pytest.fixture
def on_device(models_by_type):
    """Puts a copy of the tiny model of a type on the device."""

    def get(model_type: str, dtype: torch.dtype = torch.float32):
        return copy.deepcopy(models_by_type(model_type)).to(DEVICE, dtype)

    return get


def generate(model, **options):
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, **options}
    return model.generate(PROMPT.to(DEVICE), **options)


def drafters(plain):
    """A good one, a bad one, and none that is right."""
    return [Prophet(plain.cpu(), 0.9), Prophet(plain.cpu(), 0.5, seed=1), Noise()]


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        *[(each, {}) for each in ARCHITECTURES],
        *[(each, STATIC) for each in TREES],
        *[(each, COMPILED) for each in TREES if str(each) in ("llama", "gpt2", "mistral")],
    ],
    ids=str,
)
def test_ids_equal_plain_decoding_in_float32(architecture, options, on_device):
    model = on_device(architecture.model_type)
    plain = generate(model)
    verification = "static" if options else architecture.verification
    for drafter in drafters(plain):
        assert torch.equal(generate(model, candidate_generator=drafter, **options), plain)
        # A pass that raises is decoded plainly, with the same ids.
        assert drafter.stats.verification == verification


def test_most_texts_are_equal_in_bfloat16(on_device):
    equal = total = 0
    for architecture in TREES:
        model = on_device(architecture.model_type, torch.bfloat16)
        plain = generate(model)
        for drafter in drafters(plain):
            equal += torch.equal(generate(model, candidate_generator=drafter), plain)
            total += 1
    print(f"texts equal in bfloat16, tiny random models: {equal} of {total}")
    assert equal >= (1 - MOST_DIFFERENT) * total


@pytest.mark.parametrize("do_sample", [False, True])
def test_prompt_ids_may_stay_on_the_cpu(do_sample, on_device):
    model, options = on_device("llama"), {"max_new_tokens": 40, "do_sample": do_sample}
    torch.manual_seed(0)
    plain = model.generate(PROMPT, **options)
    torch.manual_seed(0)
    drafted = model.generate(PROMPT, candidate_generator=Prophet(plain.cpu(), 0.9), **options)
    assert drafted.device == plain.device
    assert torch.equal(drafted, plain)


@pytest.mark.skipif(not finds_gpus(), reason="needs faiss-gpu")
@pytest.mark.parametrize("metric", ["inner_product", "l2"])
def test_passages_are_found_on_the_gpu(metric):
    rng = np.random.default_rng(0)
    vectors, queries = rng.standard_normal((2, 4000, 64)).astype(np.float32)
    lengths = squared_lengths(vectors)
    on_gpu, on_cpu = (kind(vectors, lengths, metric) for kind in (FaissFlatIndex, FlatIndex))
    for one, other in zip(
        on_gpu.search(queries[:20], 8), on_cpu.search(queries[:20], 8), strict=True
    ):
        assert one.ids.tolist() == other.ids.tolist()


@pytest.mark.skipif(not finds_gpus(), reason="needs faiss-gpu")
def test_neighbours_are_found_on_the_gpu(tmp_path, byte_llama, tokenizer):
    store = KnnDatastore.build(["text"] * 999, tokenizer, byte_llama, tmp_path / "knn")
    assert isinstance(store._index, FaissFlatIndex)
    queries = np.random.default_rng(0).permutation(store.keys)[:8] + np.float32(0.01)
    on_cpu = FlatIndex(store.keys, squared_lengths(store.keys), "l2")
    for one, other in zip(store.search(list(queries), 64), on_cpu.search(queries, 64), strict=True):
        assert one.ids.tolist() == other.ids.tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("options", [STATIC, COMPILED], ids=["eager", "compiled"])
def test_reproducible_logits_are_equal_bit_by_bit(options, dtype, on_device):
    model = on_device("llama", getattr(torch, dtype))
    options = {**options, "verification": "reproducible", "max_new_tokens": 40}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    without = generate(model, **options)
    for drafter in drafters(without.sequences):
        drafted = generate(model, candidate_generator=drafter, **options)
        assert torch.equal(drafted.sequences, without.sequences)
        for one, other in zip(drafted.logits, without.logits, strict=True):
            assert torch.equal(one, other)
