"""What several rows have of a call: their processors and drafters, and what is refused."""

from contextlib import nullcontext

import pytest
import torch
from transformers import LogitsProcessor, TemperatureLogitsWarper
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_refspec as rs
from tests.helpers.calls import Call
from tests.helpers.drafters import Noise, Prophets


@pytest.fixture(scope="module")
def call(llama) -> Call:
    return Call(llama, rows=4)


@pytest.mark.parametrize(
    "options",
    [
        {"encoder_no_repeat_ngram_size": 1, "top_k": 1},
        {"prefix_allowed_tokens_fn": lambda prompt, ids: [10 * (1 + prompt) + n for n in range(4)]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_several_sequences_of_a_prompt_have_the_processors_of_that_prompt(call, options):
    several = Call(call.model, rows=4, do_sample=True, num_return_sequences=2, **options)
    assert len({tuple(row) for row in several.plain.tolist()}) >= 4
    good = Prophets(call.inputs, several.plain[::2], 0.8)
    assert several.assert_lossless(good).mat > 1.2
    several.assert_lossless(Noise())


@pytest.mark.parametrize("name", ["output_scores", "output_logits"])
def test_what_rows_cannot_have_is_refused(call, name):
    options = {name: True, "return_dict_in_generate": True, "candidate_generator": Noise()}
    with pytest.raises(ValueError, match=f"`{name}=True`"):
        call.generate(**options)


def test_a_candidate_generator_drafts_for_each_row(call):
    call.assert_lossless(PromptLookupCandidateGenerator(6, max_matching_ngram_size=2))


class Biased(LogitsProcessor):
    """Knows its rows by their number."""

    def __init__(self, rows):
        self.bias = 9 * torch.randn(rows, 500, generator=torch.Generator().manual_seed(0))

    def __call__(self, input_ids, scores):
        return scores + self.bias[:, : scores.shape[1]]


class Warmer(TemperatureLogitsWarper):
    """A subclass of a processor of transformers, which counts the rows that it has seen."""

    def __init__(self, rows):
        super().__init__(1.0)
        self.rows = 0

    def __call__(self, input_ids, scores):
        self.rows += len(scores)
        return scores.roll(self.rows, dims=-1)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("kind", [Biased, Warmer])
def test_processors_that_know_their_rows_see_all_of_them(llama, kind, attached):
    call = Call(llama, rows=3, logits_processor=[kind(3)])
    drafter = call.drafter()
    named = {} if attached else {"candidate_generator": drafter}
    with rs.attach(llama, drafter) if attached else nullcontext(drafter) as drafting:
        drafted = call.generate(logits_processor=[kind(3)], **named)
    assert drafted.tolist() == call.plain.tolist()
    reason = f"a {kind.__name__} may know the 3 rows by their number"
    assert drafting.stats.reason.startswith(reason)


def test_scores_of_another_number_of_rows_are_refused(llama):
    with pytest.raises(ValueError, match=r"\(Biased\) returned scores of shape \(3, .* one row"):
        Call(llama, rows=1).generate(logits_processor=[Biased(3)], candidate_generator=Noise())
