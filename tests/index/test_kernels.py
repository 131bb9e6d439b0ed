"""Each kernel against a twin in plain Python, and how kernels are compiled."""

import logging
import os
import shutil
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hf_refspec.index import kernels
from hf_refspec.index.token_buffer import TokenBuffer

kernels.warmup()  # here, where it is in no test's time

texts = st.lists(st.integers(-1, 4), max_size=40)
contexts = st.lists(st.integers(0, 4), min_size=1, max_size=16)


def buffer_of(tokens) -> TokenBuffer:
    buffer = TokenBuffer()
    buffer.extend(np.array(tokens, dtype=np.int64))
    return buffer


def common_suffix(a: list[int], b: list[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return length


# --- longest_match


@given(texts, contexts, st.integers(1, 3))
def test_longest_match_is_the_first_of_the_longest_suffixes(text, context, match_length):
    followed = [end for end in range(1, len(text)) if text[end] >= 0]
    lengths = {end: common_suffix(text[:end], context) for end in followed}
    longest = max(lengths.values(), default=0)
    expected = min((end for end in lengths if lengths[end] == longest), default=-1)
    buffer = buffer_of(text)
    found = kernels.longest_match(
        buffer.tokens, buffer.previous, buffer.latest, np.array(context, np.int32), match_length
    )
    assert found == (expected if longest >= match_length else -1)


# --- grow_tree


def grow(text, context, budget, match_length=1, copy_length=99, chain=False, anchor=-1):
    buffer = buffer_of(text)
    tokens = np.empty(budget, np.int64)
    parents = np.empty(budget, np.int32)
    probs = np.empty(budget, np.float32)
    size, anchor = kernels.grow_tree(
        buffer.tokens,
        buffer.previous,
        buffer.latest,
        np.array(context, np.int32),
        anchor,
        match_length,
        copy_length,
        chain,
        tokens,
        parents,
        probs,
    )
    return tokens[:size].tolist(), parents[:size].tolist(), probs[:size].tolist(), anchor


def child_probs(text, context, path, match_length, anchor):
    """The children that matches propose below `path`, token -> conditional probability."""
    context_and_path = context + path
    found = {}  # position -> weights' lengths, at most one exact and one skipping match each
    for position in range(1, len(text)):
        if text[position] < 0:
            continue
        exact = common_suffix(text[:position], context_and_path)
        joins = exact >= 1 and (match_length == 1 or exact - len(path) >= match_length)
        if joins:
            found.setdefault(position, []).append(min(exact, len(context) + len(path)))
        # A skipping match replaced the context's last token and agrees with all of the path.
        root = position - len(path)
        skips = (
            root >= 2
            and text[root:position] == path
            and text[root - 1] >= 0
            and text[root - 1] != context[-1]
            and common_suffix(text[: root - 1], context[:-1]) >= max(2, match_length)
        )
        if skips:
            found.setdefault(position, []).append(kernels.SKIP_LENGTH + len(path))
    weights: dict[int, float] = {}
    longest = 0.0
    for position, lengths in found.items():
        near = anchor >= 0 and 0 <= position - anchor < kernels.NEAR
        for length in lengths:
            longest = max(longest, length)
            weight = length**3 * (kernels.NEAR_FACTOR if near else 1)
            weights[text[position]] = weights.get(text[position], 0.0) + weight
    total = sum(weights.values())
    return {t: w / total * longest / (longest + 1) for t, w in weights.items()}


def twin_anchor(text, context, match_length, anchor):
    best = kernels.ANCHOR_LENGTH - 1
    for skipped in range(min(2, len(context))):
        known = context[: len(context) - skipped]
        for position in range(len(text) - 1, skipped, -1):
            replaced = text[position - 1] if skipped else None
            if text[position] < 0 or replaced in (-1, context[-1]):
                continue
            length = common_suffix(text[: position - skipped], known)
            if length > best and length >= match_length:
                best, anchor = length, position
    return anchor


def grow_slowly(text, context, budget, match_length=1, copy_length=99, chain=False, anchor=-1):
    """The twin of `grow_tree`: every match is searched for anew at every node."""
    anchor = twin_anchor(text, context, match_length, anchor)
    nodes, waiting, path, node, prob = [], {}, [], -1, 1.0
    while True:
        if len(path) < copy_length:
            for token, share in child_probs(text, context, path, match_length, anchor).items():
                waiting[node, token] = prob * share, [*path, token]
        if not waiting or len(nodes) == budget:
            return nodes, waiting, anchor
        (parent, token), (prob, path) = max(waiting.items(), key=lambda item: item[1][0])
        if chain:
            waiting.clear()
        else:
            del waiting[parent, token]
        node = len(nodes)
        nodes.append((tuple(path), prob))


def paths_of(tokens, parents):
    paths = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@settings(max_examples=150, deadline=None)
@given(
    texts,
    contexts,
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(-1, 30),
)
def test_grow_tree_takes_the_most_probable_nodes(
    text, context, budget, match_length, copy_length, anchor
):
    tokens, parents, probs, new_anchor = grow(
        text, context, budget, match_length, copy_length, anchor=anchor
    )
    nodes, waiting, twin_anchor = grow_slowly(
        text, context, budget, match_length, copy_length, anchor=anchor
    )
    assert new_anchor == twin_anchor
    assert probs == pytest.approx([prob for _, prob in nodes], rel=1e-5)
    # Nodes of equal probability may come in any order, and either may be the last that fits.
    expected = dict(nodes) | {tuple(path): prob for prob, path in waiting.values()}
    for path, prob in zip(paths_of(tokens, parents), probs, strict=True):
        if path in expected:
            assert prob == pytest.approx(expected[path], rel=1e-5)
    ties = len({round(prob, 6) for prob in expected.values()}) < len(expected)
    assert ties or set(paths_of(tokens, parents)) == {path for path, _ in nodes}


@settings(deadline=None)
@given(texts, contexts, st.integers(1, 30), st.booleans())
def test_grow_tree_grows_a_legal_tree_within_its_budget(text, context, budget, chain):
    tokens, parents, probs, _ = grow(text, context, budget, chain=chain)
    assert len(tokens) <= budget
    assert all(-1 <= parent < node for node, parent in enumerate(parents))
    assert len(set(zip(parents, tokens, strict=True))) == len(tokens)
    assert all(0 < p <= (probs[q] if q >= 0 else 1.0) for p, q in zip(probs, parents, strict=True))
    assert min(tokens, default=0) >= 0
    if chain:
        assert parents == list(range(-1, len(tokens) - 1))


@settings(deadline=None)
@given(texts, contexts, st.integers(1, 12))
def test_a_chain_goes_to_the_most_probable_child_each_time(text, context, budget):
    _, _, probs, _ = grow(text, context, budget, chain=True)
    nodes, _, _ = grow_slowly(text, context, budget, chain=True)
    assume(len(probs) == len(nodes))  # ties may lead to paths of unequal lengths
    assert probs[:1] == pytest.approx([prob for _, prob in nodes][:1], rel=1e-5)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), max_size=5), contexts)
