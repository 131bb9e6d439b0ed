"""What PEFT does to forward passes over several tokens or rows, beside changing weights."""

from __future__ import annotations

from functools import partial

from transformers import PreTrainedModel

_BY_ROW = (
    "PEFT's hooks (`adapter_names`, `task_ids`, activated LoRA) know rows by their number, which "
    "differs in passes over drafts: pass one prompt at a time"
)
_ACTIVATED = (
    "activated LoRA is applied to as many of the last tokens of each pass as follow its invocation "
    "in the prompt, and a draft may have more"
)


def adds_tokens(model: PreTrainedModel) -> bool:
    """Whether PEFT puts virtual tokens before the text (prompt, prefix and P-tuning, CPT): it then
    prepares the arguments of a pass itself, and takes masks `(R, length)` alone."""
    owner = getattr(model.prepare_inputs_for_generation, "__self__", None)
    config = getattr(owner, "active_peft_config", None)
    return bool(getattr(config, "is_prompt_learning", False))


def why_adapters_forbid_drafts(model: PreTrainedModel, rows: int) -> str | None:
    """Why PEFT's hooks of this call do not let drafts be verified, if so."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            function = hook.func if isinstance(hook, partial) else hook
            if not (getattr(function, "__module__", None) or "").startswith("peft."):
                continue
            if rows > 1:
                return _BY_ROW
            # No offset: the tokens that invoke it are not in the prompt.
            if any(getattr(hook, "keywords", {}).get("alora_offsets") or ()):
                return _ACTIVATED
    return None
