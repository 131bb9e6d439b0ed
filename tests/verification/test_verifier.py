"""A verifier goes back and drops as its callers ask: later passes have plain logits."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_refspec as rs
from hf_refspec.drafting.tree import DraftTree
from hf_refspec.verification.passes import FixedTokens
from hf_refspec.verification.verifier import CHAIN, RECURRENT, TREE, Verifier
from tests.helpers.calls import PROMPT, Call, assert_lossless
from tests.helpers.drafters import Noise
from tests.helpers.passes import NO_DRAFT, prefilled

DRAFT = DraftTree.chain([3, 4, 5])
KINDS = {"llama": [TREE, CHAIN], "mistral": [TREE, CHAIN], "mamba2": [RECURRENT]}
CASES = [(model_type, kind) for model_type, kinds in KINDS.items() for kind in kinds]
each_case = pytest.mark.parametrize(
    ("model_type", "kind"), CASES, ids=lambda value: getattr(value, "name", value)
)


def text(*more: int) -> FixedTokens:
    return FixedTokens(torch.cat([PROMPT, torch.tensor([[1, 2, *more]])], dim=-1))


def begun(model, kind) -> Verifier:
    """Prompt and one token are cached, one is pending."""
    verifier = prefilled(model, kind, PROMPT)
    verifier.forward([FixedTokens(text().ids[:, :-1])], [NO_DRAFT])
    verifier.keep([[]])
    return verifier


def assert_goes_on(verifier: Verifier, row: FixedTokens) -> None:
    """Its next pass has the logits of one pass over the whole text."""
    result = verifier.forward([row], [NO_DRAFT])
    expected = verifier.model(row.ids, use_cache=False).logits[0, -1]
    torch.testing.assert_close(result.logits[result.roots[0]], expected, atol=1e-4, rtol=1e-4)


@each_case
@torch.no_grad()
def test_going_back_from_a_pass_that_was_not_kept_forgets_it(models_by_type, model_type, kind):
    verifier = begun(models_by_type(model_type), kind)
    cached = verifier.cached
    go_back = verifier.mark()
    verifier.forward([text()], [DRAFT])
    go_back()
    verifier.keep([[0]])  # of no pass
    assert verifier.cached == cached
    assert_goes_on(verifier, text(7))


@each_case
@torch.no_grad()
def test_a_row_without_a_path_keeps_nothing_of_a_pass(models_by_type, model_type, kind):
    verifier = begun(models_by_type(model_type), kind)
    cached = verifier.cached
    for draft in (DRAFT,) if kind is RECURRENT else (DRAFT, NO_DRAFT):
        verifier.forward([text()], [draft])
        verifier.keep([None])
        assert verifier.cached == cached
    assert_goes_on(verifier, text(7))


# --- prompts that several rows have


@pytest.mark.parametrize("step", [1, 2])
def test_rows_of_one_prompt_with_positions_of_their_own_have_each_their_text(llama, step):
    ids = torch.arange(5, 25)[None].repeat(2, 1)
    positions = torch.stack([torch.arange(20), step * torch.arange(20) + 7])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}
    assert_lossless(llama, Noise(), inputs)


@pytest.mark.parametrize(("pads", "prompts"), [(False, 2), (True, 3)])
def test_a_prompt_that_several_rows_have_is_run_once(llama, pads, prompts):
    """Rows of one prompt that are padded differently have two, for their positions differ."""
    call = Call(llama, rows=4)
    ids = call.inputs["input_ids"][[0, 1, 0, 0, 1]]
    mask = torch.ones_like(ids)
    mask[3, 0] = 1 - pads
    inputs = {"input_ids": ids, "attention_mask": mask}
    widths = []
    embeddings = call.model.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape))
    try:
        # It learns from prompts.
        assert_lossless(call.model, rs.TokenRecycling(), inputs, verification="tree")
    finally:
        hook.remove()
    assert (prompts, ids.shape[1]) in widths


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.bool])
def test_prompts_with_a_mask_of_any_type_are_told_apart_by_their_ids(dtype):
    """Their ids differ by less than a short type can show; one prompt is padded."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2100, num_attention_heads=2, **sizes)).eval()
    ids = torch.arange(2040, 2060)[None].repeat(3, 1)
    ids[1, -1] = 2058
    mask = torch.ones_like(ids)
    mask[2, :4] = 0
    assert_lossless(model, Noise(), {"input_ids": ids, "attention_mask": mask.to(dtype)})
