"""A drafter that is attached serves every `generate` that names none, and changes no text."""

import copy
import functools
import json
import logging

import pytest
import torch
from transformers import (
    GenerationMixin,
    HiggsAudioV2Config,
    HiggsAudioV2ForConditionalGeneration,
    LlamaForCausalLM,
    PreTrainedModel,
    pipeline,
)

import hf_refspec as rs
from hf_refspec.attachment import attachment_of
from tests.helpers.architectures import small, tiny_config
from tests.helpers.calls import GREEDY, PROMPT


@pytest.fixture(autouse=True)
def nothing_stays_attached(llama):
    yield
    for _ in range(3):
        rs.detach(llama)
        rs.detach()


@pytest.fixture
def plain(llama) -> torch.Tensor:
    return llama.generate(PROMPT, **GREEDY)


@pytest.mark.parametrize("drafter", ["auto", rs.ReferenceCopy()], ids=["auto", "a drafter"])
def test_every_call_is_drafted_until_it_is_detached(llama, plain, drafter):
    attachment = rs.attach(llama, drafter, max_draft_tokens=8)
    for calls in (1, 2):
        assert torch.equal(llama.generate(PROMPT, **GREEDY), plain)
        assert attachment.stats.tokens == calls * 24
    assert attachment.stats.drafted > 0
    rs.detach(llama)
    llama.generate(PROMPT, **GREEDY)
    assert attachment.stats.tokens == 48


def test_after_a_with_block_the_earlier_attachment_applies_again(llama, plain):
    first = rs.attach(llama)
    with rs.attach(llama, rs.ReferenceCopy()) as second:
        assert torch.equal(llama.generate(PROMPT, **GREEDY), plain)
        assert (first.stats.tokens, second.stats.tokens) == (0, 24)
    llama.generate(PROMPT, **GREEDY)
    assert (first.stats.tokens, second.stats.tokens) == (24, 24)


def test_all_models_are_drafted_but_those_that_have_a_drafter_of_their_own(llama, byte_llama):
    with rs.attach() as everywhere, rs.attach(llama) as own:
        for model in (llama, byte_llama):
            model.generate(PROMPT, **GREEDY)
    assert (everywhere.stats.tokens, own.stats.tokens) == (24, 24)


def test_a_call_that_names_a_drafter_or_none_ignores_the_attached_one(llama, plain):
    drafter = rs.ReferenceCopy()
    with rs.attach(llama) as attachment:
        for given in (drafter, None):
            ids = llama.generate(PROMPT, candidate_generator=given, **GREEDY)
            assert torch.equal(ids, plain)
        assert attachment.stats.tokens == 0 and drafter.stats.tokens == 24
        llama.generate(PROMPT, max_draft_tokens=0, **GREEDY)
        assert (attachment.stats.tokens, attachment.stats.drafted) == (24, 0)


def reason_of_plain_calls(model, caplog, **options) -> str:
    """Asserts that calls of a model run plainly; returns the one message that says why."""
    expected = model.generate(PROMPT, **GREEDY, **options)
    with caplog.at_level(logging.WARNING, logger="hf_refspec"), rs.attach() as attachment:
        for _ in range(2):
            assert torch.equal(model.generate(PROMPT, **GREEDY, **options), expected)
    assert attachment.stats.tokens == 0
    [message] = [each.message for each in caplog.records if each.name == "hf_refspec"]
    return message


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"use_cache": False}],
    ids=lambda options: next(iter(options)),
)
def test_what_cannot_be_speculated_runs_plainly_and_is_logged_once(llama, caplog, options):
    message = reason_of_plain_calls(llama, caplog, **options)
    assert "runs plainly, without the attached drafter" in message
    assert next(iter(options)) in message


def test_a_verification_that_is_not_exact_is_logged_and_not_raised(models_by_type, caplog):
    model = models_by_type("bloom")
    plain = model.generate(PROMPT, **GREEDY)
    with rs.attach(model, verification="tree"):
        assert model.generate(PROMPT, **GREEDY).tolist() == plain.tolist()
    assert "`verification='tree'` is not exact on BloomForCausalLM" in caplog.text


class OwnLoop(LlamaForCausalLM):
    """Repeats its first token in place of all others."""

    def _sample(self, input_ids, *args, **kwargs):
        ids = super()._sample(input_ids, *args, **kwargs)
        length = input_ids.shape[1]
        ids[:, length:] = ids[:, length : length + 1]
        return ids


