"""Estimates of acceptance come true after a while, whatever a source estimates."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec import DraftTree
from hf_refspec.drafting.calibration import CLASSES, Calibration, calibrate, record_outcome
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.contract import Call, Observation
from tests.helpers.drafters import Fixed
from tests.helpers.trees import draft_trees

VOCAB_SIZE = 10
BOUNDS = (0.02, 0.05, 0.12, 0.25, 0.45, 0.7, 0.9)


trees = draft_trees(VOCAB_SIZE, 12, st.sampled_from([0.0, *BOUNDS, 1.0]) | st.floats(0, 1))
outcomes = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=14)


@st.composite
def counts(draw):
    size = CLASSES[0] * CLASSES[1]
    numbers = st.lists(st.floats(0, 48), min_size=size, max_size=size)
    expected, accepted = draw(numbers), draw(numbers)
    return np.array(expected).reshape(CLASSES), np.array(accepted).reshape(CLASSES)


# --- the kernels' twins


def conditional_of(tree: DraftTree, node: int) -> float:
    parent = int(tree.parents[node])
    before = float(tree.probs[parent]) if parent >= 0 else 1.0
    return float(tree.probs[node]) / before if before else 0.0


def class_of(tree: DraftTree, node: int) -> tuple[int, int]:
    depths = {1: 0, 2: 1, 3: 2, 4: 2, **dict.fromkeys(range(5, 9), 3)}
    prob = conditional_of(tree, node)
    return depths.get(len(tree.path(node)), 4), sum(prob >= bound for bound in BOUNDS)


def calibrate_slowly(
    tree: DraftTree, expected, accepted, pseudo_count: float, prior_exponent: float
) -> list[float]:
    of_depth = [
        (sum(accepted[depth]) + pseudo_count) / (sum(expected[depth]) + pseudo_count)
        for depth in range(CLASSES[0])
    ]
    probs: list[float] = []
    for node, parent in enumerate(tree.parents.tolist()):
        place = class_of(tree, node)
        prob = conditional_of(tree, node)
        prior = pseudo_count * of_depth[place[0]] * prob**prior_exponent
        factor = (accepted[place] + prior) / (expected[place] + pseudo_count)
        before = probs[parent] if parent >= 0 else 1.0
        probs.append(float(np.float32(min(before * prob * factor, before))))
    return probs


def record_slowly(tree: DraftTree, emitted: list[int], memory: float, expected, accepted) -> None:
    for node in range(len(tree)):
        path = tree.path(node).tolist()
        if len(path) > len(emitted) or path[:-1] != emitted[: len(path) - 1]:
            continue  # nobody knows what would have become of it
        place = class_of(tree, node)
        expected[place] += conditional_of(tree, node)
        accepted[place] += path == emitted[: len(path)]
        if expected[place] > memory:
            expected[place] /= 2
            accepted[place] /= 2


@given(trees, counts(), st.floats(0.5, 8), st.floats(0, 3))
def test_calibrate_multiplies_each_conditional_probability(tree, counts, pseudo_count, exponent):
    arguments = *counts, pseudo_count, exponent
    probs = calibrate(tree.parents, tree.probs, *arguments)
    expected = calibrate_slowly(tree, *arguments)
    assert probs.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-30)


@given(trees, outcomes, counts(), st.floats(1, 48))
def test_record_outcome_counts_the_nodes_whose_parent_was_right(tree, emitted, counts, memory):
    theirs = [array.copy() for array in counts]
    tokens = np.array(emitted, np.int64)
    record_outcome(tree.tokens, tree.parents, tree.probs, tokens, memory, *counts)
    record_slowly(tree, emitted, memory, *theirs)
    for mine, slow in zip(counts, theirs, strict=True):
        assert mine == pytest.approx(slow)


# --- what holds of any text


@given(st.lists(st.tuples(trees, outcomes), max_size=8), trees)
def test_probabilities_stay_legal(history, tree):
    calibration = Calibration()
    for earlier, emitted in history:
        calibration.record(earlier, np.array(emitted, np.int64))
    calibrated = calibration.calibrated(tree)
    calibrated.checked(VOCAB_SIZE)  # in [0, 1], and not rising along a path
    assert calibrated.tokens is tree.tokens
    assert calibrated.parents is tree.parents


# --- what becomes of a source


TRUTHS = {
    "overconfident": lambda said: 0.4 * said,
    "timid": lambda said: said**0.6,
    "the wrong way round": lambda said: 0.8 - 0.6 * said,
    "right": lambda said: said,
}


def calibration_error(said: np.ndarray, came_true: np.ndarray) -> float:
    """The expected calibration error over ten bins of equal width."""
    bins = np.minimum((said * 10).astype(int), 9)
    gaps = [
        abs(said[bins == b].mean() - came_true[bins == b].mean()) * (bins == b).sum()
        for b in np.unique(bins)
    ]
    return sum(gaps) / len(said)


@pytest.mark.parametrize("truth", TRUTHS.values(), ids=TRUTHS)
def test_estimates_have_come_true_after_2000_tokens(truth):
    random = np.random.default_rng(0)
    calibration, emitted = Calibration(), 0
    said, corrected, came_true = [], [], []
    while emitted < 6000:
        conditional = random.choice([0.03, 0.1, 0.2, 0.35, 0.6, 0.8, 0.95], 4)
        tree = DraftTree.chain([4, 5, 6, 7], np.cumprod(conditional))
        right = [bool(random.random() < truth(prob)) for prob in conditional]
        accepted = right.index(False) if False in right else 4
        if emitted >= 2000:
            said += tree.probs.tolist()
            corrected += calibration.calibrated(tree).probs.tolist()
            came_true += [depth < accepted for depth in range(4)]
        calibration.record(tree, np.array([*[4, 5, 6, 7][:accepted], 9]))
        emitted += accepted + 1
    before = calibration_error(np.array(said), np.array(came_true))
    after = calibration_error(np.array(corrected), np.array(came_true))
    assert after < 0.05
    assert after < before or before < 0.03


# --- Blend


def test_a_blend_leaves_the_nodes_of_a_wrong_source_out_of_a_small_budget():
    blend = Fixed.chain([4, 5], [0.4, 0.3]) | Fixed.chain([7, 8], [0.95, 0.9])
    drafted = []
    for _ in range(2):
        with drafter_call(blend, [np.array([1])], VOCAB_SIZE):
            for _ in range(40):
                drafted.append(blend.draft(2, Call()).tokens.tolist())
                blend.observe(Observation(np.array([4, 5, 9])))
    assert drafted[0] == [7, 8]
    assert drafted[39] == drafted[-1] == [4, 5]
    assert drafted[40] == [4, 5]  # the next call still knows


def test_a_blend_judges_each_source_by_its_own_tree():
    """Sources with the same draft are judged together, others apart."""
    blend = Fixed.chain([4], [0.5]) | Fixed.chain([4], [0.9]) | Fixed.chain([7], [0.9])
    with drafter_call(blend, [np.array([1])], VOCAB_SIZE):
        for _ in range(40):
            blend.draft(3, Call())
            blend.observe(Observation(np.array([4])))
        tree = blend.draft(3, Call())
    assert tree.tokens.tolist() == [4, 7]
    assert tree.probs[0] > 0.95
    assert tree.probs[1] < 0.15
