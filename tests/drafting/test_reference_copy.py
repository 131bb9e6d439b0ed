"""What `ReferenceCopy` drafts from which text, and which arguments it refuses."""

import pytest

from hf_refspec.drafting.reference_copy import ReferenceCopy
from tests.helpers.drafters import drafted as draft

# --- what is copied


@pytest.mark.parametrize(
    ("references", "prompt", "output"),
    [
        (None, [5, 6, 7, 8, 1, 5, 6], []),
        (None, [1], [5, 6, 7, 8, 5, 6]),
        ([[6, 7, 8], [9, 9]], [1, 6], []),
    ],
    ids=["prompt", "output", "references"],
)
def test_it_copies_from(references, prompt, output):
    tree = draft(ReferenceCopy(references), prompt, output, budget=2)
    assert tree.tokens.tolist() == [7, 8]


def test_copies_from_references_alone_without_the_prompt():
    drafter = ReferenceCopy([[5, 6]], include_prompt=False)
    assert draft(drafter, [5, 7, 1, 5], output=[8, 5]).tokens.tolist() == [6]


def test_a_draft_does_not_run_from_one_reference_into_the_next_or_the_prompt():
    assert draft(ReferenceCopy([[5, 6], [6]]), [1, 5]).tokens.tolist() == [6]
    assert draft(ReferenceCopy([[5, 6], [7]], published=True), [1], [5]).tokens.tolist() == [6]


@pytest.mark.parametrize(("match_length", "expected"), [(1, [7]), (2, [7]), (3, [])])
def test_match_length_is_the_shortest_suffix_that_drafts(match_length, expected):
    tree = draft(ReferenceCopy(match_length=match_length), [5, 6, 7, 1, 5, 6], budget=1)
    assert tree.tokens.tolist() == expected


@pytest.mark.parametrize(("options", "length"), [({"copy_length": 3}, 3), ({}, 8)])
def test_copy_length_is_the_longest_path(options, length):
    assert draft(ReferenceCopy(**options), [*range(1, 20), 1]).depths().max() == length


# --- LLMA


SPANS = [[3, 4, 7, 7], [2, 3, 4, 5, 6, 8], [2, 3, 4, 9]]
FIVE = [[2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8]]


@pytest.mark.parametrize(
    ("references", "prompt", "output", "expected"),
    [
        (SPANS, [1], [2, 3, 4], [5, 6]),  # behind the first of the longest matches
        (FIVE, [9], [1, 2, 3, 4, 5, 6], [7]),  # at most five tokens match
        (None, [5, 6, 1], [5], [6, 1]),
        ([[9, 9]], [5, 6, 1], [5], []),  # the prompt only without references
        (None, [1], [5, 6, 5], []),  # never the output
        (None, [5, 6, 1, 5], [], []),  # nor is the prompt's end matched
    ],
)
def test_llma_copies_the_span_after_the_first_longest_match(references, prompt, output, expected):
    tree = draft(ReferenceCopy(references, copy_length=2, published=True), prompt, output)
    assert tree.is_chain and tree.tokens.tolist() == expected


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"match_length": 0}, ValueError, "match_length must be at least 1, but is 0"),
        ({"match_length": 129}, ValueError, "match_length must be at most 128, but is 129"),
        ({"copy_length": 0}, ValueError, "copy_length must be at least 1, but is 0"),
        ({"include_prompt": False}, ValueError, "include_prompt=False leaves nothing"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        ReferenceCopy(**arguments)


def test_ids_outside_of_the_vocabulary_are_refused_at_the_call():
    with pytest.raises(ValueError, match=r"references has the id 100, .* vocabulary of 100"):
        draft(ReferenceCopy([[1, 100]]), [1], vocab_size=100)
