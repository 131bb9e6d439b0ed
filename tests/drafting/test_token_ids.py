"""References as strings and ids of any form."""

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
        *("a bb ccc", ["a bb ccc"], [1, 2, 3], [[1, 2, 3]], ((1, 2, 3),)),
        *(torch.tensor([1, 2, 3]), [np.array([1, 2, 3], np.uint16)]),
        ["a bb ccc", [4, 4], torch.tensor([5, 5])],
    ],
)
def test_references_may_be_strings_ids_tensors_or_a_mix(references):
    drafter = ReferenceCopy(references, WordLengths())
    assert draft(drafter, [1]).tokens.tolist() == [2, 3]


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
    ],
)
def test_bad_references_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        ReferenceCopy(**arguments)
