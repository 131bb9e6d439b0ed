"""How many nodes are verified: what a pass costs as far as known, and what pays at that cost."""

from __future__ import annotations

import gc
import weakref
from itertools import chain, combinations

import numpy as np
import pytest
import torch
from drafters import Prophet
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_refspec import Drafter, DraftTree
from hf_refspec.drafting.calibration import DOUBT
from hf_refspec.drafting.candidates import CandidateChain
from hf_refspec.generation import loop as decoding
from hf_refspec.generation.budget import (
    DOUBTED,
    DRAFTING_SHARE,
    LONGEST_REST,
    MARGIN,
    MOST_NODES,
    NEWEST,
    PASS_TOKENS,
    PATIENCE,
    PLAIN_PASSES,
    REACH,
    SLOWEST,
    SURE,
    AutoBudget,
    Budget,
    PassCosts,
    Rest,
    make_budget,
    pass_costs,
)
from hf_refspec.index import kernels

kernels.warmup()  # here, where it is in no test's time

PROMPT = torch.tensor([[5, 9, 12, 7, 5, 9, 33, 12, 7]])
OPTIONS = {"max_new_tokens": 32, "eos_token_id": None}


# --- PassCosts


def recorded(*passes: tuple[int, float]) -> PassCosts:
    costs = PassCosts()
    for tokens, seconds in passes:
        costs.record(tokens, seconds)
    return costs


def seconds_of(costs: PassCosts, tokens: int) -> float:
    return float(costs.seconds()[PASS_TOKENS.index(tokens)])


def test_the_first_pass_over_a_number_of_tokens_is_not_counted():
    costs = recorded((1, 99.0), (1, 2.0), (5, 99.0))
    assert seconds_of(costs, 1) == seconds_of(costs, 5) == pytest.approx(2.0, rel=0.05)
    assert costs.passes == [2, 0, 0, 1, 0, 0, 0, 0]


def test_what_lies_between_two_measured_numbers_costs_what_the_smaller_one_does():
    costs = recorded((1, 1.0), (1, 1.0), (65, 3.0), (65, 3.0))
    assert costs.seconds().tolist() == pytest.approx([1] * 7 + [3], rel=0.05)
    assert recorded((1, 1.0), (1, 1.0)).seconds().tolist() == [1] * 8


@pytest.mark.parametrize("power", [0.0, 0.3, 1.0])
def test_past_the_largest_measured_number_costs_grow_on_as_a_power(power):
    costs = recorded(*[(tokens, tokens**power) for tokens in (1, 5, 1, 5)])
    past = [tokens**power for tokens in PASS_TOKENS if tokens >= 5]
    assert costs.seconds()[3:].tolist() == pytest.approx(past, rel=0.1)
    assert PassCosts().seconds().tolist() == [0] * len(PASS_TOKENS)


def test_a_number_between_two_counts_as_the_smaller_one():
    """Otherwise drafts of such a length would never be known to be dear."""
    costs = recorded((1, 1.0), (1, 1.0), (11, 3.0), (11, 3.0))
    assert [seconds_of(costs, tokens) for tokens in (5, 9)] == pytest.approx([1, 3], rel=0.05)
    assert costs.passes == [2, 0, 0, 0, 2, 0, 0, 0]
    assert seconds_of(recorded((100, 5.0), (100, 5.0)), PASS_TOKENS[-1]) == 5


passes_lists = st.lists(st.tuples(st.integers(1, 80), st.floats(1e-6, 1e3)), max_size=60)


@settings(deadline=None)
@given(passes_lists)
def test_a_longer_pass_is_never_cheaper(passes):
    seconds = recorded(*passes).seconds()
    assert np.isfinite(seconds).all() and (seconds >= 0).all()
    assert (np.diff(seconds) >= 0).all()


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), max_size=20))
def test_a_slow_pass_is_believed_only_so_far(others):
    costs = recorded((1, 1.0), (1, 1.0))
    for seconds in others:
        before = seconds_of(costs, 1)
        costs.record(1, seconds)
        after = seconds_of(costs, 1)
        assert (1 - NEWEST) * before <= after * (1 + 1e-9)
        assert after <= (1 + NEWEST * (SLOWEST - 1)) * before * (1 + 1e-9)


