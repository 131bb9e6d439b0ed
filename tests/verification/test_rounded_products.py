"""Models whose quantised products are rounded to few bits: what is drafted with them, and what is
still refused."""

import pytest
import torch
from torch.nn.functional import linear

import hf_refspec as rs
from hf_refspec.verification.entries import InPlaceEntries
from hf_refspec.verification.probe import ProbedCall, probe
from hf_refspec.verification.verifier import CHAIN, TREE
from tests.helpers.architectures import small
from tests.helpers.calls import GREEDY, PROMPT, Call, prepared, verified_as
from tests.helpers.own_forward import ignore_mask, move_nothing, own_forward

# Of a trained model's size in depth, so that rounding shows as it does there.
DEEP = {"num_hidden_layers": 8, "hidden_size": 64, "initializer_range": 0.05}


class RoundedLinear(torch.nn.Linear):
    """A stand-in for a library's layer: integers for weights, and products of `bits` bits, which
    its kernels round otherwise for each number of tokens."""

    def __init__(self, layer, bits):
        super().__init__(1, 1, bias=False)
        self.bits = bits
        weight = layer.weight.detach()
        self.scale = weight.abs().amax(dim=1, keepdim=True) / 127
        numbers = (weight / self.scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(numbers, requires_grad=False)

    def forward(self, x):
        exponent = x.abs().clamp(min=1e-30).log2().floor()
        step = torch.exp2(exponent - self.bits) * (1 + 1 / x.shape[-2])
        return linear((x / step).round() * step, self.weight * self.scale)


def quantised(model=None, bits=8):
    model = small("llama", **DEEP) if model is None else model
    for name, module in [*model.named_modules()]:
        if type(module) is torch.nn.Linear and not name.endswith("lm_head"):
            model.set_submodule(name, RoundedLinear(module, bits))
    model.hf_quantizer = "as transformers sets it"
    return model


@torch.no_grad()
def found(model, kind=TREE):
    _, kwargs = prepared(model, PROMPT, max_new_tokens=3)
    return probe(ProbedCall(kind, model, 1, kwargs))


def test_a_model_that_rounds_its_products_is_drafted_and_says_so_once(caplog):
    model = quantised()
    assert found(model).rounds_products and found(model, CHAIN).exact
    assert verified_as(model) == "tree"
    assert caplog.text.count("the precision of bfloat16") == 1
    drafter = rs.ReferenceCopy()
    model.generate(PROMPT, candidate_generator=drafter, max_draft_tokens=8, **GREEDY)
    assert drafter.stats.verification == "tree" and drafter.stats.drafted > 0


def rounded_layers(model):
    return [module for module in model.modules() if type(module) is RoundedLinear]


def test_rounding_that_no_integers_explain_is_refused():
    """A float32 model whose weights are float32 promises equal ids, whatever it does."""
    model = quantised()
    for layer in rounded_layers(model):
        layer.weight = torch.nn.Parameter(layer.weight.float(), requires_grad=False)
    assert not found(model).rounds_products
    assert verified_as(model) == "none"
    model = quantised()
    model.hf_quantizer = None
    assert not found(model).rounds_products


def test_exact_products_of_integers_keep_the_tolerance_of_float32():
    finding = found(quantised(bits=60))
    assert finding.exact and not finding.rounds_products and finding.error < 1e-5


@pytest.mark.parametrize("fault", ["mask", "keep"])
def test_a_mask_that_is_ignored_and_entries_moved_wrongly_are_no_rounding(fault, monkeypatch):
    model = quantised()
    if fault == "mask":
        own_forward(model, ignore_mask)
    else:
        model.set_attn_implementation("eager")
        monkeypatch.setattr(InPlaceEntries, "keep", move_nothing)
    assert not found(model).exact
    assert verified_as(model) == "chain"


def test_a_state_that_is_forgotten_is_not_taken_for_rounding():
    assert verified_as(quantised(small("mamba"))) == "none"


def test_a_leak_between_branches_is_not_taken_for_rounding():
    """Activations that are rounded together, as by bitsandbytes in 8 bits."""
    model = quantised()

    class Mixed(RoundedLinear):
        def forward(self, x):
            return super().forward(x + 0.01 * x.mean(dim=-2, keepdim=True))

    for layer in rounded_layers(model):
        layer.__class__ = Mixed
    assert found(model).rounds_products
    assert verified_as(model) == "none"


def test_rounding_beyond_near_ties_is_refused_by_three_passes_and_never_again():
    model = quantised(bits=1)
    assert found(model).passes == 3
    for kind in (TREE, CHAIN):
        finding = found(model, kind)
        assert not finding.exact and finding.passes == 0
        assert "more than near-ties" in str(finding)
    assert verified_as(model) == "none"


# --- weights that torchao quantises


def by_torchao(model, config: str):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    quantization.quantize_(model, getattr(quantization, config)())
    assert "torchao" in type(model.model.layers[0].mlp.up_proj.weight).__module__
    return Call(model, inputs={"input_ids": torch.tensor([[5, 6, 7, 8] * 6])}, max_new_tokens=60)


def test_ids_of_int8_weights_are_those_of_the_quantised_model_alone(fresh_llama):
    call = by_torchao(fresh_llama, "Int8WeightOnlyConfig")
    for sampling in ({}, {"do_sample": True}):
        drafter = rs.ReferenceCopy() | rs.TokenRecycling()
        assert call.assert_lossless(drafter, **sampling).accepted > 0 or sampling


def test_int8_activations_are_decoded_plainly(fresh_llama):
    call = by_torchao(fresh_llama, "Int8DynamicActivationInt8WeightConfig")
    for sampling in ({}, {}, {"do_sample": True}):  # no later call tries another verifier
        stats = call.assert_lossless(rs.ReferenceCopy(), **sampling)
        assert stats.drafted == 0
        assert stats.reason.startswith("its quantised products")
