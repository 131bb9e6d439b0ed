"""How many nodes are verified: what pays at what passes cost."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import chain, combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_refspec import Drafter, DraftTree
from hf_refspec.drafting.calibration import Calibration
from hf_refspec.drafting.candidates import CandidateChain
from hf_refspec.drafting.stats import DraftStats
from hf_refspec.generation.accept import Accepted, Taken
from hf_refspec.generation.budget import (
    PASS_TOKENS,
    TOKENS,
    AutoBudget,
    BatchShape,
    Budget,
    PassCosts,
    make_budget,
    pass_costs,
)
from hf_refspec.generation.loop import Loop
from hf_refspec.generation.plan import Drafts, Plan
from hf_refspec.generation.row import Row
from hf_refspec.verification.passes import PassResult
from hf_refspec.verification.ranks import Ranks
from tests.helpers.drafters import Fixed
from tests.helpers.pass_times import MadeUp
from tests.helpers.trees import draft_trees

MOST_NODES = PASS_TOKENS[-1] - 1
# Of one process, whose verifier has been probed.
VERIFIER = SimpleNamespace(entries=SimpleNamespace(packs=False))
EXACT = SimpleNamespace(covers=lambda length: True, probe=lambda length: True)
UNLIMITED = SimpleNamespace(verifier=VERIFIER, exactness=EXACT, ranks=Ranks())


def row_of(drafter: Drafter, length: int = 10) -> Row:
    """A text of this length."""
    ids = torch.zeros((1, length), dtype=torch.int64)
    row = Row(ids, LogitsProcessorList(), StoppingCriteriaList(), GenerationConfig())
    row.drafter = drafter
    return row


def planned(budget: Budget, rows: list[Row], takes_part: list[bool] | None = None) -> Plan:
    """The plan of a step of these rows, which nothing else limits."""
    takes_part = [True] * len(rows) if takes_part is None else takes_part
    longest = max(len(row) for row, takes in zip(rows, takes_part, strict=True) if takes)
    shape = BatchShape(len(rows), sum(takes_part), longest)
    depths = [1024 if takes else None for takes in takes_part]
    if isinstance(budget, AutoBudget):
        return Plan(rows, UNLIMITED, shape, budget.nodes(shape), depths, budget)
    return Plan(rows, UNLIMITED, shape, budget, depths, None)


def record(plan: Plan, drafts: Drafts, *tokens: Iterable[int], seconds: float = 1.0) -> None:
    """As if the target had chosen these tokens for each row, a path of the draft and one more, in a
    pass that took these seconds."""
    taken = [
        Taken(None if tree is None else [], np.array([*chosen], dtype=np.int64), 0)
        for tree, chosen in zip(drafts.trees, tokens, strict=True)
    ]
    pass_tokens = sum(1 + len(tree) for tree in drafts.trees if tree is not None)
    result = PassResult(torch.empty(0), [0] * len(taken), pass_tokens, is_step=True)
    loop = Loop(VERIFIER, plan.auto, UNLIMITED, DraftStats())
    loop.learn(plan, drafts, result, Accepted(taken, seconds, None))


def kept_nodes(budget: Budget, rows: list[Row], drafts: list[DraftTree]) -> list[int]:
    """How many nodes of each row's draft are verified."""
    return [*map(len, planned(budget, rows).trim(Drafts(drafts, drafts, 0.0)).trees)]


def rich(formula, **options) -> AutoBudget:
    """A budget of a call that has gained so much that it may try anything."""
    costs = MadeUp(formula)
    costs.allowance = 1e6
    return AutoBudget(costs, **options)


class OneRow:
    """A budget for one text."""

    def __init__(self, budget: AutoBudget):
        self.budget = budget
        self.drafter = Fixed()

    def drafts(self) -> bool:
        """Plans a step, and says whether it may draft."""
        self.plan = planned(self.budget, [row_of(self.drafter)])
        return self.plan.nodes > 0

    def verified(self, draft: DraftTree, drafting_seconds: float = 0.0) -> DraftTree:
        self.drafted = draft
        [kept] = self.plan.trim(Drafts([draft], [draft], drafting_seconds)).trees
        return kept

    def trim(self, draft: DraftTree, drafting_seconds: float = 0.0) -> DraftTree:
        self.drafts()
        return self.verified(draft, drafting_seconds)

    def record(self, kept: DraftTree, tokens, seconds: float) -> None:
        record(self.plan, Drafts([self.drafted], [kept], 0.0), tokens, seconds=seconds)


