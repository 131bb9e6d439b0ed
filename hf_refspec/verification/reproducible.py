"""Chains in a static cache by passes of one width: the same bits with drafts and without.

In bfloat16 a pass over several tokens rounds otherwise than one over a single token, so that drafts
may change a near-tie. Not so if all passes have one shape and each token stands in the slot that it
keeps: rows of a matrix product of one shape do not depend on each other, entries that are masked
add exact zeros, and sums over the cache run in the order of its slots. What was drafted, and
whether anything was, then leaves no trace in ids, logits and scores.

Not every model is so: where tokens choose among experts, what others choose changes the shapes. A
probe of the model compares the bits, see `probe.py`.
"""

from __future__ import annotations

from .static import StaticVerifier

# A pass over so many tokens costs little more than one over a single token, on a GPU hardly
# anything; wider ones take longer drafts, and every pass without a draft costs as much.
WIDTH = 16


class ReproducibleVerifier(StaticVerifier):
    """Chains of any number of rows, and passes without a draft of the same shape."""

    name = "reproducible"
    takes_trees = False
    widths = (WIDTH,)
