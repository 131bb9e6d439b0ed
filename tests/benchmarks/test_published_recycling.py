"""Token Recycling as published."""

from hypothesis import given
from hypothesis import strategies as st
from published_recycling import CHILDREN, PublishedRecycling, static_tree


def test_the_static_tree_has_80_nodes_in_6_levels_as_published():
    assert [sum(level) for level in CHILDREN] == [8, 21, 25, 15, 8, 3, 0]
    assert [len(level) for level in CHILDREN] == [1, 8, 21, 25, 15, 8, 3]


@given(st.randoms(use_true_random=False), st.integers(1, 90), st.integers(0, 12))
def test_the_static_tree_is_filled_breadth_first_from_the_matrix(random, budget, known):
    matrix = {token: random.sample(range(12), 8) for token in range(known)}
    expected: list[tuple] = []
    level: list[tuple | None] = [()]
    for counts in CHILDREN:
        below: list[tuple | None] = []
        for path, count in zip(level, counts, strict=True):
            row = None if path is None else matrix.get(path[-1] if path else 0)
            below += [None if row is None else (*path, row[i]) for i in range(count)]
        expected += [path for path in below if path is not None]
        level = below
    tree = static_tree(matrix, 0, budget).checked(12)
    assert [tuple(tree.path(node)) for node in range(len(tree))] == expected[:budget]


def test_it_drafts_what_the_target_expected_after_its_tokens(llama):
    prompt = llama.dummy_inputs["input_ids"][:1] % llama.config.vocab_size
    drafter = PublishedRecycling()
    for _ in range(2):
        llama.generate(prompt, max_new_tokens=20, candidate_generator=drafter, max_draft_tokens=80)
    assert drafter.stats.accepted > 0 and len(drafter.matrix) > 1