def budget_at(formula) -> OneRow:
    return OneRow(rich(formula))


def same(tokens: int) -> float:
    return 1.0


def numbered_trees(most: int, least_prob: float = 0.0):
    """Trees of which each node is known by its token."""
    trees = draft_trees(99, most, st.floats(least_prob, 1.0, width=32))
    return trees.map(lambda tree: replace(tree, tokens=np.arange(len(tree))))


@given(numbered_trees(most=MOST_NODES, least_prob=0.5))
def test_all_nodes_are_kept_where_they_cost_nothing_and_none_where_each_costs_a_token(tree):
    assert len(budget_at(float).trim(tree)) == 0
    budget = budget_at(same)
    # Not one node of a tree that promises hardly anything is verified.
    promised = budget.drafter.calibration.calibrated(tree).probs.sum(dtype=float)
    assume(promised == 0 or promised > 0.1)
    assert len(budget.trim(tree)) == (len(tree) if promised else 0)


@given(numbered_trees(most=7), st.lists(st.floats(0, 1), min_size=13, max_size=13))
def test_the_nodes_kept_are_the_best_of_all_that_could_be(tree, more):
    prices = dict(zip(PASS_TOKENS, np.cumsum([1.0, *more]), strict=True))
    budget = budget_at(prices.__getitem__)
    kept = budget.trim(tree)
    kept.checked(vocab_size=100)
    positions = kept.tokens.tolist()
    # Each node is kept with its ancestors, in the same order.
    assert [positions.index(p) if p >= 0 else -1 for p in tree.parents[positions].tolist()] == (
        kept.parents.tolist()
    )
    assert kept.probs.tolist() == tree.probs[positions].tolist()

    believed = budget.drafter.calibration.calibrated(tree).probs

    def speed(nodes) -> float:
        cost = np.interp(1 + len(nodes), PASS_TOKENS, [prices[t] for t in PASS_TOKENS])
        return (1 + believed[list(nodes)].sum(dtype=float)) / cost

    every = range(len(tree))
    counts = {0, len(tree), *(tokens - 1 for tokens in PASS_TOKENS if tokens <= len(tree))}
    closed = (
        nodes
        for nodes in chain.from_iterable(combinations(every, count) for count in counts)
        if all(tree.parents[node] in (-1, *nodes) for node in nodes)
    )
    best = max(map(speed, closed))
    # A draft that promises next to nothing is not verified.
    assert speed(positions) == pytest.approx(best, rel=1e-5 if positions else 0.05)


def test_a_call_that_has_gained_nothing_stakes_little_and_more_once_drafts_are_right():
    """A node costs half a plain step."""
    budget = OneRow(AutoBudget(MadeUp(lambda tokens: 0.5 + 0.5 * tokens)))
    tree = DraftTree.chain(range(MOST_NODES), [1.0] * MOST_NODES)
    staked = []
    for _ in range(12):
        kept = budget.trim(tree)
        staked.append(len(kept))
        budget.record(kept, range(1 + len(kept)), 1 + 0.5 * len(kept))
    assert staked[0] == 1 and staked == sorted(staked) and staked[-1] == MOST_NODES


def lost(dear: float, prob: float, nodes: int, tokens: int, doubles: int, right: int = 0) -> float:
    """The plain steps that wrong drafts cost a call of this number of tokens more than a hundredth
    of its time, behind a number of `right` ones. Passes take twice as long from some pass on."""
    budget = OneRow(AutoBudget(PassCosts()))
    seconds = plain = 0.0
    tree = DraftTree.chain(range(nodes), np.cumprod([prob] * nodes))
    for number in range(-right, tokens):
        budget.drafter.calibration = Calibration()  # estimates that nothing corrects
        kept = budget.verified(tree if budget.drafts() else DraftTree.empty())
        slower = 1.0 if number < 10 * doubles else 2.0
        taken = slower * np.interp(1 + len(kept), [1, 2, 64], [1.0, dear, 3 * dear])
        if number >= 0:
            seconds, plain = seconds + taken, plain + slower
        budget.record(kept, range(1 + len(kept)) if number < 0 else [99], taken)
    return seconds - 1.015 * plain


