"""Ids equal plain decoding's in float32 for every type in transformers' causal-LM mapping."""

import re

import pytest
import torch
import transformers

from tests.helpers.architectures import (
    CHAIN,
    MODEL_TYPES,
    NOT_COMPARED,
    ONE_ROW,
    PLAIN,
    VOCAB_SIZE,
    small,
)
from tests.helpers.drafters import Prophet, Prophets

pytestmark = pytest.mark.slow

RECORDED = transformers.__version__.startswith("5.24.")
NEW_TOKENS = 32  # with the prompt two windows of 16, and the beginning of a third
OPTIONS = {
    "max_new_tokens": NEW_TOKENS,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LOGITS = {"return_dict_in_generate": True, "output_logits": True}


def prompts(rows: int) -> dict[str, torch.Tensor]:
    """Of 20 tokens, the second with 5 of padding; no special tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, VOCAB_SIZE, (rows, 20), generator=generator)
    mask = torch.ones_like(ids)
    ids[1:, :5] = mask[1:, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module", params=MODEL_TYPES)
def model_type(request) -> str:
    """One type after another, so that the tests of each have one model."""
    return request.param


@pytest.fixture(scope="module")
def generated_plainly(model_type):
    """The model and its plain output; skips the test where transformers cannot decode it."""
    models = []

    def generated(rows: int, **kwargs):
        try:
            model = models[0] if models else small(model_type)
            models.append(model)
            return model, model.generate(**{**prompts(rows), **OPTIONS, **kwargs})
        except Exception as error:
            if RECORDED and model_type not in NOT_COMPARED:
                raise
            pytest.skip(f"cannot be built or decoded plainly: {error!r}")

    return generated


def names_an_error_of_ours(reason: str | None) -> bool:
    """Whether a model could not be called, rather than computes something else."""
    return re.search("(Type|Key|Index|Attribute)Error", reason or "") is not None


def test_one_row_equals_plain_decoding(model_type, generated_plainly):
    model, plain = generated_plainly(1, **LOGITS)
    asked = []

    class Recorded(Prophet):
        def draft(self, budget, call):
            asked.append("chain" if call.chain else "tree")
            return super().draft(budget, call)

    for accuracy in (1.0, 0.6):
        drafter = Recorded(plain.sequences, accuracy)
        options = {**prompts(1), **OPTIONS, **LOGITS, "max_draft_tokens": 8}
        drafted = model.generate(**options, candidate_generator=drafter)
        assert drafted.sequences.tolist() == plain.sequences.tolist(), accuracy
        for mine, theirs in zip(drafted.logits, plain.logits, strict=True):
            assert (mine - theirs).abs().max() < 1e-3 * theirs.std()
        if accuracy == 1.0:
            verification = asked[0] if drafter.stats.drafted else "plain"
            assert drafter.stats.mat > 3 or verification == "plain"
    # Token Recycling finds the prompt's logits only in models that are built as it expects.
    few = {**prompts(1), **OPTIONS, "max_new_tokens": 8}
    recycled = model.generate(**few, candidate_generator="auto", max_draft_tokens=8)
    # The last token may be forced to be EOS.
    assert recycled[:, :-1].tolist() == plain.sequences[:, : 20 + 7].tolist()
    if RECORDED:
        expected = "plain" if model_type in PLAIN else "chain" if model_type in CHAIN else "tree"
        assert verification == expected
        assert PLAIN.get(model_type, "") in (drafter.stats.reason or "")
    assert not names_an_error_of_ours(drafter.stats.reason)


def test_two_padded_rows_equal_plain_decoding(model_type, generated_plainly):
    model, plain = generated_plainly(2, max_new_tokens=24)
    options = {**prompts(2), **OPTIONS, "max_new_tokens": 24, "max_draft_tokens": 8}
    drafter = Prophets(prompts(2), plain, (0.9, 0.5))
    drafted = model.generate(**options, candidate_generator=drafter)
    assert drafted.tolist() == plain.tolist()
    assert not names_an_error_of_ours(drafter.stats.reason)
    if RECORDED:
        plainly = model_type in {*PLAIN, *CHAIN, *ONE_ROW}
        assert (drafter.stats.drafted == 0) == plainly