@pytest.mark.parametrize("now", [0.2, 5.0])
def test_a_machine_that_becomes_faster_or_slower_is_found_out(now):
    costs = recorded(*[(1, 1.0)] * 5, *[(1, now)] * 60)
    assert seconds_of(costs, 1) == pytest.approx(now, rel=0.01)


def test_what_was_slow_is_doubted_and_tried_again_the_sooner_the_less_it_was_measured():
    def passes_until_doubted(measured: int) -> int:
        costs = recorded(*[(1, 1.0)] * PLAIN_PASSES, *[(33, 4.0)] * measured)
        for passes in range(10**4):
            if seconds_of(costs, 33) < 2:
                return passes
            costs.record(1, 1.0)
        raise AssertionError("never doubted")

    assert seconds_of(recorded(*[(33, 4.0)] * 2), 33) == 4
    assert passes_until_doubted(2) == DOUBTED * 2**2 + 1
    assert passes_until_doubted(5) == DOUBTED * 5**2 + 1
    assert passes_until_doubted(SURE) == passes_until_doubted(SURE + 30) == DOUBTED * SURE**2 + 1


def test_a_doubted_cost_is_what_the_next_pass_says_it_is():
    """Both first passes were disturbed: one that is not is enough to find that out."""
    costs = recorded(*[(1, 1.0)] * PLAIN_PASSES, *[(33, 4.0)] * 2, *[(1, 1.0)] * 200)
    costs.record(33, 1.25)
    assert seconds_of(costs, 33) == 1.25
    costs = recorded(*[(1, 1.0)] * PLAIN_PASSES, *[(33, 4.0)] * 2, *[(1, 1.0)] * 200)
    costs.record(33, 4.0)
    assert seconds_of(costs, 33) == 4
    for _ in range(DOUBTED * 3**2):  # measured three times now, doubted half as soon
        assert seconds_of(costs, 33) >= 2
        costs.record(1, 1.0)


def test_the_next_number_tried_is_not_far_past_what_is_known():
    costs = PassCosts()
    tried = []
    while costs.passes[-1] == 0:
        tried.append(costs.most_tokens)
        costs.record(costs.most_tokens, 1.0)
    reached = [*PASS_TOKENS[REACH::REACH], PASS_TOKENS[-1]]
    assert tried[:PLAIN_PASSES] == [1] * PLAIN_PASSES
    assert tried[PLAIN_PASSES:] == [tokens for tokens in reached for _ in range(2)][:-1]


# --- AutoBudget


class MadeUp(PassCosts):
    """Costs by a formula; enough plain passes have been."""

    def __init__(self, formula):
        super().__init__()
        self.formula = formula
        self.passes = [PLAIN_PASSES] * len(PASS_TOKENS)
        self._largest_known = len(PASS_TOKENS) - 1

    def record(self, tokens, seconds):
        pass

    def seconds(self):
        return np.maximum.accumulate([self.formula(tokens) for tokens in PASS_TOKENS])


class Copier(Drafter):
    def draft(self, budget):
        return DraftTree.empty()


class OneRow:
    """A budget for one text."""

    def __init__(self, costs: PassCosts):
        self.budget = AutoBudget(lambda rows: costs)
        self.drafter = Copier()

    @property
    def most(self) -> int:
        return self.budget.most

    def trim(self, draft: DraftTree, drafting_seconds: float = 0.0) -> DraftTree:
        [kept] = self.budget.trim([self.drafter], [draft], drafting_seconds)
        return kept

    def record(self, draft: DraftTree, tokens, seconds: float) -> None:
        self.budget.record([tokens], 1 + len(draft), seconds)


def budget_at(formula) -> OneRow:
    return OneRow(MadeUp(formula))


def same(tokens: int) -> float:
    return 1.0


