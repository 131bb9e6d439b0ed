"""One row in order: the cache keeps the accepted tokens of a chain, however it drops the others."""

import pytest
import torch

from hf_refspec.drafting.tree import DraftTree
from hf_refspec.verification.passes import FixedTokens
from hf_refspec.verification.verifier import CHAIN, RECURRENT
from tests.helpers.architectures import WINDOW
from tests.helpers.passes import prefilled

LENGTH = 9
DRAFT = DraftTree.chain([3, 4, 5])


def text(length: int) -> FixedTokens:
    return FixedTokens(torch.arange(5, 5 + length)[None])


@pytest.mark.parametrize("path", [[], [0, 1], [0, 1, 2]])
@torch.no_grad()
def test_rejected_tokens_are_cropped_from_the_end(llama, path):
    verifier = prefilled(llama, CHAIN, text(LENGTH).ids)
    verifier.forward([text(LENGTH + 1)], [DRAFT])
    verifier.keep([path])
    assert verifier.cached == [LENGTH + 1 + len(path)]
    assert verifier.entries.cache.get_seq_length() == LENGTH + 1 + len(path)


@torch.no_grad()
def test_a_window_holds_rejected_tokens_during_a_pass_and_its_own_size_after_it(models_by_type):
    verifier = prefilled(models_by_type("mistral"), CHAIN, text(2 * WINDOW).ids)
    [layer, *_] = verifier.entries.cache.layers
    verifier.forward([text(2 * WINDOW + 1)], [DRAFT])
    verifier.keep([[0]])
    assert layer.keys.shape[2] == WINDOW - 1
    assert layer.get_seq_length() == 2 * WINDOW + 2
    verifier.entries.close(verifier.cached)
    assert not layer.record_past


@torch.no_grad()
def test_accepted_tokens_of_a_running_state_run_again_with_the_next_draft(models_by_type):
    verifier = prefilled(models_by_type("mamba2"), RECURRENT, text(LENGTH).ids)
    verifier.forward([text(LENGTH + 1)], [DRAFT])
    verifier.keep([[0]])
    assert verifier.cached == [LENGTH]
    again = verifier.forward([text(LENGTH + 3)], [DRAFT])
    assert (again.pass_tokens, again.is_step) == (3 + 3, True)
    verifier.keep([[0, 1, 2]])  # all of it: nothing has to run again
    assert verifier.cached == [LENGTH + 6]
