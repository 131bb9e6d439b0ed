"""Texts that users give, as strings or as ids in any form, as arrays of ids."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..index.token_buffer import LARGEST_ID

logger = logging.getLogger("hf_refspec")

_FILE_NAME = re.compile(r"\S+\.[A-Za-z]\w{0,4}")  # also of one that does not exist

Reference: TypeAlias = str | Sequence[int] | np.ndarray | torch.Tensor


def references_to_ids(
    references: Reference | Sequence[Reference], tokenizer: PreTrainedTokenizerBase | None
) -> list[np.ndarray]:
    """The ids of one text, or of each in a list, see [`ReferenceCopy`]. Raises as [`to_ids`] does,
    and warns of a string that is the name of a file, or looks like one."""
    if isinstance(references, (str, np.ndarray, torch.Tensor)) or _is_ids(references):
        texts: dict[str, Any] = {"references": references}
    else:
        texts = {f"references[{i}]": text for i, text in enumerate(references)}
    for name, text in texts.items():
        if isinstance(text, str) and (os.path.isfile(text) or _FILE_NAME.fullmatch(text)):
            logger.warning(
                f"{name} {'is' if os.path.isfile(text) else 'looks like'} the name of a file, and "
                "drafts are copied from the name itself; pass the text: "
                f"Path({text!r}).read_text()"
            )
    return [to_ids(name, text, tokenizer) for name, text in texts.items()]


def to_ids(name: str, reference: Any, tokenizer: PreTrainedTokenizerBase | None) -> np.ndarray:
    """The ids of one text, an integer array of shape `(n,)` with n > 0."""
    if isinstance(reference, str):
        if tokenizer is None:
            raise ValueError(f"{name} is a string: give the target model's tokenizer= as well")
        reference = tokenizer(reference, add_special_tokens=False, verbose=False)["input_ids"]
    elif isinstance(reference, torch.Tensor):
        reference = reference.numpy(force=True)
    ids = np.asarray(reference)
    if ids.ndim != 1:
        raise ValueError(f"{name} must have one dimension, but has the shape {ids.shape}")
    if len(ids) == 0:
        raise ValueError(f"{name} is empty; leave it out")
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"{name} must hold integers, but holds {ids.dtype}")
    if ids.min() < 0 or ids.max() > LARGEST_ID:
        bad = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"{name} has the id {bad}; ids are from 0 to the vocabulary size - 1")
    return ids


def _is_ids(reference: Any) -> bool:
    """True of a list (or other sequence) of ids, by its first item, and of an empty one."""
    is_sequence = isinstance(reference, Sequence) and not isinstance(reference, bytes)
    return is_sequence and (len(reference) == 0 or isinstance(reference[0], (int, np.integer)))


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """The number of tokens with which both texts begin."""
    count = min(len(one), len(other))
    differ = one[:count] != other[:count]
    return int(differ.argmax()) if differ.any() else count
