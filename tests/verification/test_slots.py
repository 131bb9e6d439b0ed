"""Compiled passes over static caches: the ids of plain decoding, and no graph too many."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
from torch._dynamo.utils import counters

import hf_refspec as rs
from hf_refspec.verification.slots import WIDTHS
from tests.helpers.calls import GREEDY, Call, compiled_anywhere
from tests.helpers.calls import RANDOM_PROMPT as PROMPT
from tests.helpers.drafters import Prophet

HAS_COMPILER = any(map(shutil.which, ("g++", "clang++", "c++")))


def generate(model, drafter=None, **options):
    torch.manual_seed(5)
    options = {"inputs": PROMPT, "cache_implementation": "static", **GREEDY, **options}
    if drafter is not None:
        options = {"candidate_generator": drafter, "max_draft_tokens": 12, **options}
    return model.generate(**options)


@pytest.fixture
def own(models_by_type):
    """Builds models for this test alone: one that has been compiled cannot be pickled."""
    return lambda model_type: deepcopy(models_by_type(model_type))


@pytest.fixture
def graphs():
    """What torch has compiled since the test began."""
    torch._dynamo.reset()
    counters.clear()
    return lambda: counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral"])
def test_each_width_is_one_graph_without_a_break(own, model_type, graphs):
    model = own(model_type)
    compiled = {"compile_config": compiled_anywhere(backend="eager")}
    plain = generate(model)
    for nodes in (0, 7, 15, 31, 64, 3, 12, 40):
        drafter = Prophet(plain, accuracy=0.8, branches=10)
        drafted = generate(model, drafter, max_draft_tokens=nodes, **compiled)
        assert drafted.tolist() == plain.tolist()
    assert graphs() <= len(WIDTHS)
    assert not counters["graph_break"]


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler, which torch.compile needs")
def test_compiled_passes_have_the_ids_of_plain_decoding(own, graphs):
    model = own("llama")
    plain = generate(model)
    drafter = Prophet(plain, accuracy=0.8, branches=2)
    compiled = {"compile_config": compiled_anywhere(), "max_draft_tokens": 7}
    for _ in range(2):
        assert generate(model, drafter, **compiled).tolist() == plain.tolist()
    assert drafter.stats.mat > 1.5
    assert 0 < graphs() <= 2  # passes over 1 and over 8 tokens


@pytest.mark.parametrize("rows", [1, 2])
def test_after_warmup_nothing_is_compiled(own, rows, graphs):
    llama = own("llama")
    compiled = {"compile_config": compiled_anywhere(backend="eager")}
    rs.warmup(llama, max_length=60, rows=rows, **compiled)
    known = graphs()
    assert known == len(WIDTHS)
    call = Call(llama, rows)
    options = {"cache_implementation": "static", "max_length": 60, "max_new_tokens": None}
    for nodes in (5, 40, "auto"):
        drafter = call.drafter(0.8)
        drafted = call.generate(
            candidate_generator=drafter, max_draft_tokens=nodes, **options, **compiled
        )
        assert drafted[:, : call.plain.shape[1]].tolist() == call.plain.tolist()
    assert graphs() == known


def test_threads_compile_one_at_a_time(own, graphs):
    """Each would compile the same alone; one of them gets the kept layers."""
    llama = own("llama")
    compiled = {"compile_config": compiled_anywhere(backend="eager"), "max_draft_tokens": 7}
    plain = generate(llama)

    def drafted(seed: int) -> list:
        return generate(llama, Prophet(plain, accuracy=0.8, seed=seed), **compiled).tolist()

    with ThreadPoolExecutor(2) as threads:
        assert all(ids == plain.tolist() for ids in threads.map(drafted, range(6)))


@pytest.mark.parametrize("wrong", [{"max_length": 0}, {"rows": 0}])
def test_warmup_names_what_is_wrong(llama, wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be at least 1, but is 0"):
        rs.warmup(llama, **wrong)


@torch._dynamo.config.patch(suppress_errors=False)  # which outlines sets when it is imported
def test_a_model_that_cannot_be_compiled_runs_as_it_is_with_one_warning(own, caplog):
    def fails(graph, inputs):
        raise RuntimeError("no such instruction")

    model = own("starcoder2")
    plain = generate(model)
    compiled = {"compile_config": compiled_anywhere(backend=fails)}
    for _ in range(2):
        drafted = generate(model, Prophet(plain, accuracy=0.8), **compiled)
        assert drafted.tolist() == plain.tolist()
    warnings = [record.message for record in caplog.records if "compiled" in record.message]
    assert len(warnings) == 1
    assert "cannot be compiled, and runs as it is" in warnings[0]