@given(
    st.floats(1.05, 4.0),
    st.floats(0.1, 1.0),
    st.integers(1, 63),
    st.integers(70, 200),
    st.integers(0, 9),
)
def test_drafts_that_are_always_wrong_take_a_hundredth_of_the_time_and_little_more(
    dear, prob, nodes, tokens, doubles
):
    """And what was granted in advance, and what the first passes of two sizes cost more than they
    were taken to; of passes that take twice as long, each in the time of the slow ones."""
    assert lost(dear, prob, nodes, tokens, doubles) <= 2 * 1.5 + 3 * dear


def test_what_was_gained_long_ago_pays_for_few_wrong_drafts():
    assert 50 < lost(1.5, 1.0, 63, tokens=200, doubles=99, right=300) <= 110


def test_drafts_that_are_not_verified_are_learned_from_too():
    budget = budget_at(lambda tokens: 1.0 if tokens == 1 else 1.5)
    tree = DraftTree.chain([4], [0.2])
    for _ in range(30):
        if len(budget.trim(tree)):
            return
        budget.record(DraftTree.empty(), [4], 1.0)
    raise AssertionError("a node that is always right was never verified")


@pytest.mark.parametrize("drafted", [True, False])
def test_after_drafts_that_do_not_pay_it_pauses_and_goes_on_when_one_does(drafted):
    budget = OneRow(AutoBudget(recorded(*[(1, 1.0)] * 3)))
    tree = DraftTree.chain([4, 5], [0.9, 0.8])
    wrong = DraftTree.chain([8], [0.01]) if drafted else DraftTree.empty()

    def step(draft: DraftTree) -> bool:
        """Whether it drafted."""
        drafts = budget.drafts()
        kept = budget.verified(draft if drafts else DraftTree.empty(), drafting_seconds=0.05)
        budget.record(kept, [4, 5, 6][: 1 + len(kept)], 1.0)
        return drafts

    steps = [number for number in range(60) if step(wrong)]
    gaps = np.diff(steps)
    patience = int((gaps == 1).sum()) + 1
    assert 2 < patience < 20
    assert (gaps[patience - 1 :] == gaps[-1]).all()
    assert gaps[-1] >= 5  # at most 1 % of the time is for drafting
    while not step(tree):
        pass
    assert all(step(tree) for _ in range(20))


def test_all_rows_side_by_side_get_the_number_that_pays_for_all_together():
    """One row alone would verify its draft; beside three that draft nothing it does not pay."""
    tree = DraftTree.chain([4, 5], [0.9, 0.8])
    drafters = [Fixed() for _ in range(4)]

    def kept(drafts) -> list[int]:
        rows = [row_of(drafter) for drafter in drafters[: len(drafts)]]
        return kept_nodes(rich(lambda tokens: 1 + 0.5 * (tokens > len(rows))), rows, drafts)

    nothing = DraftTree.empty()
    assert kept([tree]) == [2]
    assert kept([tree, nothing, nothing, nothing]) == [0, 0, 0, 0]
    assert kept([DraftTree.chain(range(8), [0.9] * 8), tree, nothing, tree]) == [8, 2, 0, 2]


def test_few_rows_get_the_nodes_that_the_others_gave_up():
    """Passes over up to eight tokens cost the same, of however many rows these are."""
    budget = rich(lambda tokens: max(tokens, 8) ** 2, packs=True)
    draft = DraftTree.chain(np.arange(8), 0.9 ** np.arange(1, 9, dtype=np.float32))
    nodes = []
    for count in (8, 4, 1):
        rows = [row_of(Fixed()) for _ in range(count)]
        nodes.append(max(kept_nodes(budget, rows, [draft] * count)))
    assert nodes[0] == 0
    assert 0 < nodes[1] < nodes[2] == 7


