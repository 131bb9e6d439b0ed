"""scripts/gpu_bench with tiny models."""

from __future__ import annotations

from math import inf

import gpu_bench
import pytest
import torch
from gpu_bench import NEW_TOKENS, ForcedLlama, batch_of, gpu_methods, measure, warm_up
from suites import RecordedAnswer, random_model

from hf_refspec.apps.bench.measure import LOOK_UP
from hf_refspec.apps.shared.comparison import PLAIN, decode

# Static caches as on a GPU, but not compiled: that takes minutes on a CPU.
STATIC = {"cache_implementation": "static", "max_cache_len": 64 + NEW_TOKENS}


def texts(count: int) -> list[RecordedAnswer]:
    """Answers that repeat a part of their prompts."""
    ids = torch.randint(3, 250, (count, 40), generator=torch.Generator().manual_seed(0)).tolist()
    return [RecordedAnswer(row[: 30 - i], row[4:16] + row[30:40]) for i, row in enumerate(ids)]


@pytest.fixture
def llama(tokenizer) -> ForcedLlama:
    return random_model("tiny", len(tokenizer), kind=ForcedLlama)


def test_all_methods_write_the_text_that_is_forced(llama):
    [text] = texts(1)
    inputs, options = batch_of(llama, [text])
    passes = {}
    for name, given in gpu_methods(STATIC).items():
        call = decode(llama, inputs, **options, **given, do_sample=False)
        assert call.ids == text.answer_ids, name
        passes[name] = call.passes
    for name in (PLAIN, f"{PLAIN}, compiled", f"{PLAIN}, reproducible"):
        assert passes[name] == 22
    for name in (LOOK_UP, "64 draft tokens", "64 draft tokens, compiled"):
        assert passes[name] < 22


def test_several_rows_are_decoded_eagerly_by_a_model_that_writes_freely(byte_llama):
    cells, left_out = measure(byte_llama, {"rag": texts(5)}, 2, inf)
    assert [row[1] for row in cells] == [PLAIN, "auto", "64 draft tokens"] and not left_out
    assert {row[-1] for row in cells} == {"2 of 2"}


def test_a_forced_model_writes_as_it_would_where_it_is_not_on_the_text(llama):
    ids, places = torch.arange(3, 13)[None], torch.arange(10)[None]
    with torch.no_grad():
        unforced = llama(ids, position_ids=places).logits[0]
        llama.force([3, 4, 99, 6, 7])
        forced = llama(ids, position_ids=places).logits[0]
    assert forced.argmax(dim=-1)[[0, 1, 3]].tolist() == [4, 99, 7]
    off_the_text = [2, 4, *range(5, 10)]
    assert torch.equal(forced[off_the_text], unforced[off_the_text])


def test_methods_that_fail_or_have_no_time_are_left_out(llama):
    methods = gpu_methods({"cache_implementation": "none such"})
    names, left_out = warm_up(llama, methods, 1, 40, inf)
    assert names == [PLAIN, "auto", "64 draft tokens", LOOK_UP]
    assert len(left_out) == len(methods) - 4 and all("Error" in each for each in left_out)
    names, left_out = warm_up(llama, methods, 1, 40, 0.0)
    assert names == [PLAIN] and "no time to warm it up" in left_out[0]
    assert measure(llama, {"rag": texts(1)}, 1, 0.0) == ([], ["the time was up"])


def test_a_small_run_writes_its_report(data, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_bench, "static_options", lambda *_: STATIC | {"max_cache_len": 1024})
    monkeypatch.setattr(gpu_bench, "FEWEST_TOKENS", 4)
    monkeypatch.setattr(gpu_bench, "BATCHES", 1)
    tokenizer.save_pretrained(data / "llama2-tokenizer")
    out = tmp_path / "out"
    assert gpu_bench.main(["--small", "--data", str(data), "--out", str(out)]) == 0
    report = (out / "report.md").read_text(encoding="utf-8")
    assert "## random tiny, recorded answers, 1 text at a time" in report
    assert all(f"| {suite} | plain |" in report for suite in ("rag", "no-overlap", "spec-bench"))
    assert gpu_bench.main(["--small", "--data", str(data), "--out", str(out)]) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(tmp_path, data, capsys):
    assert gpu_bench.main(["--out", str(tmp_path / "out"), "--data", str(data)]) == 2
    message = capsys.readouterr().err
    assert "torch sees no GPU" in message and len(message.splitlines()) == 1
    assert not (tmp_path / "out").exists()