def each(tokens: int) -> float:
    return float(tokens)


@st.composite
def draft_trees(draw, most: int, least_share: float = 0.0):
    size = draw(st.integers(0, most))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    probs = []
    for parent in parents:
        share = draw(st.floats(least_share, 1.0, width=32))
        probs.append(np.float32(share * (probs[parent] if parent >= 0 else 1.0)))
    return DraftTree(
        np.arange(size, dtype=np.int64),  # all different, so that a node is known by its token
        np.array(parents, np.int32),
        np.array(probs, np.float32),
    )


@settings(deadline=None)
@given(draft_trees(most=MOST_NODES))
def test_no_node_is_kept_where_each_costs_as_much_as_a_token(tree):
    assert len(budget_at(each).trim(tree)) == 0


@settings(deadline=None)
@given(draft_trees(most=MOST_NODES, least_share=0.5))
def test_all_nodes_are_kept_where_passes_cost_nothing_more(tree):
    budget = budget_at(same)
    # Of a tree that promises hardly anything none is worth the trouble.
    promised = budget.drafter.calibration.calibrated(tree).probs.sum(dtype=float)
    assume(abs(1 + promised - MARGIN) > 1e-6)
    assert len(budget.trim(tree)) == (len(tree) if 1 + promised > MARGIN else 0)


@settings(deadline=None, max_examples=150)
@given(draft_trees(most=7), st.lists(st.floats(0, 1), min_size=7, max_size=7))
def test_the_nodes_kept_are_the_best_of_all_that_could_be(tree, more):
    prices = dict(zip(PASS_TOKENS, np.cumsum([1.0, *more]), strict=True))
    budget = budget_at(prices.__getitem__)
    kept = budget.trim(tree)
    kept.checked(vocab_size=100)
    positions = kept.tokens.tolist()
    # With each node its ancestors, at the places that they had.
    assert [positions.index(p) if p >= 0 else -1 for p in tree.parents[positions].tolist()] == (
        kept.parents.tolist()
    )
    assert kept.probs.tolist() == tree.probs[positions].tolist()

    believed = budget.drafter.calibration.calibrated(tree).probs

    def speed(nodes) -> float:
        cost = np.interp(1 + len(nodes), PASS_TOKENS, [prices[t] for t in PASS_TOKENS])
        return (1 + believed[list(nodes)].sum(dtype=float)) / cost * (1 if nodes else MARGIN)

    every = range(len(tree))
    sizes = {0, len(tree), *(tokens - 1 for tokens in PASS_TOKENS if tokens <= len(tree))}
    closed = (
        nodes
        for nodes in chain.from_iterable(combinations(every, size) for size in sizes)
        if all(tree.parents[node] in (-1, *nodes) for node in nodes)
    )
    assert speed(positions) == pytest.approx(max(map(speed, closed)), rel=1e-5)


def test_a_draft_that_pays_as_a_whole_stays_the_same_object():
    tree = DraftTree.chain([4, 5], [0.9, 0.8])
    assert budget_at(same).trim(tree) is tree


def test_nothing_is_verified_before_plain_passes_have_been_measured():
    budget = OneRow(PassCosts())
    tree = DraftTree.chain([4, 5, 6])
    for _ in range(PLAIN_PASSES):
        assert len(budget.trim(tree)) == 0
        budget.record(DraftTree.empty(), np.array([4]), 1.0)
    assert len(budget.trim(tree)) == 3  # as far as is known it costs nothing


def test_what_is_not_verified_is_learned_from_all_the_same():
    budget = budget_at(lambda tokens: 1.0 if tokens == 1 else 1.5)
    tree = DraftTree.chain([4], [0.2])
    for _ in range(30):
        if len(budget.trim(tree)):
            return
        budget.record(DraftTree.empty(), np.array([4]), 1.0)
    raise AssertionError("a node that is always right was never verified")


