"""Passes of one width over a static cache: the same bits with drafts and without.

In bfloat16 a pass over several tokens rounds otherwise than one over a single token, so that drafts
may change a near-tie. Not so if all passes have one shape, and attention sums in one order: rows of
a matrix product of one shape do not depend on each other, and entries that are masked add exact
zeros. What was drafted, and whether anything was, then leaves no trace in ids, logits and scores.

In a chain each token stands in the slot that it keeps, so that sums over slots have the order of
positions. In a tree they do not: there attention gathers each token's path, see
`path_attention.py`. It costs more than torch's own, and a tree is worth more than a chain.

Not every model is so: where tokens choose among experts, what others choose changes the shapes,
except with transformers' `experts_implementation="batched_mm"`. A probe of the model compares the
bits, see `probe.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .path_attention import PathMask
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


class ReproducibleTreeVerifier(ReproducibleVerifier):
    """The same for trees, where the model attends by torch's `scaled_dot_product_attention`."""

    takes_trees = True

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        attention = getattr(model.config, "_attn_implementation", None)
        return attention == "sdpa" and super().supports(model, model_kwargs)

    def _masks(self, places: torch.Tensor, visible: torch.Tensor) -> dict[str, torch.Tensor]:
        """Paths are so long as the pass is wide, so that all of its nodes stand on them."""
        n, device = self.widths[-1], places.device
        index = (
            torch.arange(self.entries.length, device=device) - self.entries.given
        )  # in their rows
        back = torch.arange(n - 1, -1, -1, device=device)  # from a token to those of its path
        seen = (index <= places[..., None] - n) & self._is_text[:, None]  # (R, S, length)
        paths = self._paths(places, visible, back)
        masks: dict[str, torch.Tensor] = {}
        for kind, window in self._windows.items():
            far, near = seen, paths
            if window is not None:
                far = far & (places[..., None] - index < window)
                near = near.masked_fill(back >= window, -1)
            masks[kind] = torch.cat([far, near], dim=-1)[:, None].as_subclass(PathMask)
        return masks

    def _paths(
        self, places: torch.Tensor, visible: torch.Tensor, back: torch.Tensor
    ) -> torch.Tensor:
        """The slots of the last tokens of each path `(R, S, n)`, -1 where there is none."""
        wanted = places[..., None] - back  # (R, S, n): indices in their rows
        targets, given = self.entries.slots.targets, self.entries.given
        # Of the tokens of the pass: those that a token sees, at most one for each index.
        in_pass = visible[:, :, None] & (places[:, None, None] == wanted[..., None])  # (R, S, n, S)
        found, node = in_pass.max(dim=-1)
        rows = torch.arange(len(places), device=places.device)[:, None, None]
        slots = (wanted + given).clamp(min=0, max=self.entries.length - 1)
        is_text = (wanted + given >= 0) & (slots < targets[:, :1, None])
        is_text = is_text & self._is_text[rows, slots]
        return torch.where(found, targets[rows, node], slots.masked_fill(~is_text, -1))