def test_no_path_of_exact_matches_runs_across_a_boundary(documents, context):
    text = [token for document in documents for token in [*document, -1]]
    tokens, parents, _, _ = grow(text, context, 30)
    pairs = {pair for document in documents for pair in pairwise(document)}
    for token, parent in zip(tokens, parents, strict=True):
        if parent >= 0:
            assert (tokens[parent], token) in pairs


def test_one_token_over_and_over_is_drafted_to_the_full_budget():
    tokens, parents, _, _ = grow([3] * 5000, [3] * 16, budget=40)
    assert tokens == [3] * 40
    assert parents == list(range(-1, 39))


def test_a_long_match_is_found_behind_any_number_of_short_ones():
    context = list(range(10, 26))
    tokens, _, _, _ = grow([*context, 4, *[9, 25] * 3000], context, budget=1)
    assert tokens == [4]


def test_copying_goes_on_where_one_token_was_replaced():
    # "a b c d e f" was copied, but with x in the place of d.
    tokens, _, _, _ = grow([1, 2, 3, 4, 5, 6], [1, 2, 3, 9], budget=2)
    assert tokens == [5, 6]


def test_of_equal_matches_the_one_near_the_last_copied_place_wins():
    text = [1, 2, -1, *[0] * 50, 1, 3, -1]
    assert grow(text, [1], budget=1, anchor=0)[0] == [2]
    assert grow(text, [1], budget=1, anchor=50)[0] == [3]


