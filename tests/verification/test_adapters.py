"""Models of PEFT: which are drafted, and why the others are not."""

import copy

import peft
import pytest
import torch

from hf_refspec.transformers_names import CACHE_NAME
from tests.helpers.calls import RANDOM_PROMPT, Call, assert_lossless

KEYS = {"target_modules": ["q_proj", "v_proj"]}
LORA = {"init_lora_weights": False, **KEYS}
RANDOM = {"init_weights": False, **KEYS}
CHANGE_WEIGHTS = {
    "adalora": (peft.AdaLoraConfig, {"total_step": 9, **LORA}),
    "adaption prompt": (peft.AdaptionPromptConfig, {"adapter_len": 4, "adapter_layers": 1}),
    "dora": (peft.LoraConfig, {"use_dora": True, **LORA}),
    "fourierft": (peft.FourierFTConfig, {"n_frequency": 9, **RANDOM}),
    "hra": (peft.HRAConfig, RANDOM),
    "ia3": (peft.IA3Config, {"init_ia3_weights": False, "feedforward_modules": [], **KEYS}),
    "ln tuning": (peft.LNTuningConfig, {"target_modules": ["input_layernorm"]}),
    "loha": (peft.LoHaConfig, RANDOM),
    "lokr": (peft.LoKrConfig, RANDOM),
    "lora": (peft.LoraConfig, LORA),
    "miss": (peft.MissConfig, {"r": 4, **RANDOM}),
    "oft": (peft.OFTConfig, {"oft_block_size": 4, **RANDOM}),
    "trainable tokens": (peft.TrainableTokensConfig, {"token_indices": [11, 12]}),
    "vera": (peft.VeraConfig, {"init_weights": False, "target_modules": ["q_proj"]}),
}
FOUR = {"num_virtual_tokens": 4}
CPT = {"cpt_token_ids": [3, 4], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]}
ADD_TOKENS = {
    "cartridge": (peft.CartridgeConfig, FOUR),
    "cpt": (peft.CPTConfig, CPT),
    "p-tuning": (peft.PromptEncoderConfig, {"encoder_hidden_size": 16, **FOUR}),
    "prefix tuning": (peft.PrefixTuningConfig, FOUR),
    "prompt tuning": (peft.PromptTuningConfig, FOUR),
}
POLY = {"r": 4, "n_tasks": 2, "n_skills": 2, **RANDOM}
BY_ROW = {
    "adapter_names": (["default", "__base__", "default"], *CHANGE_WEIGHTS["lora"]),
    "task_ids": (torch.tensor([0, 1, 0]), peft.PolyConfig, POLY),
}
# In 5.24 PEFT does not find the cache, which has a new name: these leave its passes as they are.
DRAFTED = {"cartridge", "prefix tuning"} if CACHE_NAME == "cache" else set()
INVOCATION = [90, 91]


def adapted(model, kind, values) -> peft.PeftModel:
    """A model with random weights in its adapter."""
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, kind(task_type="CAUSAL_LM", **values)).eval()
    for name, weights in adapted.named_parameters():
        if "prompt" in name:
            torch.nn.init.normal_(weights)
    return adapted


@pytest.mark.parametrize("method", CHANGE_WEIGHTS)
def test_methods_that_change_weights_are_drafted_by_trees(fresh_llama, method):
    stats = assert_lossless(adapted(fresh_llama, *CHANGE_WEIGHTS[method]), 1.0)
    assert (stats.verification, stats.mat > 3) == ("tree", True)


@pytest.mark.parametrize("method", ADD_TOKENS)
def test_virtual_tokens_are_drafted_by_chains_or_not_with_the_reason(fresh_llama, method):
    model = adapted(fresh_llama, *ADD_TOKENS[method])
    for _ in range(2):
        stats = assert_lossless(model, 1.0)
        if method in DRAFTED:
            assert (stats.verification, stats.mat > 3) == ("chain", True)
        else:
            assert stats.reason.startswith("`PeftModelForCausalLM.prepare_inputs_for_generation`")


@pytest.mark.parametrize("method", ["prefix tuning", "prompt tuning"])
def test_virtual_tokens_before_a_trained_models_text(loaded, method):
    model = adapted(copy.deepcopy(loaded[0]), *ADD_TOKENS[method])
    stats = assert_lossless(model, 1.0, max_new_tokens=12)
    assert (stats.drafted > 0) == (method in DRAFTED)


def activated(model) -> peft.PeftModel:
    return adapted(model, peft.LoraConfig, {"alora_invocation_tokens": INVOCATION, **LORA})


@pytest.mark.parametrize("tokens_after", [1, 24])
def test_activated_lora_has_the_ids_of_plain_decoding_with_long_drafts(fresh_llama, tokens_after):
    """The probe's passes are shorter than what follows the invocation, those of the call longer."""
    middle = torch.tensor([INVOCATION])
    prompt = torch.cat([RANDOM_PROMPT, middle, middle[:, :1].expand(1, tokens_after)], dim=1)
    options = {"inputs": prompt, "max_draft_tokens": 60, "max_new_tokens": 80}
    stats = assert_lossless(activated(fresh_llama), 1.0, **options)
    assert (stats.drafted, stats.reason[:14]) == (0, "activated LoRA")


def test_activated_lora_that_no_token_invokes_is_drafted(fresh_llama):
    assert assert_lossless(activated(fresh_llama), 1.0).mat > 3


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("argument", BY_ROW)
def test_rows_with_adapters_of_their_own_are_drafted_alone(fresh_llama, argument, attention, rows):
    fresh_llama.set_attn_implementation(attention)
    values, *config = BY_ROW[argument]
    call = Call(adapted(fresh_llama, *config), rows, **{argument: values[:rows]})
    stats = call.assert_lossless(1.0)
    assert (stats.drafted > 0) == (rows == 1)
    assert rows == 1 or argument in stats.reason