def test_a_call_that_waits_for_all_rows_drafts_for_those_behind():
    """A pass over six tokens costs as much as one over three, and more do not pay."""
    draft = DraftTree.chain(np.arange(4), 0.9 ** np.arange(1, 5, dtype=np.float32))

    def kept(waits: bool, *lengths: int) -> list[int]:
        budget = rich(lambda tokens: 1.0 if tokens <= 6 else 9.0, packs=True, waits=waits)
        drafter = Fixed()
        rows = [row_of(drafter, length) for length in lengths]
        return kept_nodes(budget, rows, [draft] * len(rows))

    assert kept(True, 10, 60, 60) == [3, 0, 0]
    assert kept(True, 60, 60, 10) == [0, 0, 3]
    # Rows of one length, and those of a server, which others follow, are worth the same.
    assert kept(True, 10, 10, 10) == kept(False, 10, 60, 60) == [1, 1, 1]


def test_each_row_learns_from_its_own_text():
    budget = AutoBudget(MadeUp(float))
    drafters = [Fixed() for _ in range(3)]
    tree = DraftTree.chain([4], [0.5])
    for _ in range(20):
        plan = planned(budget, [row_of(each) for each in drafters], [True, True, False])
        drafts = Drafts([tree, tree, None], [tree, tree, None], 0.0)
        plan.trim(drafts)
        record(plan, drafts, [4], [9], [])
    right, wrong, unknown = (d.calibration.calibrated(tree).probs[0] for d in drafters)
    [never_drafted] = Fixed().calibration.calibrated(tree).probs
    assert wrong < 0.02 < unknown == never_drafted < 0.5 < 0.8 < right


# --- make_budget


def test_a_given_number_of_nodes_never_changes():
    tree = DraftTree.chain([4] * 20, [0.01] * 20)
    theirs = CandidateChain(PromptLookupCandidateGenerator())
    for drafter in (Fixed(), theirs):
        for nodes in (0, 1, 20):
            budget = make_budget(nodes, drafter, torch.nn.Linear(1, 1), "tree")
            plan, drafts = planned(budget, [row_of(drafter)]), Drafts([tree], [tree], 1.0)
            [kept] = plan.trim(drafts).trees
            assert kept is tree
            assert plan.nodes == budget == nodes


# --- what drafting may cost


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("packs", [False, True])
def test_the_speed_of_a_draft_is_that_of_its_best_pass(rows, packs):
    """A pass over more than two tokens a row takes twice as long as one over two."""
    budget = rich(lambda tokens: rows * (1.0 if tokens <= 2 * rows else 2.0), packs=packs)
    speed = partial(budget.speed, BatchShape(rows, rows, 10))
    none = np.empty(0, dtype=np.float32)
    assert speed(none, 0.0) == pytest.approx(1.05)
    assert speed(np.float32([0.4, 0.5]), 0.1) == pytest.approx(1.5 / 1.1)
    assert speed(np.float32([0.9, 0.9, 0.9]), 1.0) == pytest.approx(3.7 / 3)


def test_drafting_that_took_long_once_does_not_end_it():
    costs = MadeUp(same)
    budget = OneRow(AutoBudget(costs))
    budget.trim(DraftTree.empty(), drafting_seconds=20.0)  # an assistant read the prompt
    budget.record(DraftTree.empty(), [1], seconds=1.0)
    assert OneRow(AutoBudget(costs)).drafts()


# --- what passes cost, estimated from noisy measurements


def recorded(*passes: tuple[int, float]) -> PassCosts:
    """After passes over these tokens, in these seconds; those over one token were plain steps."""
    costs = PassCosts()
    for tokens, seconds in passes:
        costs.record(tokens, seconds, plain=tokens == 1)
    return costs


def seconds_of(costs: PassCosts, tokens: int, length: int = 0) -> float:
    return float(costs.seconds(np.array(tokens), length))


def ratios(costs: PassCosts) -> list[float]:
    dearest = costs.dearest(np.array(PASS_TOKENS))
    assert dearest[0] == 1
    return dearest.tolist()


@pytest.mark.parametrize("seconds", [1e-4, 0.05, 30.0])
def test_one_pass_predicts_all_by_their_expected_growth(seconds):
    growth = (0.0, 0.0, 0.5, 0.0, 0.0, 0.5)
    costs = PassCosts(growth)
    assert seconds_of(costs, 1) == seconds_of(costs, 4, 900) == 0  # nothing is known
    costs.record(1, seconds, plain=True)
    assert seconds_of(costs, 1) == pytest.approx(seconds, rel=0.01)
    # The less is known about a number, the cheaper it is assumed to be.
    doublings = np.log2(PASS_TOKENS)
    expected = np.exp(np.interp(doublings, range(7), np.cumsum((0.0, *growth))))
    taken = costs.seconds(np.array(PASS_TOKENS), 0)
    assert (taken <= 1.01 * seconds * expected).all()
    assert (taken >= 0.7 * seconds * expected).all()


