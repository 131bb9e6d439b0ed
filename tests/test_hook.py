"""`import hf_refspec` adds a keyword to `generate`, and nothing else changes."""

import copy
import functools
import inspect
import pickle

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin, LogitsProcessorList

import hf_refspec as rs
from tests.helpers.calls import GREEDY, PROMPT, Forced, ListStreamer, assert_lossless
from tests.helpers.drafters import Noise, Prophet

OPTIONS = {**GREEDY, "max_new_tokens": 30}


@pytest.fixture
def uninstalled():
    rs.uninstall()
    yield
    rs.install()


def test_installs_once_and_comes_off(uninstalled, llama):
    original = GenerationMixin.generate
    assert not rs.is_installed()
    rs.uninstall()
    assert GenerationMixin.generate is original
    with pytest.raises(ValueError, match="candidate_generator"):
        llama.generate(PROMPT, candidate_generator=Noise(), **OPTIONS)
    rs.install()
    wrapped = GenerationMixin.generate
    rs.install()
    assert GenerationMixin.generate is wrapped
    assert wrapped.__wrapped__ is original
    assert rs.is_installed()


def test_signature_and_docstring_gain_the_options_alone(uninstalled):
    original = GenerationMixin.generate
    rs.install()
    shown = inspect.signature(GenerationMixin.generate)
    options = [*rs.GenerateOptions.__annotations__]
    assert options == ["candidate_generator", "max_draft_tokens", "verification"]
    assert {shown.parameters[name].kind for name in options} == {inspect.Parameter.KEYWORD_ONLY}
    others = [each for name, each in shown.parameters.items() if name not in options]
    assert shown.replace(parameters=others) == inspect.signature(original)
    added = GenerationMixin.generate.__doc__.removeprefix(original.__doc__)
    assert all(f"{name} (" in added for name in options)


def test_keeps_its_name(uninstalled):
    rs.install()
    assert pickle.loads(pickle.dumps(GenerationMixin.generate)) is GenerationMixin.generate


def test_without_the_keyword_generate_is_called_as_it_was(llama, monkeypatch):
    calls = []
    rs.uninstall()
    monkeypatch.setattr(
        GenerationMixin, "generate", lambda self, *args, **kwargs: calls.append((args, kwargs))
    )
    rs.install()
    try:
        llama.generate(PROMPT, max_new_tokens=3, top_k=7)
        llama.generate(PROMPT, max_new_tokens=3, candidate_generator=None, max_draft_tokens=8)
    finally:
        rs.uninstall()
        monkeypatch.undo()
        rs.install()
    assert calls[0][1] == {"max_new_tokens": 3, "top_k": 7}
    assert calls[1][1] == {"max_new_tokens": 3}


@pytest.mark.parametrize("option", [{"max_draft_tokens": 8}, {"verification": "tree"}])
def test_options_without_a_drafter_name_what_is_missing(llama, option):
    [name] = option
    with pytest.raises(ValueError, match=f"`{name}=.*` needs a drafter: pass `candidate_generator"):
        llama.generate(PROMPT, max_new_tokens=3, **option)


def test_a_drafter_in_a_generation_config_is_refused(llama, fresh_llama):
    config = GenerationConfig(max_new_tokens=3, candidate_generator=rs.ReferenceCopy())
    fresh_llama.generation_config = config
    for model, given, named in (
        *[(llama, [config], {}), (llama, [], {"generation_config": config})],
        *[(fresh_llama, [], {}), (fresh_llama, [None], {})],
    ):
        with pytest.raises(ValueError, match=r"generation_config.candidate_generator` is set"):
            model.generate(PROMPT, *given, **named)


def test_none_for_the_number_of_draft_tokens_means_auto(llama):
    assert_lossless(llama, rs.ReferenceCopy(), max_draft_tokens=None)


def test_a_model_that_is_configured_without_a_cache_gets_one_unless_the_caller_says_so(
    models_by_type,
):
    model = copy.deepcopy(models_by_type("mpt"))
    plain = model.generate(PROMPT, **OPTIONS)
    model.generation_config.use_cache = False
    assert model.generate(PROMPT, **OPTIONS).tolist() == plain.tolist()
    drafter = Prophet(plain, accuracy=0.9)
    assert assert_lossless(model, drafter, max_new_tokens=30).mat > 1.5
    # A cache that the call gives is not filled by such a model, whose text is then another one.
    with pytest.raises(ValueError, match="`use_cache=False`"):
        cache = DynamicCache(config=model.config)
        model.generate(PROMPT, candidate_generator=drafter, past_key_values=cache, **OPTIONS)
    with pytest.raises(ValueError, match="`use_cache=False`"):
        model.generate(PROMPT, candidate_generator=drafter, use_cache=False, **OPTIONS)


def test_arguments_may_be_positional(llama):
    streamers = ListStreamer(), ListStreamer()
    nothing = [None] * 6
    plain = llama.generate(PROMPT, *nothing, streamers[0], **OPTIONS)
    drafting = {"candidate_generator": rs.ReferenceCopy(), **OPTIONS}
    drafted = llama.generate(PROMPT, *nothing, streamers[1], **drafting)
    assert drafted.tolist() == plain.tolist()
    assert streamers[0].puts == streamers[1].puts