class OwnEnd(LlamaForCausalLM):
    """Ends after ten tokens."""

    def generate(self, *args, **kwargs):
        self.steps = 0
        return super().generate(*args, **kwargs)

    def _has_unfinished_sequences(self, *args, **kwargs):
        self.steps += 1
        return self.steps <= 10


def higgs_audio(llama_config) -> PreTrainedModel:
    """It emits frames of codes."""
    return HiggsAudioV2ForConditionalGeneration(tiny_config(HiggsAudioV2Config, {}))


@pytest.mark.parametrize("kind", [OwnLoop, OwnEnd, higgs_audio])
def test_a_model_with_a_decoding_loop_of_its_own_runs_plainly(llama, kind, caplog):
    torch.manual_seed(0)
    model = kind(llama.config).eval()
    assert "needs transformers' own decoding loop" in reason_of_plain_calls(model, caplog)
    with pytest.raises(ValueError, match="own decoding loop"):
        model.generate(PROMPT, candidate_generator=rs.ReferenceCopy(), **GREEDY)


def test_a_decoding_loop_that_another_library_has_put_in_place_is_kept(llama, plain, monkeypatch):
    own = GenerationMixin._sample

    @functools.wraps(own)
    def reversed_output(self, input_ids, **kwargs):
        ids, length = own(self, input_ids, **kwargs), input_ids.shape[1]
        return torch.cat([ids[:, :length], ids[:, length:].flip(-1)], dim=-1)

    monkeypatch.setattr(GenerationMixin, "_sample", reversed_output)
    expected = llama.generate(PROMPT, **GREEDY)
    assert not torch.equal(expected, plain)
    with rs.attach(llama):
        assert torch.equal(llama.generate(PROMPT, **GREEDY), expected)


def test_a_bad_argument_raises_as_without_a_drafter(llama):
    with rs.attach(llama), pytest.raises(ValueError, match="model_kwargs"):
        llama.generate(PROMPT, no_such_option=1, **GREEDY)


def test_copies_and_saved_files_of_a_model_are_not_attached(llama, tmp_path):
    llama.save_pretrained(tmp_path / "before")
    with rs.attach(llama) as attachment:
        llama.generate(PROMPT, **GREEDY)
        copy.deepcopy(llama).generate(PROMPT, **GREEDY)
        llama.save_pretrained(tmp_path / "after")
    assert attachment.stats.tokens == 24
    for name in ("config.json", "generation_config.json"):
        before, after = (json.loads((tmp_path / f / name).read_text()) for f in ("before", "after"))
        assert before == after


@pytest.mark.parametrize("kind", ["module", "pipeline"])
def test_a_module_around_the_model_or_its_pipeline_will_do(byte_llama, tokenizer, kind):
    pipe = pipeline("text-generation", model=byte_llama, tokenizer=tokenizer)
    given = pipe if kind == "pipeline" else torch.nn.ModuleDict({"inner": byte_llama})
    attachment = rs.attach(given)
    pipe("the cat", max_new_tokens=8, do_sample=False)
    rs.detach(given)
    pipe("the cat", max_new_tokens=8, do_sample=False)
    assert attachment.stats.tokens == 8


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": torch.nn.Linear(1, 1)}, TypeError, "model must be a transformers model"),
        ({"model": torch.nn.Linear}, TypeError, "model must be a transformers model"),
        ({"model": "gpt2"}, TypeError, "has the type str"),
        ({"drafter": rs.ReferenceCopy}, TypeError, "pass an instance, not the class"),
        ({"max_draft_tokens": -1}, ValueError, "`max_draft_tokens` must be at least 0"),
        ({"max_draft_tokens": 1025}, ValueError, "`max_draft_tokens` must be at most 1024"),
        ({"verification": "x"}, ValueError, "`verification` must be one of"),
        ({"assistant_model": small("llama")}, ValueError, "LlamaForCausalLM, which reads no"),
    ],
)
def test_bad_arguments_are_refused_and_nothing_is_attached(llama, arguments, error, message):
    with pytest.raises(error, match=message):
        rs.attach(**arguments)
    assert attachment_of(llama) is None


def test_its_repr_has_its_arguments(llama):
    with rs.attach(llama, max_draft_tokens=8) as attachment:
        assert repr(attachment) == "Attachment('auto', max_draft_tokens=8, verification='auto')"