def test_a_measurement_informs_its_neighbours_and_the_nearer_ones_more():
    before = ratios(recorded((1, 1.0), (1, 1.0)))
    after = ratios(recorded((1, 1.0), (1, 1.0), *[(5, 3.0)] * 4))
    changes = np.array(after) / before
    assert changes[0] == 1 and (np.diff(changes[:4]) > 0).all()
    assert (changes[3:] > 1.5).all()  # all the longer ones are as much dearer


def test_a_number_between_two_informs_both():
    costs = recorded(*[(1, 1.0), (18, 3.0)] * 20)
    assert seconds_of(costs, 16) <= 3.1 and seconds_of(costs, 24) >= 2.9
    assert costs.passes == 40
    beyond = recorded((1, 1.0), *[(2000, 5.0)] * 9)
    assert seconds_of(beyond, TOKENS[-1]) == pytest.approx(5, rel=0.1)


def test_a_number_of_tokens_may_cost_more_than_larger_ones():
    """As products of matrices of three rows do where there are kernels for four."""
    costs = recorded(*[(1, 1.0), (3, 2.0), (4, 1.3), (8, 1.2)] * 20)
    measured = [seconds_of(costs, tokens) for tokens in (1, 3, 4, 8)]
    assert measured == pytest.approx([1.0, 2.0, 1.3, 1.2], rel=0.1)


passes_lists = st.lists(st.tuples(st.integers(1, 80), st.floats(1e-6, 1e3)), max_size=60)


@given(passes_lists)
def test_costs_stay_finite(passes):
    seconds = recorded(*passes).seconds(np.array(TOKENS), 0)
    assert np.isfinite(seconds).all() and (seconds >= 0).all()


@given(st.lists(st.tuples(st.integers(1, 70), st.floats(1e-3, 10.0)), max_size=40))
def test_a_pass_is_filled_up_to_a_number_that_is_known_to_take_less_time(passes):
    costs = recorded((1, 1.0), *passes)
    sizes = [max(size for size in TOKENS if size <= tokens) for tokens, _ in passes]
    for tokens in range(1, 80):
        filled = costs.cheapest(tokens)
        assert filled >= tokens
        if filled > tokens:
            assert sizes.count(filled) >= 3


def test_three_tokens_are_filled_up_to_eight_where_eight_take_less_time_and_one_is_not():
    costs = recorded(*[(1, 0.06), (3, 0.12), (5, 0.08), (8, 0.072), (16, 0.09)] * 10)
    assert [costs.cheapest(tokens) for tokens in (1, 2, 3, 4, 5, 8, 12, 99)] == [
        *(1, 8, 8, 8, 8, 8, 12, 99)
    ]


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_pass_that_was_disturbed_changes_next_to_nothing(tokens):
    quiet = [(1, 1.0), (9, 2.0)] * 5
    before, after = recorded(*quiet), recorded(*quiet, (tokens, 40.0))
    assert ratios(after) == pytest.approx(ratios(before), rel=0.05)
    assert not after.wants_plain_step(0)


@pytest.mark.parametrize("stalled", [0, 1, 2])
def test_a_stall_in_the_first_three_passes_is_forgotten_after_ten(stalled):
    passes = [(1, 1.0), (1, 1.0), (1, 1.0), *[(1, 1.0), (4, 1.5), (9, 2.0)] * 3]
    disturbed = passes.copy()
    disturbed[stalled] = 1, 10.0
    before, after = recorded(*passes[:10]), recorded(*disturbed[:10])
    assert ratios(after) == ratios(before)
    assert seconds_of(after, 9) == seconds_of(before, 9)
    assert not after.wants_plain_step(0)


