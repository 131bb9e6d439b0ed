"""The text of plain `generate` in fewer forward passes, by the package `hf_refspec`.

This file is published unchanged, as `custom_generate/generate.py` of a Hub repository.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hf_refspec


def generate(
    model: Any,
    references: str | Sequence[str] | None = None,
    datastore: str | None = None,
    **kwargs: Any,
) -> Any:
    """Drafts from the prompt, the output and the model's own logits, and verifies the drafts.

    Args:
        model (`PreTrainedModel`): The target model, which transformers passes.
        references (`str` or list of `str`, *optional*): Further texts to draft from; they need
            `tokenizer=`.
        datastore (`str`, *optional*): A datastore to draft from, too: its Hub id, or a folder.
        **kwargs: As of `model.generate`.

    Returns:
        As of `model.generate(**kwargs)`.
    """
    if references is None and datastore is None:
        return model.generate(**kwargs, candidate_generator="auto")
    copies = hf_refspec.ReferenceCopy(references, tokenizer=kwargs.get("tokenizer"))
    drafter = copies | hf_refspec.TokenRecycling()
    if datastore is not None:
        drafter |= hf_refspec.Datastore.from_pretrained(datastore)
    return model.generate(**kwargs, candidate_generator=drafter)