# --- trees


@st.composite
def parents_lists(draw):
    return [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 12)))]


def path_to(parents, node):
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@given(parents_lists())
def test_tree_depths_counts_the_nodes_of_the_path(parents):
    depths = np.empty(len(parents), np.int32)
    kernels.tree_depths(np.array(parents, np.int32), depths)
    assert depths.tolist() == [len(path_to(parents, node)) for node in range(len(parents))]


@given(parents_lists())
def test_tree_ancestors_marks_the_nodes_of_the_path(parents):
    ancestors = np.zeros((len(parents), len(parents)), np.bool_)
    kernels.tree_ancestors(np.array(parents, np.int32), ancestors)
    for node in range(len(parents)):
        assert np.flatnonzero(ancestors[node]).tolist() == sorted(path_to(parents, node))


@given(parents_lists(), st.randoms(use_true_random=False))
def test_best_path_has_the_largest_sum_of_probs(parents, random):
    probs = np.array([random.random() for _ in parents], np.float32)
    path = np.empty(len(parents), np.int32)
    length = kernels.best_path(np.array(parents, np.int32), probs, path)
    sums = {tuple(path_to(parents, n)): probs[path_to(parents, n)].sum() for n in range(len(probs))}
    best = tuple(path[:length].tolist())
    if parents:
        assert sums[best] == pytest.approx(max(sums.values()))
    else:
        assert length == 0


# --- compilation


def test_a_kernel_compiles_its_own_versions_only():
    for kernel in kernels._kernels:
        kernel.compile()
        assert len(kernel._compiled.signatures) == len(kernel._signatures)


def test_warmup_leaves_the_kernels_of_retrievers_to_their_first_search(monkeypatch):
    compiled = []
    monkeypatch.setattr(kernels.Kernel, "compile", lambda kernel: compiled.append(kernel) or False)
    kernels.warmup()
    assert set(compiled) == {each for each in kernels._kernels if each.drafts}
    modules = {each.python.__module__.split(".")[1] for each in kernels._kernels}
    assert modules == {"index", "ralm"}
    assert {each.python.__module__.split(".")[1] for each in compiled} == {"index"}


def test_arguments_of_other_types_are_refused_rather_than_compiled_for():
    with pytest.raises(TypeError):
        kernels.tree_depths(np.zeros(2, np.float64), np.zeros(2, np.int32))


@pytest.fixture
def uncompiled(monkeypatch):
    """A new kernel, the only one; it has no source file, so numba keeps no cache of it."""
    monkeypatch.setattr(kernels, "_kernels", [])
    namespace = {}
    exec("def add(a, b): return a + b", namespace)
    return kernels.kernel("int64(int64, int64)")(namespace["add"])


def test_the_call_that_waits_for_the_compiler_says_so_once(caplog, uncompiled):
    with caplog.at_level(logging.INFO, logger="hf_refspec"):
        assert uncompiled(2, 3) == 5
        assert uncompiled(3, 3) == 6
    assert [record.name for record in caplog.records] == ["hf_refspec"]
    assert "hf_refspec.warmup()" in caplog.text


def test_after_warmup_no_call_waits(caplog, uncompiled):
    with caplog.at_level(logging.INFO, logger="hf_refspec"):
        kernels.warmup()
        assert uncompiled(2, 3) == 5
    assert not caplog.records


def test_kernels_work_where_no_cache_folder_can_be_written(tmp_path):
    shutil.copy(kernels.__file__, tmp_path / "lonely.py")
    for occupied in ("__pycache__", "home"):  # files, where numba wants to make folders
        (tmp_path / occupied).touch()
    program = (
        "import lonely, numpy as np\n"
        "depths = np.empty(2, np.int32)\n"
        "assert lonely.tree_depths.compile()\n"
        "lonely.tree_depths(np.array([-1, 0], np.int32), depths)\n"
        "print(depths.tolist())"
    )
    home = str(tmp_path / "home")
    environment = {**os.environ, "HOME": home, "XDG_CACHE_HOME": home}
    environment.pop("NUMBA_CACHE_DIR", None)
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (run.stdout, run.stderr) == ("[1, 2]\n", "")
