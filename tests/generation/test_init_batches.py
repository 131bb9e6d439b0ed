"""Who drafts in continuous batches, and what is refused before any work."""

from __future__ import annotations

import logging

import pytest
import torch
from drafters import Noise
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, GenerationMixin
from transformers.generation.continuous_batching import input_outputs, scheduler

import hf_refspec as rs
from hf_refspec.generation.continuous_shape import check_transformers

logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
PROMPTS = [[5, 9, 12, 7, 5, 9, 12], [7, 8, 7, 8, 7]]
GREEDY = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1)
METHODS = ("init_continuous_batching", "continuous_batching_context_manager", "generate_batch")


def small(**options) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=64, **options)


def batch(model, **options) -> list[list[int]]:
    options = {"generation_config": GREEDY, "continuous_batching_config": small(), **options}
    return [each.generated_tokens for each in model.generate_batch(PROMPTS, **options).values()]


@pytest.fixture(scope="module")
def plain(llama):
    return batch(llama)


def test_the_methods_are_wrapped_once_and_come_off(llama, plain):
    wrapped = [getattr(GenerationMixin, name) for name in METHODS]
    rs.install()
    assert [getattr(GenerationMixin, name) for name in METHODS] == wrapped
    rs.uninstall()
    try:
        for name, wrapper in zip(METHODS, wrapped, strict=True):
            assert getattr(GenerationMixin, name) is wrapper.__wrapped__
        assert batch(llama) == plain
    finally:
        rs.install()


def test_a_manager_of_ones_own(llama, plain):
    drafter = Noise()
    manager = llama.init_continuous_batching(
        generation_config=GREEDY,
        continuous_batching_config=small(),
        candidate_generator=drafter,
        max_draft_tokens=4,
    )
    manager.start()
    ids = manager.add_requests(PROMPTS)
    outputs = [manager.get_result(timeout=20) for _ in ids]
    manager.stop(block=True)
    outputs = {each.request_id: each.generated_tokens for each in outputs}
    assert [outputs[each] for each in ids] == plain
    assert drafter.stats.tokens == 24
    assert drafter.stats.drafted > 0


def test_an_attached_drafter(llama, plain, caplog):
    with rs.attach(llama, Noise(), max_draft_tokens=4) as attachment:
        assert batch(llama) == plain
        assert attachment.stats.drafted > 0
        assert batch(llama) == plain
        assert attachment.stats.tokens == 48
        assert batch(llama, candidate_generator=None) == plain
        ids = llama.generate(
            torch.tensor([PROMPTS[0]]),
            generation_config=GREEDY,
            cache_implementation="paged",
            continuous_batching_config=small(),
        )
        assert ids[0, 0].tolist() == PROMPTS[0] + plain[0]
        assert attachment.stats.tokens == 60
        assert "plainly" not in caplog.text
    assert batch(llama) == plain


def test_a_kept_manager_drafts_for_the_calls_that_ask_for_it(fresh_llama, plain):
    for drafter in (Noise(), None, Noise(), Noise()):
        options = {"candidate_generator": drafter, "max_draft_tokens": 4 if drafter else None}
        assert batch(fresh_llama, persistent_manager=True, **options) == plain
        assert drafter is None or drafter.stats.drafted > 0
    fresh_llama.destroy_cached_continuous_batching_manager()


def test_a_model_that_was_loaded_for_paged_attention(fresh_llama, plain):
    fresh_llama.set_attn_implementation("paged|eager")
    assert batch(fresh_llama, candidate_generator=Noise(), max_draft_tokens=4) == plain


def test_two_managers_cannot_have_one_drafter(llama):
    options = {"generation_config": GREEDY, "continuous_batching_config": small()}
    drafter = Noise()
    with (
        llama.continuous_batching_context_manager(**options, candidate_generator=drafter),
        pytest.raises(RuntimeError, match="in use"),
    ):
        batch(llama, candidate_generator=drafter)
    batch(llama, candidate_generator=drafter)


