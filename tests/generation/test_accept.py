"""What rows take of a pass, by logits that are made up."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

from hf_refspec import Drafter, DraftTree
from hf_refspec.generation.accept import Accepted, accept
from hf_refspec.generation.plan import DraftLimits
from hf_refspec.generation.row import ColumnNoise, Row
from hf_refspec.kernels.compilation import drafting_kernels
from hf_refspec.verification import verifier
from hf_refspec.verification.passes import PassResult
from tests.helpers.architectures import small
from tests.helpers.calls import PROMPT, prepared
from tests.helpers.pass_times import time_is

VOCAB_SIZE = 8
#   root -> 1 -> 2 -> 3
#        -> 4 -> 5
TREE = DraftTree([1, 4, 2, 5, 3], [-1, -1, 0, 1, 2], [1.0] * 5)
NONE = DraftTree.empty()
MODEL = small("llama")
LIMITS = DraftLimits(verifier.Verifier(verifier.TREE, MODEL, *prepared(MODEL, PROMPT)))


def row_of(end: int | None = None, processors=(), noise=None, **config) -> Row:
    criteria = [] if end is None else [EosTokenCriteria(end)]
    return Row(
        torch.tensor([[7, 7, 7]]),
        LogitsProcessorList(processors),
        StoppingCriteriaList(criteria),
        GenerationConfig(**config),
        noise=noise,
    )


def choices_of(*tokens: int) -> torch.Tensor:
    """Logits by which the target chooses these tokens."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB_SIZE).float()


def accepted(rows, drafts, logits, began: float = 0.0) -> Accepted:
    """Of a pass that has these logits after each row and its nodes, one row after another."""
    sizes = [0 if draft is None else 1 + len(draft) for draft in drafts]
    roots = [sum(sizes[:i]) for i in range(len(sizes))]
    result = PassResult(logits, roots, sum(sizes), began=began)
    return accept(rows, drafts, result, LIMITS)


def of_one(row: Row, *chosen: int) -> tuple[list[int] | None, list[int]]:
    [taken] = accepted([row], [TREE], choices_of(*chosen)).rows
    return taken.path, taken.tokens.tolist()


@pytest.mark.parametrize(
    ("chosen", "path", "tokens"),
    [
        ((6, 2, 5, 3, 0, 0), [], [6]),
        ((1, 2, 5, 3, 0, 7), [0, 2, 4], [1, 2, 3, 7]),
        ((1, 5, 5, 3, 0, 7), [0], [1, 5]),  # 5 follows another node
        ((4, 2, 5, 3, 6, 7), [1, 3], [4, 5, 6]),
    ],
)
def test_a_row_takes_the_path_that_the_target_chooses_and_one_token_more(chosen, path, tokens):
    row = row_of()
    assert of_one(row, *chosen) == (path, tokens)
    assert row.output == tokens


def test_a_text_ends_inside_its_draft_and_the_last_token_is_not_of_the_path():
    row = row_of(end=2)
    assert of_one(row, 1, 2, 5, 3, 0, 7) == ([0], [1, 2])
    assert row.stopped_at == 5


def test_a_row_without_a_draft_takes_no_part():
    rows = [row_of() for _ in range(3)]
    taken = accepted(rows, [NONE, None, TREE], choices_of(6, 4, 2, 5, 3, 6, 7))
    assert [each.path for each in taken.rows] == [[], None, [1, 3]]
    assert [each.tokens.tolist() for each in taken.rows] == [[6], [], [4, 5, 6]]
    assert [each.verified for each in taken.rows] == [0, 0, 5]
    assert [row.output for row in rows] == [[6], [], [4, 5, 6]]


class Observing(Drafter):
    observed_top_k = 2


@pytest.mark.parametrize("is_ready", [True, False])
def test_the_best_next_tokens_are_there_if_a_drafter_asks_for_them(is_ready, monkeypatch):
    drafting_kernels.compile()
    monkeypatch.setattr(drafting_kernels, "compiled", is_ready)  # else they are loaded afterwards
    row, logits = row_of(), choices_of(1, 2, 5, 3, 0, 7) + torch.arange(VOCAB_SIZE) / 100
    assert accepted([row], [TREE], logits).top is None
    row.drafter = Observing()
    top = accepted([row], [TREE], logits).top
    assert top.tokens[0].tolist() == [[1, 7], [2, 7], [5, 7], [3, 7], [0, 7], [7, 6]]


def test_after_the_first_tokens_the_kernels_are_loaded_whatever_drafters_ask_for(monkeypatch):
    drafting_kernels.compile()
    monkeypatch.setattr(drafting_kernels, "compiled", False)
    accepted([row_of()], [NONE], choices_of(6))
    assert drafting_kernels.compiled


def test_its_time_goes_from_the_beginning_of_the_pass_until_the_tokens_are_known():
    with time_is(lambda: 7.0):
        taken = accepted([row_of()], [TREE], choices_of(1, 2, 5, 3, 0, 7), began=4.0)
    assert taken.seconds == 3.0


DRAFTS = st.lists(st.sampled_from([TREE, NONE, None]), min_size=1, max_size=4)


@given(DRAFTS, st.booleans(), st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 99))
def test_rows_take_together_what_each_takes_alone(drafts, do_sample, processed, seed):
    """Greedy or sampled, with one processor object or one for each row."""
    logits = 3 * torch.randn((24, VOCAB_SIZE), generator=torch.Generator().manual_seed(seed))
    shared = TemperatureLogitsWarper(0.7)

    def rows() -> list[Row]:
        torch.manual_seed(seed)
        noise = ColumnNoise(len(drafts), torch.device("cpu"))
        found = []
        for i, own in enumerate(processed[: len(drafts)]):
            processor = TemperatureLogitsWarper(0.5) if own else shared
            found.append(
                row_of(
                    processors=[processor] if do_sample else [],
                    noise=partial(noise.of, i),
                    do_sample=do_sample,
                )
            )
        return found

    together = accepted(rows(), drafts, logits).rows
    begin = 0
    for row, draft, taken in zip(rows(), drafts, together, strict=True):
        end = begin + (0 if draft is None else 1 + len(draft))
        [alone] = accepted([row], [draft], logits[begin:end]).rows
        assert (taken.path, taken.tokens.tolist()) == (alone.path, alone.tokens.tolist())
        begin = end