@pytest.mark.parametrize("drafted", [True, False])
def test_after_drafts_that_do_not_pay_it_rests_and_wakes_up_when_one_does(drafted):
    costs = recorded(*[(1, 1.0)] * PLAIN_PASSES)
    budget = OneRow(costs)
    tree = DraftTree.chain([4, 5], [0.9, 0.8])
    wrong = DraftTree.chain([8], [0.01]) if drafted else DraftTree.empty()
    drafting_seconds = 10 * DRAFTING_SHARE  # which ten passes make up for

    def step(draft: DraftTree) -> bool:
        most = budget.most
        kept = budget.trim(draft if most else DraftTree.empty(), drafting_seconds)
        budget.record(kept, np.array([4, 5, 6])[: 1 + len(kept)], 1.0)
        return most > 0

    awake = [number for number in range(PATIENCE + 35) if step(wrong)]
    assert awake == [*range(PATIENCE), *range(PATIENCE + 9, PATIENCE + 35, 10)]
    while not step(tree):
        pass
    assert all(step(tree) for _ in range(PATIENCE))


@settings(deadline=None)
@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_it_never_rests_for_long(drafting_seconds, pass_seconds):
    rest = Rest()
    for _ in range(PATIENCE):
        assert rest.over
        rest.record_drafts(paid=False, seconds=drafting_seconds)
    for passes in range(LONGEST_REST):
        assert rest.over == (passes * DRAFTING_SHARE * pass_seconds >= drafting_seconds)
        rest.record_pass(pass_seconds)
    assert rest.over


def seconds_a_token(nodes: int, cost, share: float, right: float, tokens: int = 800) -> float:
    """The mean of a call in which each node is right with a chance, and promises another."""
    random = np.random.default_rng(0)
    budget = OneRow(PassCosts())
    tree = DraftTree.chain(range(nodes), np.cumprod([share] * nodes))
    seconds, count = 0.0, 0
    while count < tokens:
        draft = budget.trim(tree if budget.most else DraftTree.empty())
        accepted = int(np.argmin([*(random.random(len(draft)) < right), False]))
        emitted = [*range(accepted), nodes]
        seconds += cost(1 + len(draft))
        budget.record(draft, np.array(emitted), cost(1 + len(draft)))
        count += len(emitted)
    return seconds / count


@pytest.mark.parametrize("nodes", [1, 3, 8, 10, 40, 64])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_drafts_that_are_always_wrong_cost_next_to_nothing(nodes, share):
    """As float32 on a CPU: two tokens cost twice as much as one."""
    wrong = seconds_a_token(nodes, lambda t: 1.0 if t == 1 else 2.0, share, right=0.0)
    assert wrong < 1.2


@pytest.mark.parametrize("nodes", [2, 3, 10, 64])
def test_drafts_that_are_mostly_right_make_it_faster(nodes):
    cost = {t: 1 + 0.03 * t for t in range(1, 66)}.__getitem__
    seconds = seconds_a_token(nodes, cost, share=0.5, right=0.8)
    expected = sum(0.8**depth for depth in range(min(nodes, 8) + 1))
    assert seconds < 1.25 * cost(1 + min(nodes, 8)) / expected


def test_all_rows_get_the_number_that_pays_for_all_together():
    """One row alone would verify its draft; beside three that draft nothing it does not pay."""
    tree = DraftTree.chain([4, 5], [0.9, 0.8])
    costs = MadeUp(lambda tokens: 1 + 0.5 * (tokens > 1))
    budget = AutoBudget(lambda rows: costs)
    drafters = [Copier() for _ in range(4)]
    assert len(budget.trim(drafters[:1], [tree])[0]) == 2
    nothing = DraftTree.empty()
    assert not any(map(len, budget.trim(drafters, [tree, nothing, nothing, nothing])))
    long = DraftTree.chain(range(8), [0.9] * 8)
    assert list(map(len, budget.trim(drafters, [long, tree, nothing, tree]))) == [8, 2, 0, 2]


