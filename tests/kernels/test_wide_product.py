"""Products of many tokens by oneDNN: where they go there, and what they give."""

import pytest
import torch
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from hf_refspec import ReferenceCopy
from hf_refspec.kernels import wide_product as wide
from hf_refspec.kernels.pass_kernels import MAX_TOKENS, pass_kernels

CONFIG = LlamaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
HERE = LlamaForCausalLM(CONFIG)

pytestmark = [
    pytest.mark.usefixtures("compiled"),
    pytest.mark.skipif(wide._onednn is None, reason="torch was built without oneDNN"),
]


@pytest.fixture(params=[True, False], ids=["faster", "slower"])
def faster(request, monkeypatch):
    monkeypatch.setattr(wide, "is_faster", lambda: request.param)
    return request.param


def operands(tokens=MAX_TOKENS + 1, inner=512, outer=512, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(1, tokens, inner, generator=generator).to(dtype)
    weight = torch.randn(outer, inner, generator=generator).to(dtype)
    return x, weight, torch.randn(outer, generator=generator).to(dtype)


@pytest.mark.parametrize("tokens", [33, 64, 301])
@pytest.mark.parametrize("with_bias", [False, True])
def test_many_tokens_are_sent_if_that_is_faster_and_differ_by_rounding_alone(
    faster, tokens, with_bias
):
    x, weight, bias = operands(tokens)
    bias = bias if with_bias else None
    with pass_kernels(HERE) as sent:
        y = linear(x, weight, bias)
    assert sent.count == faster
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(y, exact.float(), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("name", ["bfloat16", "a small weight", "a view of tokens", "switched off"])
def test_other_products_are_left_to_torch(monkeypatch, name):
    monkeypatch.setattr(wide, "is_faster", lambda: True)
    x, weight, bias = operands(dtype=torch.bfloat16 if name == "bfloat16" else torch.float32)
    if name == "a small weight":
        weight, bias = weight[:64], bias[:64]
    elif name == "a view of tokens":
        x = torch.cat([x, x], dim=-1)[..., : weight.shape[1]]
    wanted = linear(x, weight, bias)
    off = torch.backends.mkldnn.flags(enabled=name != "switched off")
    with off, pass_kernels(HERE) as sent:
        y = linear(x, weight, bias)
    assert sent.count == 0 and (name == "switched off" or torch.equal(y, wanted))


@pytest.mark.parametrize(("of_onednn", "faster"), [(1.0, True), (1.9, False), (3.0, False)])
def test_it_must_be_clearly_faster(monkeypatch, of_onednn, faster):
    """By a clock on which torch takes two seconds for each product."""
    clock = [0.0]

    def taking(seconds):
        def product(*_):
            clock[0] += seconds

        return product

    monkeypatch.setattr(wide, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(wide, "linear", taking(2.0))
    monkeypatch.setattr(wide, "by_onednn", taking(of_onednn))
    assert wide.is_faster.__wrapped__() == faster


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 64])
def test_prompts_in_float32_take_it_once_nothing_can_refuse_their_drafts(
    monkeypatch, dtype, window
):
    """All others keep plain decoding's bits."""
    monkeypatch.setattr(wide, "is_faster", lambda: True)
    sent, real = [], wide.by_onednn
    monkeypatch.setattr(wide, "by_onednn", lambda *numbers: sent.append(1) or real(*numbers))
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(vocab_size=99, sliding_window=window, **sizes))
    model = model.to(dtype).eval()
    prompt = torch.randint(1, 99, (1, 80))
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    plain = model.generate(prompt, **options)
    for call in (1, 2):  # the first finds out that drafts are exact after its prompt
        drafter = ReferenceCopy(references=[plain.sequences[0].tolist()])
        drafted = model.generate(prompt, candidate_generator=drafter, **options)
        takes_it = dtype == torch.float32 and window is None and call == 2
        assert bool(sent) == takes_it
        assert torch.equal(drafted.sequences, plain.sequences)
        torch.testing.assert_close(drafted.logits[0], plain.logits[0], rtol=1e-5, atol=1e-5)
        assert takes_it or torch.equal(drafted.logits[0], plain.logits[0])
