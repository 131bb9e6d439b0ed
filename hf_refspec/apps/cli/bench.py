"""`hf-refspec bench` and `hf-refspec ablate`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ...store.datastore import Datastore
from ..bench.ablation import ablate
from ..bench.compare import compare
from ..bench.models import SIZES
from ..bench.registry import SUITES
from ..bench.run import run
from ..bench.suites import humaneval
from ..shared.default_model import HUB_ID
from .arguments import DTYPES, positive


def add_bench(parser: ArgumentParser) -> None:
    """Adds the arguments of `hf-refspec bench`."""
    parser.set_defaults(run=_bench)
    add = parser.add_argument
    add("suites", nargs="+", metavar="SUITE", help=f"{', '.join(SUITES)}; or compare A B")
    add("--out", type=Path, help="a new folder for results, report and plot")
    add("--data", type=Path, help="the folder with the data files")
    add("--limit", type=positive, metavar="N", help="only the first N questions of each suite")
    add("--model", help=f"a folder or a Hub id; default: {HUB_ID}")
    add("--random-model", choices=tuple(SIZES), help="a random Llama of that size instead")
    add("--tokenizer", help="for the random model; default: the default model's")
    add("--replay", action="store_true", help="force the recorded answers")
    add("--max-new-tokens", type=positive, metavar="N", help="default: 256, in a replay all")
    add("--methods", nargs="+", metavar="NAME", help="only these, by their names in the report")
    add("--nodes", nargs="+", type=_nodes, metavar="N", help="draft budgets; default: auto 8 16 64")
    add("--temperature", type=float, metavar="T", help="sample, with one seed for all methods")
    add("--batch-size", type=positive, metavar="N", help="spec-bench: so many questions at a time")
    add(
        "--static",
        type=positive,
        metavar="LENGTH",
        help="static caches of this length too, compiled: LENGTH tokens of prompt and answer",
    )
    add("--recycling-table", metavar="TABLE", help="a folder or a Hub id, to begin with as well")
    add("--device", choices=("cpu", "cuda"))
    add("--dtype", nargs="+", choices=DTYPES, help="one or several, each measured")
    add("--datastore", help="a folder or a Hub id, to draft from as well")
    add("--knowledge-base", metavar="PATH", help="ralm: a folder or a Hub id")
    add("--encoder", metavar="PATH", help="ralm: the sentence-transformers model that embedded it")
    add("--distractors", type=positive, default=0, metavar="N", help="ralm: add N random vectors")
    add("--milvus", metavar="URI", help="ralm: a server or a file, to search as well")
    add("--knn-datastore", metavar="PATH", help="knn: a folder, built with the model")
    add("--ablate", action="store_true", help="spec-bench, ralm, knn: measure every setting")


def _nodes(text: str) -> int | str:
    return text if text == "auto" else positive(text)


def _bench(args: Namespace) -> int:
    if args.suites[0] == "compare":
        print(compare(args.suites[1:]))
        return 0
    return run(args)


def add_ablate(parser: ArgumentParser) -> None:
    """Adds the arguments of `hf-refspec ablate`."""
    parser.set_defaults(run=_ablate)
    add = parser.add_argument
    add("store", help="the folder of a datastore with its full form")
    add("--data", type=Path, required=True, help="HumanEval.jsonl.gz")
    add("--tokenizer", help="default: the one that the datastore carries or names")
    add("--max-draft-tokens", type=positive, default=64, metavar="N")
    add("--limit", type=positive, metavar="N", help="only the first N problems")
    add("--out", type=Path, required=True, help="a new folder for table and plot")


def _ablate(args: Namespace) -> int:
    store = Datastore(args.store, form="full")
    tokenizer = store.load_tokenizer(args.tokenizer)
    answers = humaneval(args.data, tokenizer)[: args.limit]
    ablate(store, tokenizer, answers, args.max_draft_tokens, args.out)
    return 0
