"""Which charts a run has, and that they are drawn whatever was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_samples import entry, results, retrieval_sample, sample
from PIL import Image

from hf_refspec.apps.bench.charts import charts
from hf_refspec.apps.bench.methods import (
    BASELINE,
    DEFAULT,
    LOOK_UP,
    OURS,
    PLAIN,
    recycling_settings,
)
from hf_refspec.apps.bench.plots import plot_sizes
from hf_refspec.apps.bench.style import kind

PLAINLY = sample(PLAIN, 11, 11, 1.0, 10.0, nodes=0)
DRAFTED = sample(DEFAULT, 11, 5, 1.0, 4.0, nodes="auto")
NO_DECODING = sample(DEFAULT, 1, 1, 1.0, 0.0)
LONG = sample(f"{DEFAULT}, with a table and a name that goes on and on and on", 11, 5, 1.0, 20.0)


def drafting(dtypes: tuple[str, ...], *names: str, samples=(PLAINLY, DRAFTED)) -> dict:
    measured = [entry("a", list(samples))]
    of_dtypes = [results(dtype, **dict.fromkeys(names, measured)) for dtype in dtypes]
    suites = {name: suite for each in of_dtypes for name, suite in each["suites"].items()}
    return {**of_dtypes[0], "suites": suites}


def retrieving() -> dict:
    samples = [retrieval_sample(BASELINE, 8.0), retrieval_sample(OURS, 2.0)]
    measured = [
        entry("a", [*samples, PLAINLY], setting=setting, size=9) for setting in ("flat", "bm25")
    ]
    return results(ralm=measured)


def settings() -> dict:
    methods = [each for values in recycling_settings().values() for each in values.values()]
    samples = [sample(each.name, 8, 4, 1.0, 3.0, nodes=each.nodes) for each in methods]
    ablated = drafting(("float32", "bfloat16"), "spec-bench", samples=[PLAINLY, *samples])
    return {**ablated, "settings": {"ablate": True}}


BOTH = drafting(("float32",), "rag")
BOTH["suites"] |= retrieving()["suites"]


@pytest.mark.parametrize(
    ("measured", "files"),
    [
        (drafting(("float32",), "rag"), ["speed_ups.png"]),
        (drafting(("float32", "bfloat16"), "rag"), ["speed_ups.png"]),
        (drafting(("float32",), "rag", "x", "y"), ["speed_ups.png", "speed_ups_by_suite.png"]),
        (drafting(("float32",), "rag", samples=[PLAINLY]), ["speed_ups.png"]),
        (drafting(("float32",), "rag", samples=[PLAINLY, NO_DECODING, LONG]), ["speed_ups.png"]),
        (drafting(("float32",), "rag", samples=[NO_DECODING]), ["speed_ups.png"]),
        (retrieving(), ["speed_ups_ralm.png"]),
        (BOTH, ["speed_ups.png", "speed_ups_ralm.png"]),
        (settings(), ["settings.png"]),
        (results(rag=[]), []),
    ],
    ids=["one", "dtypes", "suites", "plain", "long", "nan", "ralm", "both", "settings", "nothing"],
)
@pytest.mark.filterwarnings("error::UserWarning")  # matplotlib's, of what has no place
def test_a_run_s_charts(tmp_path, measured, files):
    drawn = charts(measured)
    assert [chart.file for chart in drawn] == files
    for chart in drawn:
        chart.draw(tmp_path / chart.file)
        assert_opaque(tmp_path / chart.file)


def assert_opaque(path: Path) -> None:
    """Dark pages show it as light ones do, at half its width."""
    with Image.open(path) as picture:
        assert picture.width == 1600
        assert picture.convert("RGBA").getpixel((1, 1)) == (255, 255, 255, 255)


def test_a_datastore_of_one_size_is_drawn(tmp_path):
    forms = {form: [(0.5, 1.5)] for form in ("full, REST", "full, mixed", "compact")}
    plot_sizes(forms, tmp_path / "sizes.png")
    assert_opaque(tmp_path / "sizes.png")


def test_plain_decoding_and_transformers_drafts_are_neutral_and_ours_have_the_accent():
    assert kind(PLAIN) == kind(LOOK_UP) == kind(BASELINE) == "plain or transformers'"
    published = ["LLMA's algorithm", "REST's algorithm", "as published, psa"]
    assert {kind(each) for each in published} == {"published algorithms"}
    ours = [DEFAULT, "ReferenceCopy", "blend", OURS, f"{BASELINE} + ReferenceCopy"]
    assert {kind(each) for each in ours} == {"hf_refspec"}
