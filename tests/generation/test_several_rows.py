"""What only several rows have: refusals, prompts that they share, rows that have ended."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_refspec as rs
from hf_refspec.verification.caches import find_cache
from tests.helpers.calls import Call, assert_lossless, up_to_end
from tests.helpers.drafters import Listening, Noise, Prophets


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
    options = {**options, "do_sample": True, "num_return_sequences": 2}
    torch.manual_seed(0)
    plain = call.generate(**options)
    assert len({tuple(row) for row in plain.tolist()}) >= 4
    good = Prophets(call.inputs, plain[::2], 0.8)
    for drafter in (good, Noise()):
        torch.manual_seed(0)
        drafted = call.generate(**options, candidate_generator=drafter, max_draft_tokens=8)
        assert drafted.tolist() == plain.tolist()
    assert good.stats.mat > 1.2


REFUSED = {
    "`output_scores=True`": {"output_scores": True, "return_dict_in_generate": True},
    "`output_logits=True`": {"output_logits": True, "return_dict_in_generate": True},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_rows_cannot_have_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call.generate(**REFUSED[message], candidate_generator=Noise())


@pytest.mark.parametrize("step", [1, 2])
def test_rows_of_one_prompt_with_positions_of_their_own_have_each_their_text(llama, step):
    ids = torch.arange(5, 25)[None].repeat(2, 1)
    positions = torch.stack([torch.arange(20), step * torch.arange(20) + 7])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}
    assert_lossless(llama, Noise(), inputs)


@pytest.mark.parametrize(("pads", "prompts"), [(False, 2), (True, 3)])
def test_a_prompt_that_several_rows_have_is_run_once(call, pads, prompts):
    """Rows of one prompt that are padded differently have two, for their positions differ."""
    ids = call.inputs["input_ids"][[0, 1, 0, 0, 1]]
    mask = torch.ones_like(ids)
    mask[3, 0] = 1 - pads
    inputs = {"input_ids": ids, "attention_mask": mask}
    widths = []
    embeddings = call.model.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape))
    try:
        # It learns from prompts.
        assert_lossless(call.model, rs.TokenRecycling(), inputs, verification="tree")
    finally:
        hook.remove()
    assert (prompts, ids.shape[1]) in widths


@pytest.mark.parametrize("attention", ["sdpa", "eager"])  # packed, or in one rectangle
def test_ended_rows_draft_nothing_and_leave_the_passes(fresh_llama, attention):
    """The cache of a rectangle is as long as its longest row, however many nodes were rejected."""
    fresh_llama.set_attn_implementation(attention)
    call = Call(fresh_llama, rows=4)
    end = int(call.plain[1, 15])
    options = {"eos_token_id": end, "pad_token_id": 0}
    plain = call.generate(**options)
    passes, drafter = [], Listening(call.inputs, call.plain, 0.2)
    drafting = {"candidate_generator": drafter, "max_draft_tokens": 4}
    call.generate(**options, **drafting)  # probes
    drafter.drafts.clear()

    def record(_, args, kwargs):
        passes.append((*kwargs["input_ids"].shape, find_cache(kwargs).get_seq_length()))

    record.only_reads = True  # so that findings about the model stay valid
    with fresh_llama.register_forward_pre_hook(record, with_kwargs=True):
        drafted = call.generate(**options, **drafting)
    assert drafted.tolist() == plain.tolist()
    assert drafter.drafts and all(text[-1] != end for text, _ in drafter.drafts)
    assert drafter.stats.tokens == sum(len(up_to_end(row[12:], [end])) for row in plain)
    passes = passes[-drafter.stats.forward_passes + 1 :]  # without the probe's and the prefill
    assert max(width for _, _, width in passes) <= 12 + 32 - 1
    if attention == "eager":
        rows = [rows for rows, _, _ in passes]
        assert rows == sorted(rows, reverse=True) and rows[0] == 4 > rows[-1]
    else:
        assert passes[0][1] > 3 * (1 + 4) >= passes[-1][1]  # the tokens of three rows at most


def test_a_candidate_generator_drafts_for_each_row(call):
    generator = PromptLookupCandidateGenerator(num_output_tokens=6, max_matching_ngram_size=2)
    drafted = call.generate(candidate_generator=generator)
    assert drafted.tolist() == call.plain.tolist()
