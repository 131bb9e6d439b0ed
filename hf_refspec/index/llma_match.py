"""LLMA's match: the longest suffix of the output found in a reference, and the copied span.

"Inference with Reference: Lossless Acceleration of Large Language Models" (arXiv 2304.04487,
section 2.2).
"""

from __future__ import annotations

from ..kernels.kernel import kernel
from .token_buffer import common_suffix, latest_of


@kernel("Tuple((int64, int32[:]))(LinkedText, int32[::1], int64, int64)")
def llma_span(text, context, match_length, copy_length):
    """Copies tokens after the first place of the longest suffix of a context (n,) in references.

    The suffix has at least `match_length` tokens, the span (k,) at most `copy_length`, and it ends
    with its reference, which ends with a boundary. Returns where the span begins, and the span."""
    tokens = text.tokens
    start = len(tokens)
    longest = match_length
    position = latest_of(text, context[-1])
    while position >= 0:
        followed = position + 1 < len(tokens) and tokens[position + 1] >= 0
        length = common_suffix(tokens, position, context, 0) if followed else 0
        if length >= longest:
            start = position + 1
            longest = length
        position = text.previous[position]
    end = start
    while end < min(start + copy_length, len(tokens)) and tokens[end] >= 0:
        end += 1
    return start, tokens[start:end]
