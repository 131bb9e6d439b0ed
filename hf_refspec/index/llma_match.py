"""LLMA's match: the longest suffix of the output that stands in a reference, and the copied span.

"Inference with Reference: Lossless Acceleration of Large Language Models" (arXiv 2304.04487,
section 2.2).
"""

# mypy: disallow-untyped-defs=False
# The types of a kernel's arguments are those of its numba signature.

from __future__ import annotations

import numpy as np

from .kernels import kernel
from .token_buffer import LinkedText, TokenBuffer, common_suffix, latest_of

LONGEST_MATCH = 5  # from so many tokens down to n, as published


def llma_span(
    text: TokenBuffer | LinkedText, context: np.ndarray, match_length: int, copy_length: int
) -> np.ndarray:
    """Copies what follows the first place of the longest suffix of a context in a text.

    Args:
        text ([`TokenBuffer`] or [`LinkedText`]): The references, a negative token behind each.
        context (`np.ndarray`, int32 of shape `(m,)`): The last tokens, as many as may match.
        match_length (`int`): n, the shortest match.
        copy_length (`int`): k, the most tokens that are copied.

    Returns:
        `np.ndarray`: int32 of shape `(length,)` with length <= k: the span ends with its reference.
    """
    tokens = text.tokens
    start = llma_match(tokens, text.previous, text.latest, context, match_length)
    span = tokens[start : start + copy_length] if start >= 0 else tokens[:0]
    boundaries = np.flatnonzero(span < 0)
    return span[: boundaries[0]] if len(boundaries) else span


@kernel("int64(int32[::1], int32[::1], int32[::1], int32[::1], int64)")
def llma_match(text, previous, latest, context, match_length):
    """Finds the position after the match, which must have a token; -1 if there is no match.

    Arguments as of `llma_span`, `text`, `previous` and `latest` for its text.
    """
    best = -1
    best_length = match_length
    position = latest_of(latest, context[-1]) if len(context) else -1
    while position >= 0:
        followed = position + 1 < len(text) and text[position + 1] >= 0
        length = common_suffix(text, position, context, 0) if followed else 0
        if length >= best_length:
            best, best_length = position + 1, length
        position = previous[position]
    return best
