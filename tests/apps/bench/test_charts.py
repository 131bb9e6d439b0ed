"""Which charts a run has, and that they are drawn whatever was measured."""

from __future__ import annotations

import pytest
from bench_samples import entry, results, retrieving, sample
from PIL import Image

from hf_refspec.apps.bench.methods import DEFAULT, PLAIN
from hf_refspec.apps.bench.plots import charts, plot_speed_ups

PLAINLY = sample(PLAIN, 11, 11, 1.0, 10.0, nodes=0)
DRAFTED = sample(DEFAULT, 11, 5, 1.0, 4.0, nodes="auto")
NO_DECODING = sample(DEFAULT, 1, 1, 1.0, 0.0)
LONG = sample(f"{DEFAULT}, with a table and a name that goes on and on and on", 11, 5, 1.0, 20.0)


def drafting(dtypes: tuple[str, ...], *names: str, samples=(PLAINLY, DRAFTED)) -> dict:
    measured = [entry("a", list(samples))]
    of_dtypes = [results(dtype, **dict.fromkeys(names, measured)) for dtype in dtypes]
    suites = {name: suite for each in of_dtypes for name, suite in each["suites"].items()}
    return {**of_dtypes[0], "suites": suites}


def of_retrievers() -> dict:
    samples = [
        retrieving("baseline", 8.0, searches=4),
        retrieving("ours", 2.0, searches=2),
        {**PLAINLY, "other_tokens": None},
    ]
    return results(**{f"ralm, {name}": [entry("a", samples)] for name in ("flat", "bm25")})


BOTH = drafting(("float32",), "rag")
BOTH["suites"] |= of_retrievers()["suites"]


@pytest.mark.parametrize(
    ("measured", "files"),
    [
        (drafting(("float32", "bfloat16"), "rag"), ["speed_ups.png"]),
        (drafting(("float32",), "rag", "x", "y"), ["speed_ups.png"]),
        (drafting(("float32",), "rag", samples=[PLAINLY, NO_DECODING, LONG]), ["speed_ups.png"]),
        (drafting(("float32",), "rag", samples=[NO_DECODING]), ["speed_ups.png"]),
        (of_retrievers(), ["speed_ups_ralm.png"]),
        (BOTH, ["speed_ups.png", "speed_ups_ralm.png"]),
        (results(rag=[]), []),
    ],
    ids=["dtypes", "suites", "long", "nan", "retrieving", "both", "nothing"],
)
@pytest.mark.filterwarnings("error::UserWarning")  # matplotlib's, of what has no place
def test_a_run_s_charts_are_opaque_and_1600_pixels_wide(tmp_path, measured, files):
    drawn = charts(measured)
    assert list(drawn) == files
    for file, chart in drawn.items():
        plot_speed_ups(chart, tmp_path / file)
        with Image.open(tmp_path / file) as picture:
            assert picture.width == 1600
            assert picture.convert("RGBA").getpixel((1, 1)) == (255, 255, 255, 255)
