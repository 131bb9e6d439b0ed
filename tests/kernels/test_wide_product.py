"""Products of many tokens by oneDNN: where they go there, and what they give."""

import pytest
import torch
from torch.nn.functional import linear
from transformers import MistralConfig, MistralForCausalLM

from hf_refspec import ReferenceCopy
from hf_refspec.kernels import pass_kernels
from tests.helpers.calls import Call
from tests.helpers.products import exact, in_a_pass, operands

SIZES = {"inner": 512, "outer": 512}

pytestmark = [
    pytest.mark.usefixtures("compiled"),
    pytest.mark.skipif(pass_kernels._onednn is None, reason="torch was built without oneDNN"),
]


@pytest.fixture(params=[True, False], ids=["faster", "slower"])
def faster(request, monkeypatch):
    monkeypatch.setattr(pass_kernels, "onednn_is_faster", lambda: request.param)
    return request.param


@pytest.mark.parametrize("tokens", [33, 64, 301])
@pytest.mark.parametrize("with_bias", [False, True])
def test_many_tokens_are_sent_if_that_is_faster_and_differ_by_rounding_alone(
    faster, tokens, with_bias
):
    numbers = operands(tokens=tokens, **SIZES)[: 2 + with_bias]
    y, sent = in_a_pass(linear, *numbers)
    assert sent == faster
    torch.testing.assert_close(y, exact(*numbers).float(), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("name", ["bfloat16", "a small weight", "a view of tokens", "switched off"])
def test_other_products_are_left_to_torch(monkeypatch, name):
    monkeypatch.setattr(pass_kernels, "onednn_is_faster", lambda: True)
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    x, weight, bias = operands(dtype, pass_kernels.MAX_TOKENS + 1, **SIZES)
    if name == "a small weight":
        weight, bias = weight[:64], bias[:64]
    elif name == "a view of tokens":
        x = torch.cat([x, x], dim=-1)[..., : weight.shape[1]]
    wanted = linear(x, weight, bias)
    with torch.backends.mkldnn.flags(enabled=name != "switched off"):
        y, sent = in_a_pass(linear, x, weight, bias)
    assert sent == 0 and (name == "switched off" or torch.equal(y, wanted))


@pytest.mark.parametrize(("of_onednn", "faster"), [(1.0, True), (1.9, False), (3.0, False)])
def test_it_must_be_clearly_faster(monkeypatch, of_onednn, faster):
    """By a clock on which torch takes two seconds for each product."""
    clock = [0.0]

    def taking(seconds):
        def product(*_):
            clock[0] += seconds

        return product

    monkeypatch.setattr(pass_kernels, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(pass_kernels, "by_torch", taking(2.0))
    monkeypatch.setattr(pass_kernels, "by_onednn", taking(of_onednn))
    assert pass_kernels.onednn_is_faster.__wrapped__() == faster


def test_the_first_product_of_a_process_tries_both_within_a_pass():
    pass_kernels.onednn_is_faster.cache_clear()
    numbers = operands(tokens=pass_kernels.MAX_TOKENS + 1, **SIZES)
    y, sent = in_a_pass(linear, *numbers)
    assert sent == 8 + pass_kernels.onednn_is_faster()
    torch.testing.assert_close(y, exact(*numbers).float(), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 64])
def test_prompts_in_float32_take_it_once_nothing_can_refuse_their_drafts(
    monkeypatch, dtype, window
):
    """All others keep plain decoding's bits."""
    monkeypatch.setattr(pass_kernels, "onednn_is_faster", lambda: True)
    sent, real = [], pass_kernels.by_onednn
    monkeypatch.setattr(
        pass_kernels, "by_onednn", lambda *numbers: sent.append(1) or real(*numbers)
    )
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(vocab_size=99, sliding_window=window, **sizes))
    model = model.to(dtype).eval()
    options = {"max_new_tokens": 9, "output_logits": True, "return_dict_in_generate": True}
    call = Call(model, inputs={"input_ids": torch.randint(1, 99, (1, 80))}, **options)
    for number in (1, 2):  # the first finds out that drafts are exact after its prompt
        drafter = ReferenceCopy(references=[call.plain_ids[0].tolist()])
        drafted = call.generate(candidate_generator=drafter, max_draft_tokens=8)
        takes_it = dtype == torch.float32 and window is None and number == 2
        assert bool(sent) == takes_it
        assert torch.equal(drafted.sequences, call.plain_ids)
        own, plain = drafted.logits[0], call.plain.logits[0]
        torch.testing.assert_close(own, plain, rtol=1e-5, atol=1e-5)
        assert takes_it or torch.equal(own, plain)
