"""scripts/gpu_bench with tiny models."""

import re
import signal

import gpu_bench
import pytest
import torch
from gpu_bench import (
    NEW_TOKENS,
    ForcedLlama,
    batch_of,
    compiled_methods,
    eager_methods,
    pass_milliseconds,
)
from suites import RecordedAnswer, random_model

from hf_refspec.apps.bench.measure import LOOK_UP
from hf_refspec.apps.shared.comparison import UNDRAFTED, decode

# Static caches as on a GPU, but not compiled: that takes minutes on a CPU.
STATIC = {"cache_implementation": "static", "max_cache_len": 192 + NEW_TOKENS}
SMALL = ["--size", "tiny", "--device", "cpu"]
UNLIMITED = 10_000  # seconds
TEST = """
import os
def test_of_a_device(): assert os.environ["HF_REFSPEC_DEVICE"] == "cpu"
def test_that_fails(): assert False
"""


def texts(count: int) -> list[RecordedAnswer]:
    """Answers that repeat a part of their prompts."""
    ids = torch.randint(3, 250, (count, 40), generator=torch.Generator().manual_seed(0)).tolist()
    return [RecordedAnswer(row[: 30 - i], row[4:16] + row[30:40]) for i, row in enumerate(ids)]


@pytest.fixture
def llama(tokenizer) -> ForcedLlama:
    return random_model("tiny", len(tokenizer), kind=ForcedLlama)


@pytest.mark.parametrize("methods", [eager_methods(), compiled_methods(STATIC)])
@pytest.mark.parametrize("rows", [1, 4])
def test_all_methods_write_the_text_that_is_forced(llama, methods, rows):
    [text] = texts(1)
    inputs, options = batch_of(llama, [text] * rows)
    for name, given in methods.items():
        if name == LOOK_UP and rows > 1:
            continue
        call = decode(llama, inputs, **options, **given, do_sample=False)
        assert call.ids == text.answer_ids * rows, name
        assert call.passes == 22 if name == UNDRAFTED else call.passes < 22 * rows, name


def test_a_forced_model_writes_as_it_would_where_it_is_not_on_the_text(llama):
    ids, places = torch.arange(3, 13)[None], torch.arange(10)[None]
    with torch.no_grad():
        unforced = llama(ids, position_ids=places).logits[0]
        llama.force([3, 4, 99, 6, 7])
        forced = llama(ids, position_ids=places).logits[0]
    assert forced.argmax(dim=-1)[[0, 1, 3]].tolist() == [4, 99, 7]
    off_the_text = [2, 4, *range(5, 10)]
    assert torch.equal(forced[off_the_text], unforced[off_the_text])


@pytest.mark.parametrize("options", [{}, STATIC], ids=["eager", "static"])
@pytest.mark.parametrize("width", [1, 8])
def test_passes_are_timed_whose_drafts_are_all_wrong(llama, monkeypatch, options, width):
    drafters = []

    class Kept(gpu_bench.WrongTokens):
        def __init__(self, nodes):
            super().__init__(nodes)
            drafters.append(self)

    monkeypatch.setattr(gpu_bench, "WrongTokens", Kept)
    assert pass_milliseconds(llama, texts(1)[0], width, **options) > 0
    stats = drafters[0].stats
    assert stats.accepted == 0
    # The last tokens of a text leave no room for all nodes.
    assert stats.drafted >= (width - 1) * gpu_bench.TIMED_PASSES


@pytest.fixture
def small_run(data, tokenizer, tmp_path, monkeypatch):
    """Runs it with a tiny model; returns its exit status and its report."""
    monkeypatch.setattr(gpu_bench, "FEWEST_TOKENS", 4)
    test = tmp_path / "test_device.py"
    test.write_text(TEST, encoding="utf-8")
    monkeypatch.setattr(gpu_bench, "TESTS", [test])
    monkeypatch.setattr(gpu_bench, "TEST_SECONDS", UNLIMITED)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:langsmith_plugin")  # it takes seconds to import
    monkeypatch.setattr(gpu_bench, "WIDTHS", (1, 8))
    monkeypatch.setattr(gpu_bench, "static_options", lambda *_: STATIC | {"max_cache_len": 1024})
    tokenizer.save_pretrained(data / "llama2-tokenizer")
    out = tmp_path / "out"

    def run(*options: str) -> tuple[int, str]:
        limit = ["--seconds", str(3 * UNLIMITED)]
        paths = ["--data", str(data), "--out", str(out)]
        status = gpu_bench.main([*SMALL, *paths, *limit, *options])
        return status, (out / "report.md").read_text(encoding="utf-8")

    return run


@pytest.mark.nightly
def test_a_run_writes_all_figures_in_their_order(small_run, capsys):
    status, report = small_run()
    assert status == 0
    assert re.findall("^## (.*)", report, re.M) == [
        "tests",
        "recorded answers, eager",
        "a pass, eager",
        "a pass, compiled",
        "recorded answers, compiled",
        "recorded answers, sampled",
        "recorded answers, four rows",
    ]
    assert re.search("^FAILED .*test_that_fails.*\n1 failed, 1 passed", report, re.M)
    for method in (UNDRAFTED, LOOK_UP, "auto", "64 nodes"):
        assert re.search(rf"^\| rag \| {method} \| .*\| 3 of 3 \|$", report, re.M)
    assert capsys.readouterr().out.count("recorded answers, eager: rag, tokens/s: plain") == 3
    assert small_run()[0] == 2  # the folder is there


def test_tests_that_take_too_long_are_ended(small_run, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_bench, "TEST_SECONDS", 0)
    monkeypatch.setattr(gpu_bench.Bench, "run", lambda _: None)
    endless = "import time\ndef test_of_a_device(): time.sleep(9999)"
    (tmp_path / "test_device.py").write_text(endless, encoding="utf-8")
    monkeypatch.setattr(gpu_bench, "LAST_WORDS", 1)
    status, report = small_run()
    assert status == 1
    assert re.findall("^## (.*)", report, re.M) == ["tests"]


def test_what_was_measured_stays_when_the_time_is_up(small_run, monkeypatch):
    def alarm(*_, **__):
        signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(gpu_bench.Bench, "passes", alarm)
    status, report = small_run()
    assert status == 0
    sections = re.findall("^## (.*)", report, re.M)
    assert sections == ["tests", "recorded answers, eager", "stopped"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_methods_that_fail_are_left_out(small_run, monkeypatch):
    monkeypatch.setattr(gpu_bench, "static_options", lambda *_: {"cache_implementation": "none"})
    status, report = small_run()
    assert status == 0
    assert "## a pass, compiled, 1 tokens\n\nValueError: " in report
    assert "## compiled, plain\n\nValueError: " in report
    assert "## recorded answers, compiled" not in report
    assert "## recorded answers, four rows" in report


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(tmp_path, data, capsys):
    assert gpu_bench.main(["--out", str(tmp_path / "out"), "--data", str(data)]) == 2
    message = capsys.readouterr().err
    assert "torch sees no GPU" in message and len(message.splitlines()) == 1
    assert not (tmp_path / "out").exists()
