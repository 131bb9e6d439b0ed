"""A call that drafts nothing says why, in its statistics and in one warning."""

from __future__ import annotations

import re

import pytest
import torch

import hf_refspec as rs
from hf_refspec.drafting.tree import DraftTree
from hf_refspec.kernels.compilation import drafting_kernels
from tests.helpers.architectures import small
from tests.helpers.drafters import Noise

PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 11, 12]])
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class Silent(rs.Drafter):
    """Drafts nothing."""

    def draft(self, budget, call):
        return DraftTree.empty()


def stats_of(model, drafter, rows=1, **options):
    prompt = PROMPT.repeat(rows, 1)
    model.generate(prompt, **OPTIONS, candidate_generator=drafter, **options)
    assert drafter.stats.drafted == 0
    return drafter.stats


@pytest.fixture(autouse=True)
def _compiled():
    drafting_kernels.compile()


def test_drafts_leave_no_reason(llama):
    drafter = Noise()
    llama.generate(PROMPT, **OPTIONS, candidate_generator=drafter, max_draft_tokens=4)
    assert drafter.stats.drafted and drafter.stats.reason is None
    assert drafter.stats.verification == "tree"


@pytest.mark.parametrize(
    ("model_type", "drafter", "nodes", "rows", "reason"),
    [
        ("llama", Silent(), 4, 1, "^the drafter found nothing to draft$"),
        ("llama", Noise(), 0, 1, "^`max_draft_tokens=0`$"),
        ("minimax", Noise(), 4, 1, "its cache"),
        # Not that several tokens have other logits.
        ("bloom", Noise(), 4, 2, "^its attention .* rows .*pass one prompt at a time$"),
    ],
)
def test_the_reason_is_what_kept_the_call_from_drafting(
    models_by_type, model_type, drafter, nodes, rows, reason
):
    stats = stats_of(models_by_type(model_type), drafter, rows, max_draft_tokens=nodes)
    assert re.search(reason, stats.reason)
    assert f"; nothing drafted: {stats.reason[:20]}" in str(stats)


def test_an_inexact_probe_with_its_differences(caplog):
    stats = stats_of(small("mamba"), Noise(), max_draft_tokens=4)
    assert stats.verification == "none"
    assert "several tokens in one pass have other logits than one after another" in stats.reason
    assert "off those of single steps" in stats.reason
    assert (
        f"MambaForCausalLM decodes plainly, with the same text and no speed-up: {stats.reason}"
        in (caplog.text)
    )