@pytest.mark.parametrize("times", [3, 10, 30])
def test_the_first_pass_of_a_size_which_sets_something_up_does_not_make_it_dear(times):
    set_up = recorded(*[(1, 0.05)] * 6, (2, 0.05 * times))
    assert ratios(set_up)[1] < 1.5
    dear = recorded(*[(1, 0.05)] * 6, *[(2, 0.05 * times)] * 2)
    assert ratios(dear)[1] == pytest.approx(times)


def test_when_the_machine_becomes_slower_plain_steps_are_measured_again_and_all_numbers_follow():
    costs = recorded(*[(1, 1.0), (8, 2.0)] * 10)
    before = ratios(costs)
    steps = []
    for _ in range(60):
        plain = costs.wants_plain_step(0)
        costs.record(1 if plain else 8, 2.0 if plain else 4.0, plain=plain)
        steps.append(plain)
    assert 2 <= sum(steps) <= 6 and not any(steps[20:])
    assert seconds_of(costs, 1) == pytest.approx(2.0, rel=0.1)
    assert ratios(costs) == pytest.approx(before, rel=0.1)


def test_a_size_that_was_dear_is_tried_again_after_very_many_passes():
    passes = [*[(1, 1.0)] * 3, *[(32, 8.0)] * 2]
    assert seconds_of(recorded(*passes), 32) == pytest.approx(8.0)
    assert seconds_of(recorded(*passes, *[(1, 1.0)] * 2000), 32) < 4.0


def test_a_size_that_is_not_known_may_be_dear_and_one_that_is_not():
    unknown = recorded(*[(1, 1.0)] * 9).dearest(np.array([1, 2, 8, 64]))
    assert unknown[0] == 1 and (np.diff(unknown) > 0.3).all() and unknown[3] > 4.5
    known = recorded(*[(1, 1.0)] * 9, *[(8, 1.5)] * 9).dearest(np.array([1, 8]))
    assert known[1] == pytest.approx(1.5, rel=0.1)


def test_a_plain_step_costs_the_median_of_those_at_texts_of_a_similar_length():
    costs = PassCosts()
    assert costs.wants_plain_step(100)
    for length, seconds in ((100, 1.0), (1500, 2.0)):
        for disturbed in (1.0, 9.0, 1.0):
            costs.record(1, disturbed * seconds, length, plain=True)
        assert not costs.wants_plain_step(length)
    assert (seconds_of(costs, 1, 900), seconds_of(costs, 1, 2000)) == (1.0, 2.0)
    assert costs.wants_plain_step(5000)


def test_another_length_moves_all_costs_at_once():
    costs = recorded(*[(1, 1.0), (8, 2.0)] * 20)
    before = ratios(costs)
    assert costs.wants_plain_step(9000)
    for _ in range(3):
        costs.record(1, 10.0, 9000, plain=True)
    assert seconds_of(costs, 8, 9000) == pytest.approx(20, rel=0.1)
    assert seconds_of(costs, 8) == pytest.approx(2, rel=0.1)
    assert ratios(costs) == pytest.approx(before, rel=0.1)


def test_the_plain_steps_of_several_rows_tell_what_those_of_fewer_cost():
    costs = PassCosts()
    for _ in range(3):
        costs.record(4, 2.0, plain=True)
    assert seconds_of(costs, 4) == pytest.approx(2.0, rel=0.1)
    assert 1.0 < seconds_of(costs, 1) < 2.0 < seconds_of(costs, 8)


def test_a_gpu_and_16_bits_are_expected_to_make_long_passes_cheap():
    model = torch.nn.Linear(1, 1)
    single = ratios(pass_costs(model, "tree"))[-1]
    half = ratios(pass_costs(model.to(torch.bfloat16), "tree"))[-1]
    other = ratios(pass_costs(model.to("meta"), "tree"))[-1]  # as any device but a CPU
    assert other < half < single


def test_costs_are_kept_for_each_model_dtype_device_and_verifier():
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    costs = pass_costs(model, "tree")
    assert pass_costs(model, "tree") is costs
    known = [costs, pass_costs(other, "tree"), pass_costs(model, "chain")]
    known.append(pass_costs(model.to(torch.bfloat16), "tree"))
    known.append(pass_costs(model.to("meta"), "tree"))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        known.append(pass_costs(other, "tree"))
    finally:
        torch.set_num_threads(threads)
    assert len(set(map(id, known))) == len(known)
