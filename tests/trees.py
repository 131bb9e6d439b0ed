"""Draft trees by the paths to their nodes."""

from __future__ import annotations


def paths(tokens, parents, *_) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), int(token)))
    return found


def nodes_of(tree) -> dict[tuple[int, ...], float]:
    """The probability of each path of a `DraftTree`."""
    return dict(zip(paths(tree.tokens, tree.parents), tree.probs.tolist(), strict=True))
