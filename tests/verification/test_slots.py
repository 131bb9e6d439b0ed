"""Compiled passes over static caches: the ids of plain decoding, and no graph too many."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
from torch._dynamo.utils import counters

import hf_refspec as rs
from hf_refspec.verification.slots import WIDTHS
from tests.helpers.calls import RANDOM_PROMPT as PROMPT
from tests.helpers.calls import Call, compiled_anywhere

HAS_COMPILER = any(map(shutil.which, ("g++", "clang++", "c++")))


def static_call(model) -> Call:
    return Call(model, inputs={"input_ids": PROMPT}, cache_implementation="static")


def compiled(**options) -> dict[str, object]:
    return {"compile_config": compiled_anywhere(**options)}


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
    call, drafting = static_call(own(model_type)), compiled(backend="eager")
    for nodes in (0, 7, 15, 31, 64, 3, 12, 40):
        drafter = call.drafter(branches=10)
        call.assert_lossless(drafter, max_draft_tokens=nodes, drafting=drafting)
    assert graphs() <= len(WIDTHS)
    assert not counters["graph_break"]


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler, which torch.compile needs")
def test_compiled_passes_have_the_ids_of_plain_decoding(own, graphs):
    call = static_call(own("llama"))
    for _ in range(2):
        assert call.assert_lossless(max_draft_tokens=7, drafting=compiled()).mat > 1.5
    assert 0 < graphs() <= 2  # passes over 1 and over 8 tokens


@pytest.mark.parametrize("rows", [1, 2])
def test_after_warmup_nothing_is_compiled(own, rows, graphs):
    llama, compiling = own("llama"), compiled(backend="eager")
    rs.warmup(llama, max_length=60, rows=rows, **compiling)
    known = graphs()
    assert known == len(WIDTHS)
    options = {"cache_implementation": "static", "max_length": 60, "max_new_tokens": None}
    call = Call(llama, rows, **options)
    for nodes in (5, 40, "auto"):
        call.assert_lossless(max_draft_tokens=nodes, drafting=compiling)
    assert graphs() == known


def test_threads_compile_one_at_a_time(own, graphs):
    """Each would compile the same alone; one of them gets the kept layers."""
    call, drafting = static_call(own("llama")), compiled(backend="eager")

    def drafted(seed: int) -> list:
        drafting["candidate_generator"] = call.drafter(seed=seed)
        return call.generate(max_draft_tokens=7, **drafting).tolist()

    with ThreadPoolExecutor(2) as threads:
        assert all(ids == call.plain.tolist() for ids in threads.map(drafted, range(6)))


@pytest.mark.parametrize("wrong", [{"max_length": 0}, {"rows": 0}])
def test_warmup_names_what_is_wrong(llama, wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be at least 1, but is 0"):
        rs.warmup(llama, **wrong)


@torch._dynamo.config.patch(suppress_errors=False)  # which outlines sets when it is imported
def test_a_model_that_cannot_be_compiled_runs_as_it_is_with_one_warning(own, caplog):
    def fails(graph, inputs):
        raise RuntimeError("no such instruction")

    call = static_call(own("starcoder2"))
    for _ in range(2):
        call.assert_lossless(drafting=compiled(backend=fails))
    warnings = [record.message for record in caplog.records if "compiled" in record.message]
    assert len(warnings) == 1
    assert "cannot be compiled, and runs as it is" in warnings[0]