def test_speculate_works_with_and_without_the_hook(llama, uninstalled):
    plain = llama.generate(PROMPT, **OPTIONS)
    drafter = Prophet(plain, accuracy=0.9)
    loop = {"custom_generate": rs.speculate, "max_draft_tokens": 8, **OPTIONS}
    assert llama.generate(PROMPT, candidate_generator=drafter, **loop).tolist() == plain.tolist()
    assert drafter.stats.mat > 1.5
    rs.install()
    assert llama.generate(PROMPT, candidate_generator=drafter, **loop).tolist() == plain.tolist()
    assert llama.generate(PROMPT, **loop).tolist() == plain.tolist()  # ReferenceCopy by default


class _Drafter(rs.Drafter):
    """As a user writes it, in a module of their own."""


@pytest.mark.parametrize("loop", [rs.ReferenceCopy(), rs.ReferenceCopy, _Drafter()])
def test_a_drafter_is_not_a_decoding_loop(llama, loop):
    with pytest.raises(TypeError, match=r"is not a decoding loop\. .* as `candidate_generator`"):
        llama.generate(PROMPT, custom_generate=loop, **OPTIONS)


def test_inference_mode_and_grad_mode_both_work(llama):
    plain = llama.generate(PROMPT, **OPTIONS)
    for mode in (torch.inference_mode, torch.enable_grad):
        with mode():
            drafter = Prophet(plain, accuracy=0.8, branches=3)
            ids = llama.generate(PROMPT, candidate_generator=drafter, **OPTIONS)
        assert ids.tolist() == plain.tolist()
        assert not ids.requires_grad


def test_a_partial_of_speculate_keeps_its_options_and_the_streamer(llama):
    plain = llama.generate(PROMPT, **OPTIONS)
    drafter = Prophet(plain, accuracy=0.9)
    loop = functools.partial(rs.speculate, candidate_generator=drafter, max_draft_tokens=2)
    streamer = ListStreamer()
    ids = llama.generate(PROMPT, custom_generate=loop, streamer=streamer, **OPTIONS)
    assert ids.tolist() == plain.tolist()
    assert len(streamer.puts) == 31 and streamer.ended == 1
    assert len(drafter.stats.accepted_lengths) <= 3


def test_another_packages_wrapper_stays_when_ours_comes_off(uninstalled, llama):
    original = GenerationMixin.generate
    rs.install()
    ours = GenerationMixin.generate

    @functools.wraps(ours)
    def theirs(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    GenerationMixin.generate = theirs
    try:
        rs.uninstall()
        assert GenerationMixin.generate is theirs
        assert not rs.is_installed()
        with pytest.raises(ValueError, match="candidate_generator"):
            llama.generate(PROMPT, candidate_generator=Noise(), **OPTIONS)
        assert llama.generate(PROMPT, **OPTIONS).shape[1] == PROMPT.shape[1] + 30
    finally:
        GenerationMixin.generate = original


TEXT = "def area(width, height):\n    return width * height\n\ndef area(width"


def test_chat_templates_and_generation_configs_are_taken(byte_llama, tokenizer):
    chat = [{"role": "user", "content": "say area area area"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    config = GenerationConfig(max_new_tokens=30, do_sample=True, top_k=7, pad_token_id=0)
    options, texts = {**inputs, "generation_config": config}, []
    for drafter in (None, rs.ReferenceCopy()):
        torch.manual_seed(0)
        texts.append(byte_llama.generate(**options, candidate_generator=drafter).tolist())
    assert texts[0] == texts[1]


def test_stop_strings_of_a_generation_config_or_the_model(byte_llama, tokenizer):
    inputs = tokenizer(TEXT, return_tensors="pt")
    target = tokenizer(TEXT + "(width, height):\n    pass\n", return_tensors="pt").input_ids
    options = {"tokenizer": tokenizer, "logits_processor": LogitsProcessorList([Forced(target)])}
    config = GenerationConfig(max_new_tokens=40, stop_strings=["):"], pad_token_id=0)
    plain = byte_llama.generate(**inputs, generation_config=config, **options)
    assert tokenizer.decode(plain[0]).endswith("height):")
    options |= {"candidate_generator": Prophet(target, accuracy=1.0), "max_draft_tokens": 8}
    drafted = byte_llama.generate(**inputs, generation_config=config, **options)
    assert drafted.tolist() == plain.tolist()
    byte_llama.generation_config.stop_strings = ["):"]
    try:
        drafted = byte_llama.generate(**inputs, max_new_tokens=40, **options)
        del options["tokenizer"]
        with pytest.raises(ValueError, match="tokenizer"):
            byte_llama.generate(**inputs, max_new_tokens=40, **options)
    finally:
        byte_llama.generation_config.stop_strings = None
    assert drafted.tolist() == plain.tolist()
