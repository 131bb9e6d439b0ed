"""Token recycling: lossless, learning from every verified node, and never mistaken about whose."""

import copy
import resource
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import hf_refspec as rs
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.contract import Call, Observation, Sampling
from hf_refspec.drafting.token_recycling import TokenRecycling
from hf_refspec.drafting.tree import DraftTree
from tests.helpers.calls import Call as PlainCall

PROMPT = np.array([5, 6, 7])
VOCAB_SIZE = 40


def observed(tokens, drafted=(), expected=()) -> Observation:
    """A verified chain; after its root and each node the target expected one sure token."""
    rows = np.array([[token, *range(7)] for token in expected], np.int32)
    probs = np.array([[0.9, *[0.01] * 7] for _ in expected], np.float32)
    verified = drafted if isinstance(drafted, DraftTree) else DraftTree.chain(drafted)
    top = (rows, probs) if len(rows) else ()
    return Observation(np.array(tokens), verified, None, *top)


def taught(**options) -> TokenRecycling:
    """A drafter that knows: 7 -> 8 -> 9 -> 10."""
    drafter = TokenRecycling(**options)
    with drafter_call(drafter, [PROMPT], VOCAB_SIZE):
        drafter.observe(observed([8, 9, 10], [8, 9], [8, 9, 10]))
    return drafter


def drafted_under(sampling: Sampling | None) -> DraftTree:
    drafter = taught()
    with drafter_call(drafter, [PROMPT], VOCAB_SIZE):
        return drafter.draft(30, Call(sampling))


def test_estimates_follow_what_is_sampled():
    """The more there is to choose from, the less sure are they of any token."""
    choices = [
        None,
        Sampling(temperature=0.1),
        Sampling(temperature=0.7, top_p=0.5),
        Sampling(temperature=0.7),
        Sampling(temperature=1.0),
        Sampling(temperature=2.0),
    ]
    best = [drafted_under(sampling).probs[0] for sampling in choices]
    assert best == sorted(best, reverse=True) and len(set(best)) == len(best)


@pytest.mark.parametrize("sampling", [Sampling(top_k=1), Sampling(top_p=0.0), Sampling(1e-5)])
def test_where_nothing_is_left_to_choose_estimates_are_the_greedy_ones(sampling):
    greedy, other = drafted_under(None), drafted_under(sampling)
    assert other.tokens.tolist() == greedy.tokens.tolist()
    assert other.probs == pytest.approx(greedy.probs, rel=1e-4)


def test_a_call_tells_every_source_how_it_samples(llama):
    class Told(rs.Drafter):
        def draft(self, budget, call):
            sampled_as.append(call.sampling)
            return DraftTree.empty()

    call = PlainCall(llama, 2)
    sampling = {"do_sample": True, "temperature": 0.5, "top_k": 0, "top_p": 0.9}
    for options, expected in ((sampling, Sampling(0.5, 0, 0.9)), ({}, None)):
        sampled_as = []
        llama.generate(**{**call.options, **options}, candidate_generator=Told() | Told())
        assert sampled_as and set(sampled_as) == {expected}


def test_a_rejected_node_teaches_what_comes_after_it():
    drafter = TokenRecycling()
    with drafter_call(drafter, [PROMPT], VOCAB_SIZE):
        drafter.observe(observed([8], [20], [8, 21]))
        drafter.observe(observed([20]))
        assert drafter.draft(4, Call()).tokens[0] == 21


def test_forks_share_the_table_and_copies_do_not():
    drafter = taught()
    fork, known = drafter.fork(), len(drafter)
    twin = copy.deepcopy(drafter)
    with drafter_call(fork, [np.array([1, 2])], VOCAB_SIZE):
        fork.observe(observed([3], (), [3]))
    assert len(drafter) == len(fork) == known + 2
    assert len(twin) == known
    with drafter_call(twin, [PROMPT], VOCAB_SIZE):
        assert twin.draft(1, Call()).tokens.tolist() == [8]


def test_threads_may_learn_into_one_table():
    drafter = TokenRecycling(max_contexts=50)

    def work(seed: int) -> None:
        random, fork = np.random.default_rng(seed), drafter.fork()
        with drafter_call(fork, [PROMPT], VOCAB_SIZE):
            for _ in range(200):
                tree = fork.draft(16, Call()).checked(VOCAB_SIZE)
                expected = random.integers(0, 40, len(tree) + 1)
                fork.observe(observed(random.integers(0, 40, 1), tree, expected))

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(work, range(4))] == [None] * 4
    assert 50 * 7 // 8 <= len(drafter) <= 50  # a full table gives up an eighth


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TokenRecycling(top_k=0), ValueError, "top_k must be at least 1"),
        (lambda: TokenRecycling(top_k=257), ValueError, "top_k must be at most 256"),
        (lambda: TokenRecycling(top_k=2.5), TypeError, "top_k must be an int"),
        (lambda: TokenRecycling(context=4), ValueError, "context must be at most 3"),
        (lambda: TokenRecycling(max_contexts=0), ValueError, "max_contexts must be at least 1"),
        (lambda: TokenRecycling(max_contexts=1 << 25), ValueError, "max_contexts must be at most"),
        (lambda: TokenRecycling().begin(PROMPT, 5), ValueError, "top_k is 8, .* has only 5"),
        (lambda: taught().begin(PROMPT, 50), ValueError, "of 40 tokens, .* model's has 50"),
    ],
)
def test_bad_arguments_and_vocabularies_are_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_nodes_that_are_allowed_and_not_drafted_take_no_memory():
    """40 proposals a node, 1.2 GB for all that are allowed."""
    drafter = taught()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with drafter_call(drafter, [PROMPT], VOCAB_SIZE):
        assert 0 < len(drafter.draft(1 << 20, Call())) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 17  # KiB
