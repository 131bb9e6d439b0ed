"""Findings on disk hold for the next processes, and for no other model."""

import copy
import os
import subprocess
import sys
from functools import wraps
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import DynamicLayer, LlamaForCausalLM

from hf_refspec.verification import finding
from tests.helpers.architectures import small
from tests.helpers.calls import assert_lossless, padded_prompts


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of findings."""
    monkeypatch.setattr(finding, "findings_folder", lambda: tmp_path / "findings")
    return tmp_path / "findings"


def probe_passes(model, rows=1, verification="auto") -> int:
    """The passes that a drafted call spends on probes; its ids are plain decoding's."""
    stats = assert_lossless(model, [0.9] * rows, padded_prompts(rows), verification)
    assert stats.mat > 1.2
    return stats.probe_passes


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [("llama", torch.float32), ("llama", torch.bfloat16), ("gemma2", torch.float32)],
)
def test_a_model_that_was_found_exact_is_not_probed_by_the_next_process(
    model_type, rows, dtype, folder
):
    assert probe_passes(small(model_type, dtype), rows) > 0
    assert probe_passes(small(model_type, dtype), rows) == 0  # no finding in memory is about it


def test_each_kind_and_number_of_rows_has_its_own_finding(folder):
    def passes(rows: int, verification: str) -> int:
        return probe_passes(small("llama"), rows, verification)

    calls = [(1, "tree"), (1, "chain"), (2, "tree")]
    assert all(passes(*call) > 0 for call in calls)
    assert [passes(*call) for call in calls] == [0, 0, 0]


def another_value(model):
    with torch.no_grad():
        model.model.norm.weight[0] += 1


def another_setting(model):
    model.config.rms_norm_eps *= 2


def another_attribute(model):
    model.model.layers[0].self_attn.scaling *= 2


def another_attention(model):
    model.set_attn_implementation("eager")


def another_type(model):
    model.to(torch.bfloat16)


def another_config(model):
    attention = model.model.layers[0].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config.rms_norm_eps *= 2


CHANGES = [
    *(another_value, another_setting, another_attribute, another_attention, another_type),
    another_config,
]


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_is_probed(change, folder):
    assert probe_passes(small("llama")) > 0
    model = small("llama")
    change(model)
    assert probe_passes(model) > 0


def test_a_model_with_another_number_of_threads_is_probed(folder):
    assert probe_passes(small("llama")) > 0
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert probe_passes(small("llama")) > 0
    finally:
        torch.set_num_threads(threads)


class OwnLlama(LlamaForCausalLM):
    """A class whose code may be another in the next process."""


def own_class(model, monkeypatch):
    model.__class__ = OwnLlama


def own_method(model, monkeypatch):
    mlp = model.model.layers[0].mlp
    mlp.act_fn.own = lambda x: x


def patched_method(model, monkeypatch):
    kind = type(model.model)
    usual = kind.get_input_embeddings
    monkeypatch.setattr(kind, "get_input_embeddings", wraps(usual)(lambda self: usual(self)))


def patched_import(model, monkeypatch):
    source = sys.modules[type(model).__module__]
    usual = source.create_causal_mask
    monkeypatch.setattr(source, "create_causal_mask", lambda **options: usual(**options))


def callable_in_place(model, monkeypatch):
    source = sys.modules[type(model).__module__]

    class Called:
        def __call__(self, **options):
            return usual(**options)

    usual = source.create_causal_mask
    monkeypatch.setattr(source, "create_causal_mask", Called())


def patched_cache(model, monkeypatch):
    usual = DynamicLayer.update
    monkeypatch.setattr(DynamicLayer, "update", lambda *args, **options: usual(*args, **options))


def patched_torch(model, monkeypatch):
    usual = nn.functional.silu
    monkeypatch.setattr(nn.functional, "silu", lambda *args, **options: usual(*args, **options))


def hook(model, monkeypatch):
    model.register_forward_hook(lambda module, arguments, output: None)


def quantiser(model, monkeypatch):
    model.hf_quantizer = SimpleNamespace(is_compileable=False)


