"""MAT of token recycling beside `ReferenceCopy()` with one of its settings changed at a time.

    python benchmarks/recycling_settings.py --data DATA --out DIR [--limit N] [--dtype DTYPE] ...

answers Spec-Bench's questions freely, and adds settings.png to what `hf-refspec bench` writes. It
takes its arguments.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hf_refspec.apps.bench.methods import PLAIN, Method
from hf_refspec.apps.bench.plots import ACCENT, GREEN, MARKERS, ORANGE, line_legend, new_figure
from hf_refspec.apps.bench.registry import SUITES
from hf_refspec.apps.bench.results import read_results
from hf_refspec.apps.bench.run import load_bench, measure_suites, prepare
from hf_refspec.apps.bench.summary import suites_by_dtype, summaries
from hf_refspec.apps.cli.bench import add_measuring
from hf_refspec.drafting.reference_copy import ReferenceCopy
from hf_refspec.drafting.token_recycling import TokenRecycling

DEFAULTS = "defaults", 64


def settings() -> dict[str, dict[str, Method]]:
    """Each option, its values, and a method for each value; `"nodes"` has the defaults."""

    def method(name: str, nodes: int, recycling: TokenRecycling) -> Method:
        return Method(name, nodes, ReferenceCopy() | recycling)

    without = TokenRecycling()
    without.prompt_fraction = 0.0
    sizes = (1 << 8, 1 << 10, 1 << 12, 1 << 14)
    drafters: dict[str, dict[Any, TokenRecycling]] = {
        "context": {n: TokenRecycling(context=n) for n in (1, 2)},
        "top_k": {k: TokenRecycling(top_k=k) for k in (1, 2, 4, 16)},
        "max_contexts": {size: TokenRecycling(max_contexts=size) for size in sizes},
        "prompt's logits": {"without": without},
    }
    name, most = DEFAULTS
    nodes = {str(n): method(name, n, TokenRecycling()) for n in (4, 8, 16, 32, most)}
    return {"nodes": nodes} | {
        option: {
            str(value): method(f"{option} {value}", most, recycling)
            for value, recycling in values.items()
        }
        for option, values in drafters.items()
    }


def all_methods() -> list[Method]:
    """Plain decoding and every setting."""
    return [Method(PLAIN), *(method for of in settings().values() for method in of.values())]


def plot(results: dict[str, Any], path: Path) -> None:
    """Draws a panel for each option and a line for each dtype; the defaults are a dotted line."""
    by_dtype = {
        dtype: summaries(entries)
        for dtype, suites in suites_by_dtype(results["suites"]).items()
        for entries in suites.values()
    }
    options = settings()
    widths = [max(len(methods), 3.6) for methods in options.values()]
    with new_figure(path, 3) as figure:
        panels = figure.subplots(1, len(options), sharey=True, width_ratios=widths)
        for axes, (option, methods) in zip(panels, options.items(), strict=True):
            looks = zip((ACCENT, ORANGE, GREEN), MARKERS, strict=False)
            for (dtype, measured), (color, marker) in zip(by_dtype.items(), looks, strict=False):
                mats = [measured[method.name, method.nodes].mat for method in methods.values()]
                axes.plot(list(methods), mats, color=color, marker=marker, label=dtype)
                axes.axhline(measured[DEFAULTS].mat, linestyle=":", color=color)
            axes.set_title(option)
            axes.margins(x=0.5 / len(methods))
            axes.tick_params(axis="x", labelsize=8)
        panels[0].set(ylabel="MAT (dotted: the defaults)")
        line_legend(figure, panels[0])


def main(arguments: list[str] | None = None) -> int:
    """Measures every setting; returns the exit status of `hf-refspec bench`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_measuring(parser)
    args = parser.parse_args(arguments)
    if args.replay:
        parser.error("the logits of a model that is forced say nothing; leave out --replay")
    args.batch_size = None
    tokenizer = prepare(args)
    questions = {"spec-bench": SUITES["spec-bench"](args, tokenizer)}

    def load(dtype: str) -> Any:
        bench = load_bench(args, dtype, tokenizer, all_methods)
        bench.warm_up()
        return bench

    status = measure_suites(args, dict.fromkeys(args.dtype, questions), load)
    if status == 0:
        plot(read_results(args.out), args.out / "settings.png")
    return status


if __name__ == "__main__":
    sys.exit(main())
