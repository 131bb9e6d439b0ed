"""Attention of eager passes: without cuDNN on a GPU, as torch has it elsewhere."""

import copy
import threading

import pytest
from torch.backends import cuda
from transformers import LlamaConfig, LlamaForCausalLM

from hf_refspec.verification.eager_kernels import eager_kernels

CONFIG = LlamaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
HERE = LlamaForCausalLM(CONFIG)
ELSEWHERE = copy.deepcopy(HERE).to("meta")  # as far from a CPU as a GPU is


@pytest.mark.parametrize("enabled", [True, False])
def test_the_setting_is_back_after_the_last_of_several_passes(enabled):
    before = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(enabled)
    seen = []
    first_inside = threading.Event()
    second_ended = threading.Event()

    def another_call():
        first_inside.wait()
        with eager_kernels(ELSEWHERE):
            seen.append(cuda.cudnn_sdp_enabled())
        second_ended.set()

    thread = threading.Thread(target=another_call)
    thread.start()
    try:
        with pytest.raises(ZeroDivisionError), eager_kernels(ELSEWHERE):
            first_inside.set()
            second_ended.wait()
            seen.append(cuda.cudnn_sdp_enabled())
            raise ZeroDivisionError
        assert seen == [False, False] and cuda.cudnn_sdp_enabled() == enabled
    finally:
        thread.join()
        cuda.enable_cudnn_sdp(before)


def test_passes_on_a_cpu_and_compiled_ones_keep_the_setting(monkeypatch):
    assert cuda.cudnn_sdp_enabled()
    with eager_kernels(HERE):
        assert cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(ELSEWHERE, "_compiled_call_impl", HERE.forward)
    with eager_kernels(ELSEWHERE):
        assert cuda.cudnn_sdp_enabled()