def test_each_row_learns_from_its_own_text():
    budget = AutoBudget(lambda rows: PassCosts())
    drafters = [Copier() for _ in range(3)]
    tree = DraftTree.chain([4], [0.5])
    for _ in range(20):
        budget.trim(drafters, [tree] * 3)
        budget.record([np.array([4]), np.array([9]), None], 1, 1.0)
    right, wrong, unknown = (d.calibration.calibrated(tree).probs[0] for d in drafters)
    assert wrong < 0.02 < unknown == 0.5 ** (1 + DOUBT) < 0.8 < right


def test_costs_are_kept_for_each_number_of_rows():
    model = torch.nn.Linear(1, 1)
    budget = make_budget("auto", Copier(), model, "tree")
    for rows in (3, 3, 2):
        budget.trim([Copier() for _ in range(rows)], [DraftTree.empty()] * rows)
        budget.record([np.array([4])] * rows, 1, 1.0)
    passes = [pass_costs(model, "tree", rows).passes[0] for rows in range(1, 5)]
    assert passes == [0, 1, 2, 0]


# --- make_budget


def test_a_number_is_kept_to_as_it_is():
    tree = DraftTree.chain([4] * 20, [0.01] * 20)
    theirs = CandidateChain(PromptLookupCandidateGenerator())
    for drafter in (Copier(), theirs):
        for nodes in (0, 1, 20):
            budget = make_budget(nodes, drafter, torch.nn.Linear(1, 1), "tree")
            assert type(budget) is Budget
            assert budget.most == nodes
            [kept] = budget.trim([drafter], [tree])
            assert kept is tree
            budget.record([np.array([1])], 1 + len(tree), 1.0)
            assert budget.most == nodes


def test_auto_decides_by_the_models_costs_and_the_drafters_calibration():
    model, drafter = torch.nn.Linear(1, 1), Copier()
    budget = make_budget("auto", drafter, model, "tree")
    assert isinstance(budget, AutoBudget)
    assert budget.most == MOST_NODES
    budget.trim([drafter], [DraftTree.chain([4], [0.5])])
    budget.record([np.array([4])], 1, 0.25)
    assert pass_costs(model, "tree").passes[0] == 1
    [prob] = drafter.calibration.calibrated(DraftTree.chain([4], [0.5])).probs
    assert prob > 0.5 ** (1 + DOUBT)


def test_auto_leaves_a_candidate_generator_its_own_length():
    drafter = CandidateChain(PromptLookupCandidateGenerator())
    budget = make_budget("auto", drafter, torch.nn.Linear(1, 1), "chain")
    tree = DraftTree.chain([4] * 500, [0.0] * 500)
    assert budget.most >= 10**6
    assert budget.trim([drafter], [tree])[0] is tree


# --- costs by model


