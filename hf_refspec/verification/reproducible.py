"""Passes of one width over a static cache: the same bits with drafts and without.

In bfloat16 a pass over several tokens rounds otherwise than one over a single token, so that drafts
may change a near-tie. Not so if all passes have one shape, and attention sums in one order: rows of
a matrix product of one shape do not depend on each other, and entries that are masked add exact
zeros. Ids, logits and scores are then the same whether anything was drafted, and whatever it was.

Attention sums over slots, so that drafts are chains: in a chain each token stands in the slot that
it keeps, in a tree it may not.

Not every model is so: where tokens choose among experts, what others choose changes the shapes,
except with transformers' `experts_implementation="batched_mm"`. A probe of the model compares the
bits, see `probe.py`.
"""

from __future__ import annotations

from .static import StaticVerifier

# A pass of this width costs little more than one over a single token, on a GPU hardly anything;
# wider ones take longer drafts, and every pass without a draft costs as much.
WIDTH = 16


class ReproducibleVerifier(StaticVerifier):
    """Chains of any number of rows, and passes without a draft of the same shape."""

    name = "reproducible"
    takes_trees = False
    same_bits = True
    widths = (WIDTH,)
