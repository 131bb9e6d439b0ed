"""How a `Blend` merges its sources' drafts, and what they receive."""

import numpy as np
import pytest
import torch

from hf_refspec import Blend, Drafter, DraftTree, ReferenceCopy
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.contract import Call, Observation
from tests.helpers.drafters import Fixed

VOCAB_SIZE = 10
PROMPT = np.array([1, 2, 3])


# --- drafts


def draft(blend: Drafter, budget: int) -> DraftTree:
    with drafter_call(blend, [PROMPT], VOCAB_SIZE):
        tree = blend.draft(budget, Call())
    tree.checked(VOCAB_SIZE)
    return tree


def test_the_most_probable_nodes_of_all_sources_are_kept():
    blend = Fixed.chain([4, 5, 6], [0.9, 0.8, 0.1]) | Fixed.chain([7, 8], [0.5, 0.3])
    tree = draft(blend, 4)
    assert tree.tokens.tolist() == [4, 5, 7, 8]
    assert tree.parents.tolist() == [-1, 0, -1, 2]
    assert tree.probs.tolist() == pytest.approx([0.9, 0.8, 0.5, 0.3])


def test_sources_without_a_draft_take_no_part():
    blend = Fixed() | Fixed.chain([4, 5], [0.9, 0.8]) | Fixed()
    assert draft(blend, 8).tokens.tolist() == [4, 5]
    assert len(draft(Fixed() | Fixed(), 8)) == 0
    assert len(draft(blend, 0)) == 0


@pytest.mark.parametrize("budget", [0, 1, 2, 5])
def test_a_chain_is_the_best_path_of_all_sources_chains(budget):
    surer = Fixed.chain([4, 7, 8], [0.9, 0.8, 0.7])
    blend = Fixed.chain([4, 5, 6], [0.5, 0.4, 0.3]) | surer | Fixed()
    with drafter_call(blend, [PROMPT], VOCAB_SIZE):
        drafted = blend.draft(budget, Call(chain=True))
    assert drafted.is_chain
    assert drafted.tokens.tolist() == [4, 7, 8][:budget]


class NoTree(Fixed):
    def draft(self, budget, call):
        return None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Fixed.chain([4, VOCAB_SIZE], None), "vocabulary of 10"),
        (Fixed(DraftTree(np.array([4]), [10**6], [1.0])), "parents must be -1"),
        (Fixed(DraftTree(np.array([4]), [], [1.0])), "parents has 0 entries for 1 tokens"),
        (NoTree(), "NoTree was asked for .* at most 8 nodes, but drafted None"),
    ],
    ids=["token", "parent", "length", "none"],
)
def test_an_illegal_draft_of_a_source_is_refused(source, message):
    blend = Fixed.chain([4], [0.5]) | source
    with drafter_call(blend, [PROMPT], VOCAB_SIZE), pytest.raises(ValueError, match=message):
        blend.draft(8, Call())


# --- making one


def test_or_is_a_list_and_blends_among_the_sources_are_taken_apart():
    a, b, c, d = Fixed(), Fixed(), Fixed(), Fixed()
    for blend in ((a | b) | (c | d), a | b | c | d, Blend([Blend([a]), Blend([b, Blend([c])]), d])):
        assert blend.sources == [a, b, c, d]


BLENDED = {
    "given": lambda other: Blend([Fixed(), other]),
    "on the right": lambda other: Fixed() | other,
    "on the left": lambda other: other | Fixed(),
}


@pytest.mark.parametrize("place", BLENDED)
@pytest.mark.parametrize(
    ("other", "hint"),
    [(None, ""), (5, ""), ("drafter", ""), ("Auto", "did you mean 'auto'?"), (ReferenceCopy, "")],
)
def test_what_does_not_draft_is_refused(place, other, hint):
    with pytest.raises(TypeError, match='a source of a blend must be "auto"') as refused:
        BLENDED[place](other)
    assert hint in str(refused.value)


def test_no_source_and_the_same_source_twice_are_refused():
    with pytest.raises(ValueError, match="drafters is empty; give at least one"):
        Blend([])
    source = Fixed()
    for make in (lambda: source | source, lambda: (source | Fixed()) | Blend([source])):
        with pytest.raises(ValueError, match="drafters has the same drafter twice"):
            make()


# --- calls


def test_all_sources_receive_all():
    a, b = Fixed(), Fixed()
    blend = a | b
    with drafter_call(blend, [PROMPT], VOCAB_SIZE):
        blend.draft(5, Call())
        verified, logits = DraftTree.chain([4, 9]), torch.zeros(3, VOCAB_SIZE)
        blend.observe(Observation(np.array([4, 5]), verified, logits))
    for source in (a, b):
        assert source.calls == [
            ("begin", [1, 2, 3], VOCAB_SIZE),
            ("observe", [4, 5], [4, 9]),  # the tree that was verified, not its own
            ("end",),
        ]


def test_all_sources_end_when_one_fails_to_begin():
    a, b = Fixed(), Fixed()
    b.fails_to_begin = True
    with pytest.raises(ValueError, match="the id 9"):
        draft(a | b, 5)
    assert a.calls[-1] == b.calls[-1] == ("end",)
    b.fails_to_begin = False
    draft(a | b, 5)  # they are free again


def test_a_source_is_in_use_by_one_call_and_the_others_stay_free():
    a, b, free = Fixed(), Fixed(), Fixed()
    message = "this Fixed is in use by another call; make one drafter per thread"
    with drafter_call(a | b, [PROMPT], VOCAB_SIZE):
        for drafter in (a, b, free | b):
            with pytest.raises(RuntimeError, match=message):
                draft(drafter, 5)
        draft(free, 5)
        assert ("end",) not in b.calls
    draft(free | b, 5)


def test_what_became_of_a_row_corrects_the_estimates_of_all():
    blend = Blend([ReferenceCopy()])
    tree = DraftTree.chain([4], [0.5])
    fork = blend.fork()
    for _ in range(20):
        fork.calibration.record(tree, np.array([9]))
    own, theirs = (
        each.calibration.calibrated(tree).probs[0] for each in (fork, Blend([ReferenceCopy()]))
    )
    assert own == blend.calibration.calibrated(tree).probs[0] < theirs
