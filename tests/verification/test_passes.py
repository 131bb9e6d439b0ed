"""A pass: which tokens run, at which positions, and what they see of each other."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from hf_refspec.drafting.tree import DraftTree
from hf_refspec.verification.passes import FixedTokens, Pass, uploaded
from hf_refspec.verification.verifier import TREE
from tests.helpers.calls import padded_prompts
from tests.helpers.passes import prefilled

BRANCHES = DraftTree([7, 8, 9], [-1, -1, 1], [1.0] * 3)


def text(*tokens: int) -> FixedTokens:
    return FixedTokens(torch.tensor([tokens]))


@pytest.fixture
def of_three() -> Pass:
    """A row with a tree, one with two pending tokens, and one that takes no part."""
    rows = [text(1, 2, 3), text(1, 2, 3, 4), text(5, 6)]
    return Pass(rows, [BRANCHES, DraftTree.empty(), None], cached=[2, 2, 1])


def test_pending_tokens_run_and_then_the_nodes_at_the_places_that_they_would_have(of_three):
    assert [tokens.tolist() for tokens in of_three.tokens] == [[3, 7, 8, 9], [3, 4], []]
    assert [places.tolist() for places in of_three.indices] == [[2, 3, 3, 4], [2, 3], []]
    assert all(array.dtype == np.int64 for array in [*of_three.tokens, *of_three.indices])
    assert (of_three.pending, of_three.sizes, of_three.size) == ([1, 2, 0], [4, 2, 0], 4)


def test_it_is_a_step_if_nothing_but_roots_and_nodes_runs(of_three):
    assert not of_three.is_step
    assert Pass([text(1, 2), text(3, 4)], [BRANCHES, None], cached=[1, 1]).is_step


def test_a_node_sees_pending_tokens_and_its_ancestors(of_three):
    tree, pending, nothing = (mask.astype(int).tolist() for mask in of_three.masks)
    assert tree == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    assert pending == [[1, 0], [1, 1]]
    assert nothing == []


def test_side_by_side_rows_are_filled_up_with_the_last_token_of_their_text(of_three):
    tokens, places = of_three.aligned(5)
    assert tokens.tolist() == [[3, 7, 8, 9, 3], [3, 4, 4, 4, 4], [5] * 5]
    assert places.tolist() == [[2, 3, 3, 4, 2], [2, 3, 3, 3, 3], [0] * 5]
    assert of_three.roots(5)[:2] == [0, 6]


def test_pending_tokens_and_paths_are_kept_and_nothing_of_a_row_that_takes_no_part(of_three):
    paths = [[1, 2], [], None]
    assert of_three.kept(paths) == [[0, 2, 3], [0, 1], []]
    assert of_three.cached_after(paths) == [5, 4, 1]


def test_only_logits_from_the_first_root_on_are_wanted():
    rows = [text(1, 2, 3, 4), text(1, 2, 3, 4, 5)]
    several = Pass(rows, [BRANCHES, DraftTree.empty()], cached=[1, 1])
    assert several.skipped == 2  # of tokens 1 to 3 and 1 to 4
    assert several.roots(4) == [0, 5]


def test_a_row_that_takes_no_part_runs_all_but_its_last_token():
    rows = [text(4, 5, 6), text(4, 5, 6, 7)]
    pass_ = Pass(rows, [None, DraftTree.empty()], cached=[1, 3])
    assert [tokens.tolist() for tokens in pass_.tokens] == [[5], [7]]
    pass_ = Pass(rows, [None, DraftTree.empty()], cached=[2, 3])
    assert [tokens.tolist() for tokens in pass_.tokens] == [[], [7]]
    tokens, indices = pass_.aligned(1)
    assert (tokens.tolist(), indices.tolist()) == ([[5], [7]], [[1], [3]])


def test_uploaded_arrays_are_the_same():
    arrays = {"a": np.arange(6).reshape(2, 3), None: np.array([[True], [False]]), 7: np.empty(0)}
    tensors = uploaded(arrays, torch.device("cpu"))
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


@torch.no_grad()
def test_a_position_counts_what_a_given_cache_holds_and_no_padding(llama):
    padded = padded_prompts(3)  # by 0, 5 and 2 tokens
    ids, mask = padded["input_ids"], padded["attention_mask"]
    verifier = prefilled(llama, TREE, ids, attention_mask=mask)
    assert [verifier.inputs.last_position(row, 20) for row in range(3)] == [19, 14, 17]
    cache = DynamicCache(config=llama.config)
    llama(torch.tensor([[5, 6, 7]]), past_key_values=cache)
    given = {"past_key_values": cache, "attention_mask": torch.ones((1, 5), dtype=torch.int64)}
    verifier = prefilled(llama, TREE, torch.tensor([[8, 9]]), **given)
    assert verifier.inputs.last_position(0, 4) == 3 + 3