def test_a_drafter_that_raises_fails_the_requests_and_is_free_again(llama, plain):
    class Failing(Noise):
        def draft(self, budget):
            raise OSError("no draft today")

    drafter = Failing()
    outputs = llama.generate_batch(
        PROMPTS,
        generation_config=GREEDY,
        continuous_batching_config=small(),
        candidate_generator=drafter,
        max_draft_tokens=4,
    )
    assert [each.error for each in outputs.values()] == ["no draft today"] * 2
    assert batch(llama, candidate_generator=drafter, max_draft_tokens=0) == plain


@pytest.mark.parametrize(
    ("batching", "named"),
    [
        ({"use_async_batching": True}, "use_async_batching=True"),
        ({"use_cuda_graph": True}, "use_cuda_graph=True"),
        ({"use_cuda_graph": (True, False)}, "use_cuda_graph"),
        ({"varlen_compile_config": CompileConfig()}, "compiled passes"),
        ({"default_compile_level": 1}, "compiled passes"),
    ],
    ids=str,
)
def test_refuses_batches_whose_passes_cannot_hold_drafts(llama, caplog, batching, named):
    given = small(**batching)
    with pytest.raises(ValueError, match=named):
        batch(llama, candidate_generator=Noise(), continuous_batching_config=given)
    with rs.attach(llama, Noise()):
        manager = llama.init_continuous_batching(GREEDY, given)
    assert named in caplog.text
    assert not hasattr(manager, "hf_refspec_drafts")
    assert given == small(**batching)


@pytest.mark.parametrize("verification", ["tree", "reproducible"])
def test_refuses_what_cannot_be_verified(fresh_llama, verification):
    fresh_llama.set_attn_implementation("paged|eager")  # which no probe can run
    with pytest.raises(ValueError, match=f"verification='{verification}'"):
        batch(fresh_llama, candidate_generator=Noise(), verification=verification)


def test_refuses_processors_that_transformers_does_not_support(llama):
    config = GenerationConfig(**{**GREEDY.to_diff_dict(), "repetition_penalty": 1.5})
    options = {"candidate_generator": Noise(), "generation_config": config}
    batch(llama, **options)  # transformers drops it
    kept = small(drop_unsupported_processors=False)
    with pytest.raises(ValueError, match="RepetitionPenaltyLogitsProcessor"):
        batch(llama, **options, continuous_batching_config=kept)


def test_names_options_without_a_drafter_and_foreign_ids(llama):
    with pytest.raises(ValueError, match="max_draft_tokens=4"):
        batch(llama, max_draft_tokens=4)
    with pytest.raises(ValueError, match="vocabulary of 97"):
        batch(llama, candidate_generator=rs.ReferenceCopy([5000, 1]))
    with pytest.raises(TypeError, match="max_draft_tokens"):
        batch(llama, candidate_generator=Noise(), max_draft_tokens=1.5)


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_windows_are_refused_or_decoded_plainly_where_a_drafter_is_attached(
    models_by_type, kind, caplog
):
    model = models_by_type(kind)
    plain = batch(model)
    with pytest.raises(ValueError, match="attends to a part of the text"):
        batch(model, candidate_generator=Noise())
    with rs.attach(model, Noise()) as attachment:
        assert batch(model) == plain
    assert attachment.stats.tokens == 0
    assert "attends to a part of the text" in caplog.text


def test_refuses_a_transformers_that_differs(llama, monkeypatch):
    check_transformers()

    def get_model_kwargs(self, use_padding=False, more=None): ...

    def schedule_batch(self, token_budget): ...

    monkeypatch.setattr(input_outputs.ContinuousBatchingIOs, "get_model_kwargs", get_model_kwargs)
    monkeypatch.setattr(scheduler.FIFOScheduler, "schedule_batch", schedule_batch)
    differing = r"FIFOScheduler\.schedule_batch, ContinuousBatchingIOs\.get_model_kwargs\."
    with pytest.raises(ValueError, match=r"5\.17 to 5\.23, and.*" + differing):
        batch(llama, candidate_generator=Noise())
