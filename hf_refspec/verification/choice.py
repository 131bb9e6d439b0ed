"""Which verifier a call gets."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from .chain import ChainVerifier, RecurrentVerifier
from .probe import Finding, drops_cache, is_padded, probe
from .reproducible import ReproducibleTreeVerifier, ReproducibleVerifier
from .static import StaticVerifier
from .tree import TreeVerifier
from .verifier import Verifier

VERIFIERS: tuple[type[Verifier], ...] = (
    StaticVerifier,
    TreeVerifier,
    ChainVerifier,
    RecurrentVerifier,
)


class RefusedCallError(ValueError):
    """A call that cannot be lossless with drafts; nothing has been done yet."""


def select_verifier(
    model: PreTrainedModel,
    requested: str,
    rows: int,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    drafts: bool = True,
) -> tuple[Verifier | None, str]:
    """The first verifier that suits this call's rows and cache and that the probe finds exact.

    Args:
        model (`PreTrainedModel`): The target model.
        requested (`str`): `"auto"`, or `"tree"`, `"chain"` or `"reproducible"` to allow only that.
        rows (`int`): How many.
        generation_config (`GenerationConfig`): The call's own.
        model_kwargs (`dict`): Keyword arguments of the forward pass.
        drafts (`bool`, *optional*, defaults to `True`): Whether anything will be drafted. If not,
            a single row without padding takes the steps of plain decoding, and is not probed.

    Returns:
        [`Verifier`], or `None` where drafts cannot be verified exactly: the caller should then
        decode plainly. And what the probes have found.

    Raises:
        RefusedCallError: If the verifier that was asked for is not exact on this model.
    """
    findings = []
    reproducible = requested == ReproducibleVerifier.name
    kinds = (ReproducibleTreeVerifier, ReproducibleVerifier) if reproducible else VERIFIERS
    for kind in kinds:
        # In a static cache, and with several rows, a chain is verified as a tree.
        as_tree = kind is StaticVerifier or (rows > 1 and requested == "chain")
        allowed = requested in ("auto", kind.name) or as_tree
        if not allowed or rows > kind.most_rows or not kind.supports(model, model_kwargs):
            continue
        plain = not drafts and rows == 1 and kind.widths is None and not is_padded(model_kwargs)
        untried = plain and not drops_cache(model)
        # Compiled passes may round to other bits, so that the call's own are compared.
        config = generation_config if reproducible else None
        probed = (kind, model, rows, model_kwargs)
        finding = Finding(True) if untried else probe(*probed, config=config)
        if finding.exact:
            return kind(model, generation_config, model_kwargs), ""
        findings.append(f"{kind.name}: {finding}")
    found = "; ".join(findings) or "no verifier supports its cache"
    if requested != "auto":
        several = f" with {rows} rows" if rows > 1 else ""
        raise RefusedCallError(
            f"`verification={requested!r}` is not exact on {type(model).__name__}{several} with "
            f"this cache and attention implementation ({found}). Pass `verification='auto'` to let "
            "the model decide."
        )
    return None, found