def test_costs_are_kept_for_each_model_type_device_and_way_of_verifying(monkeypatch):
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    costs = pass_costs(model, "tree")
    assert pass_costs(model, "tree") is costs
    known = [costs, pass_costs(other, "tree"), pass_costs(model, "chain")]
    known.append(pass_costs(model.to(torch.bfloat16), "tree"))
    known.append(pass_costs(model.to("meta"), "tree"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    known.append(pass_costs(other, "tree"))
    assert len(set(map(id, known))) == len(known)


def test_costs_are_freed_with_their_model():
    model = torch.nn.Linear(1, 1)
    costs = weakref.ref(pass_costs(model, "tree"))
    gc.collect()
    assert costs() is not None
    del model
    gc.collect()
    assert costs() is None


# --- generate


@pytest.fixture
def fresh_llama(llama):
    """The same model without measurements."""
    model = LlamaForCausalLM(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    return model


class Clock:
    """In place of the time: a forward pass takes as long as a formula says, all else nothing."""

    def __init__(self, model, formula):
        self.now = 0.0
        self.formula = formula
        model.register_forward_pre_hook(self.tick, with_kwargs=True)

    def tick(self, model, args, kwargs):
        ids = args[0] if args else kwargs["input_ids"]
        self.now += self.formula(ids.shape[1])

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
def test_ids_are_those_of_plain_decoding_whatever_the_times(
    fresh_llama, monkeypatch, do_sample, accuracy
):
    options = {"do_sample": do_sample, **OPTIONS}
    random = np.random.default_rng(0)
    clock = Clock(fresh_llama, lambda tokens: random.exponential(1.0 + 0.1 * tokens))
    monkeypatch.setattr(decoding, "perf_counter", clock)
    drafted = 0
    for seed in range(4):
        torch.manual_seed(seed)
        plain = fresh_llama.generate(PROMPT, **options)
        state = torch.get_rng_state()
        drafter = Prophet(plain, accuracy, seed=seed)
        torch.manual_seed(seed)
        ids = fresh_llama.generate(
            PROMPT, candidate_generator=drafter, max_draft_tokens="auto", **options
        )
        assert ids.tolist() == plain.tolist()
        assert torch.equal(torch.get_rng_state(), state)
        drafted += drafter.stats.drafted
    assert drafted > 0 or accuracy == 0


def stats_of(model, monkeypatch, formula, accuracy: float):
    """Of the second of two calls; in the first the costs become known."""
    monkeypatch.setattr(decoding, "perf_counter", Clock(model, formula))
    plain = model.generate(PROMPT, do_sample=False, **OPTIONS)
    for _ in range(2):
        drafter = Prophet(plain, accuracy, branches=0)
        ids = model.generate(PROMPT, do_sample=False, candidate_generator=drafter, **OPTIONS)
        assert ids.tolist() == plain.tolist()
    return drafter.stats


def test_by_default_drafts_are_verified_where_that_is_cheap(fresh_llama, monkeypatch):
    stats = stats_of(fresh_llama, monkeypatch, lambda tokens: 1.0 + 0.01 * tokens, accuracy=1.0)
    assert stats.mat > 4


def test_by_default_a_call_is_not_slower_where_drafts_are_dear(fresh_llama, monkeypatch):
    def dear(tokens: int) -> float:
        return 1.0 if tokens == 1 else 2.0

    stats = stats_of(fresh_llama, monkeypatch, dear, accuracy=0.2)
    assert stats.verifying_seconds <= 1.1 * (stats.tokens - 1)  # the first is the prefill's


def test_the_first_call_of_a_model_begins_with_plain_passes(fresh_llama, monkeypatch):
    sizes = []
    plain = fresh_llama.generate(PROMPT, do_sample=False, **OPTIONS)
    drafter = Prophet(plain, 1.0, branches=0)
    options = {"do_sample": False, "candidate_generator": drafter, **OPTIONS}
    monkeypatch.setattr(decoding, "perf_counter", Clock(fresh_llama, same))
    record = PassCosts.record

    def recorded(self, tokens, seconds):
        sizes.append(tokens)
        record(self, tokens, seconds)

    monkeypatch.setattr(PassCosts, "record", recorded)
    fresh_llama.generate(PROMPT, **options)
    assert sizes[:PLAIN_PASSES] == [1] * PLAIN_PASSES
    assert min(sizes[PLAIN_PASSES : PLAIN_PASSES + 2]) > 1
    sizes.clear()
    fresh_llama.generate(PROMPT, **options)
    assert sizes[0] > 1  # what a pass costs is still known


def test_a_candidate_generators_draft_is_not_cut_by_default(fresh_llama, monkeypatch):
    lengths = []

    class Theirs(PromptLookupCandidateGenerator):
        def get_candidates(self, input_ids):
            ids = plain[:, : input_ids.shape[1] + 6]
            lengths.append(ids.shape[1] - input_ids.shape[1])
            return ids, None

    plain = fresh_llama.generate(PROMPT, do_sample=False, **OPTIONS)
    monkeypatch.setattr(decoding, "perf_counter", Clock(fresh_llama, each))
    ids = fresh_llama.generate(PROMPT, do_sample=False, candidate_generator=Theirs(), **OPTIONS)
    assert ids.tolist() == plain.tolist()
    assert lengths == [6, 6, 6, 6, 3]  # 32 tokens: the prefill's, 4 * (6 + 1) and the last 3
