"""What `ReferenceCopy` drafts from which text, and which arguments it refuses."""

import numpy as np
import pytest
import torch

from hf_refspec.drafting.reference_copy import ReferenceCopy
from tests.helpers.drafters import drafted as draft


class WordLengths:
    """A tokenizer: each word is the id of its length."""

    def __call__(self, text, add_special_tokens=True, verbose=True):
        ids = [len(word) for word in text.split()]
        return {"input_ids": [0, *ids] if add_special_tokens else ids}


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


@pytest.mark.parametrize(("many", "name"), [(False, "references"), (True, "references[1]")])
def test_the_name_of_a_file_is_a_text_with_a_warning(tmp_path, caplog, many, name):
    file = tmp_path / "notes.md"
    file.write_text("a few notes", encoding="utf-8")
    ReferenceCopy(["a text", str(file)] if many else str(file), WordLengths())
    [message] = caplog.messages
    assert message.startswith(f"{name} is the name of a file") and "read_text()" in message


@pytest.mark.parametrize("name", ["docs/notes.md", "notes.txt", "C:\\\\notes.json"])
def test_the_name_of_a_file_that_does_not_exist_is_a_text_with_a_warning(caplog, name):
    ReferenceCopy(["a text.", "text", "3.14", name], WordLengths())
    [message] = caplog.messages
    assert message.startswith("references[3] looks like the name of a file, and drafts are copied")


@pytest.mark.parametrize(
    "references",
    [
        "a bb ccc",
        ["a bb ccc"],
        [1, 2, 3],
        [[1, 2, 3]],
        ((1, 2, 3),),
        torch.tensor([1, 2, 3]),
        [np.array([1, 2, 3], np.uint16)],
        ["a bb ccc", [4, 4], torch.tensor([5, 5])],
    ],
)
def test_references_may_be_strings_ids_tensors_or_a_mix(references):
    drafter = ReferenceCopy(references, WordLengths())
    assert draft(drafter, [1]).tokens.tolist() == [2, 3]


def test_match_length_is_the_shortest_suffix_that_drafts():
    for match_length, expected in [(1, [7]), (2, [7]), (3, [])]:
        tree = draft(ReferenceCopy(match_length=match_length), [5, 6, 7, 1, 5, 6], budget=1)
        assert tree.tokens.tolist() == expected


def test_copy_length_is_the_longest_path():
    prompt = [*range(1, 20), 1]
    assert draft(ReferenceCopy(copy_length=3), prompt).depths().max() == 3
    assert draft(ReferenceCopy(), prompt).depths().max() == 8


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
        ({"references": "text"}, ValueError, "references is a string: give .* tokenizer="),
        ({"references": [[1], "text"]}, ValueError, r"references\[1\] is a string: give"),
        ({"references": []}, ValueError, "references is empty"),
        ({"references": "", "tokenizer": WordLengths()}, ValueError, "references is empty"),
        ({"references": [[1], []]}, ValueError, r"references\[1\] is empty"),
        ({"references": torch.tensor([])}, ValueError, "references is empty"),
        ({"references": [[1, -2]]}, ValueError, r"references\[0\] has the id -2"),
        ({"references": [[1, 2**31]]}, ValueError, r"references\[0\] has the id 2147483648"),
        ({"references": torch.tensor([[1, 2]])}, ValueError, r"one dimension, .* \(1, 2\)"),
        ({"references": torch.tensor([1.0])}, TypeError, "references must hold integers"),
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
