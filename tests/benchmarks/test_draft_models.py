"""The benchmark of draft models, and the script that distils one."""

import distill
import draft_models
import numpy as np
import pytest
import torch
from draft_models import with_layers
from transformers import AutoModelForCausalLM


def test_all_layers_are_the_model_and_some_share_its_weights(byte_llama):
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(with_layers(byte_llama, [0, 1])(ids).logits, byte_llama(ids).logits)
    last = with_layers(byte_llama, [1])
    own = byte_llama.model.layers[1].mlp.up_proj.weight
    assert last.model.layers[0].mlp.up_proj.weight.data_ptr() == own.data_ptr()
    assert last(ids, use_cache=True).past_key_values.get_seq_length() == 20


@pytest.mark.parametrize("sampling", [[], ["--temperature", "1"]])
def test_each_assistant_is_measured_alone_and_blended(model, data, capsys, sampling):
    prompts = ["--prompts", str(data / "spec_bench_questions.jsonl"), "--limit", "1"]
    options = ["--max-new-tokens", "10", "--assistants", "layers-1", "bfloat16"]
    assert draft_models.main([*prompts, *model, *options, *sampling]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    names = ["transformers' assisted, layers-1"] if not sampling else []
    assert printed.count("1 of 1") == 2 + (2 + len(names)) * 2
    assert ("first token accepted likeliest rejection" in printed) == bool(sampling)
    for name in (*names, "DraftModel, bfloat16", "both, bfloat16"):
        assert f"{name} against plain " in printed


def test_a_small_model_is_distilled(model, tmp_path, capsys):
    small = ["--layers", "1", "--minutes", "0.05"]
    assert distill.main(["--out", "small", "--model", "model", *small]) == 0
    distilled = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert distilled.config.num_hidden_layers == 1
    assert torch.equal(distilled.lm_head.weight, original.lm_head.weight)
    weights = [each.model.layers[0].mlp.up_proj.weight for each in (distilled, original)]
    assert not torch.equal(*weights)
    assert 0 < len(np.load("small/vocabulary.npy")) <= original.config.vocab_size
    assert draft_models.draft_model(original, "small").assistant.config.num_hidden_layers == 1