def odd_weight(model, monkeypatch):
    model.model.register_buffer("odd", torch.zeros(4, dtype=torch.float4_e2m1fn_x2))


OWN = [
    *(own_class, own_method, patched_method, patched_import, callable_in_place, patched_cache),
    *(patched_torch, hook, quantiser, odd_weight),
]


@pytest.mark.parametrize("change", OWN)
def test_what_may_be_another_model_in_each_process_is_not_kept(change, folder, monkeypatch):
    model = small("llama")
    change(model, monkeypatch)
    assert probe_passes(model, verification="tree") > 0
    assert not folder.exists()


class Passing(TorchFunctionMode):
    """A user's mode, whose code may be another in the next process."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


def test_what_is_found_within_a_users_mode_is_not_kept(folder):
    with Passing():
        assert probe_passes(small("llama"), verification="tree") > 0
    assert not folder.exists()


def test_a_model_that_was_changed_since_its_first_call_is_not_kept(folder):
    model = small("llama")
    assert probe_passes(model) > 0
    [file] = folder.iterdir()
    whole = file.read_bytes()
    another_value(model)
    assert probe_passes(model, rows=2) > 0
    assert [each.read_bytes() for each in folder.iterdir()] == [whole]


def test_a_refused_model_is_probed_in_each_process(folder):
    """A failure may have had another cause, such as code that has been mended since."""
    for _ in range(2):
        stats = assert_lossless(small("mamba"))
        assert stats.mat == 1.0 and stats.probe_passes > 0
    assert not folder.exists()


DAMAGE = {
    "empty": b"",
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "a list": b"[true]",
    "other values": b'{"(a": {"exact": true}, "(b": 1}',
    "other names": b'{"file of findings": true, "identity": true}',
    "too large": b'{"a": true}' + b" " * (1 << 16),
    "too deep": b"[" * 50_000,
}


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_replaced(content, folder):
    assert probe_passes(small("llama")) > 0
    [file] = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(content)
    assert probe_passes(small("llama")) > 0
    assert [each.read_bytes() for each in folder.iterdir()] == [whole]


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to itself"])
def test_what_is_no_file_is_left_alone(kind, folder):
    assert probe_passes(small("llama")) > 0
    [file] = folder.iterdir()
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to(file)
    assert probe_passes(small("llama")) > 0


def test_a_folder_that_cannot_be_written_costs_only_the_probe(folder):
    folder.write_text("a file in its place")
    assert probe_passes(small("llama")) > 0
    assert folder.read_text() == "a file in its place"


def test_graphs_that_torch_has_compiled_for_other_calls_keep_no_finding_away(folder, monkeypatch):
    """They become functions of the module whose code was compiled."""
    source = sys.modules[LlamaForCausalLM.__module__]
    monkeypatch.setattr(source, "__compiled_fn_0", eval("lambda x: x", {}), raising=False)
    assert [probe_passes(small("llama")) > 0 for _ in range(2)] == [True, False]


def test_the_oldest_files_go(folder):
    folder.mkdir()
    for age in range(300):
        (folder / f"{age}.json").write_text("{}")
        os.utime(folder / f"{age}.json", ns=(0, -age))
    assert probe_passes(small("llama")) > 0
    left = {file.name for file in folder.iterdir()}
    assert len(left) == 256 and {f"{age}.json" for age in range(255)} < left


_CALL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import hf_refspec as rs

torch.manual_seed(0)
sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).eval()
drafter = rs.ReferenceCopy()
prompt = torch.arange(40).repeat(2)[None]
ids = model.generate(prompt, candidate_generator=drafter, max_draft_tokens=8, max_new_tokens=24)
print(drafter.stats.probe_passes, drafter.stats.drafted > 0, ids.tolist())
"""


@pytest.mark.nightly
def test_a_second_process_does_not_probe_and_returns_the_same_ids(tmp_path):
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _CALL],
            env={**environment, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.split(maxsplit=2)
        for seed in (1, 2)
    ]
    (first, drafted, ids), later = outputs
    assert int(first) > 0 and drafted == "True"
    assert later == ["0", "True", ids]
