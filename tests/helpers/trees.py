"""Draft trees by the paths to their nodes."""

from hypothesis import strategies as st

from hf_refspec.drafting.tree import DraftTree


def paths(tokens, parents, *_) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), int(token)))
    return found


def nodes_of(tree) -> dict[tuple[int, ...], float]:
    """The probability of each path of a `DraftTree`."""
    return dict(zip(paths(tree.tokens, tree.parents), tree.probs.tolist(), strict=True))


@st.composite
def draft_trees(draw, vocab_size: int, most: int, chances=None):
    """Valid trees of few different tokens, their nodes in any order that puts parents first."""
    chances = st.floats(0, 1) if chances is None else chances
    tokens, parents, probs = [], [], []
    for node in range(draw(st.integers(0, most))):
        parent, token = draw(st.integers(-1, node - 1)), draw(st.integers(0, vocab_size - 1))
        if (parent, token) in zip(parents, tokens, strict=True):
            break
        tokens.append(token)
        parents.append(parent)
        probs.append(draw(chances) * (probs[parent] if parent >= 0 else 1.0))
    return DraftTree(tokens, parents, probs).checked(vocab_size)
