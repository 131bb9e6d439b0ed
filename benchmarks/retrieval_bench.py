"""Measures speculative retrieval: the suites `ralm` (iterative RaLM) and `knn` (kNN-LM).

    python benchmarks/retrieval_bench.py ralm --knowledge-base BASE --data DATA --out DIR ...
    python benchmarks/retrieval_bench.py knn --knn-datastore KNN --out DIR ...

It takes the arguments of `hf-refspec bench` that choose model and prompts, and writes its report.
"""

from __future__ import annotations

import argparse
import sys

from knn_suite import knn_prompts, knn_settings, library_files
from ralm_suite import add_retrievers, ralm_settings
from retrieval_settings import Prompt, RetrievalBench, suites_of
from transformers import PreTrainedTokenizerBase

from hf_refspec.apps.bench import suites
from hf_refspec.apps.bench.registry import Job, data_file, questions
from hf_refspec.apps.bench.run import load_bench, measure_suites, prepare
from hf_refspec.apps.bench.suites import answered, chat_prompt
from hf_refspec.apps.cli.bench import add_measuring


def _ralm(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Job]]:
    """In a replay LLMA's questions, then Spec-Bench's; else only the latter."""
    settings = ralm_settings(args, tokenizer)
    prompts: list[Prompt] = []
    if args.replay:
        recorded = suites.llma_rag(data_file(args, "llma_rag.jsonl"), tokenizer, passages=False)
        prompts += [
            (str(i), each.prompt_ids, each.answer_ids) for i, each in enumerate(recorded, 1)
        ]
    for each in _asked(args) if args.prompts else questions(args):
        answer_ids = answered(each, 0, tokenizer) if args.replay else None
        prompts.append((each.id, chat_prompt(each.turns[:1], tokenizer), answer_ids))
    return suites_of(args.suite, settings, prompts[: args.limit], args.methods)


def _drawn(args: argparse.Namespace, column: str) -> list[str]:
    """The texts of a dataset's column, each once, in an order that the seed draws."""
    import datasets

    drawn = datasets.load_dataset(args.prompts, args.config, split=args.split)
    return list(dict.fromkeys(drawn.shuffle(args.seed)[column]))


def _asked(args: argparse.Namespace) -> list[suites.Question]:
    texts = enumerate(_drawn(args, "question"), 1)
    return [suites.Question(str(i), [text]) for i, text in texts]


def _knn(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Job]]:
    settings = knn_settings(args, tokenizer)
    texts = enumerate(_drawn(args, "text"), 1) if args.prompts else library_files()
    prompts: list[Prompt] = [(str(name), ids, None) for name, ids in knn_prompts(texts, tokenizer)]
    return suites_of(args.suite, settings, prompts[: args.limit], args.methods)


def main(arguments: list[str] | None = None) -> int:
    """Measures one of the two suites; returns the exit status of `hf-refspec bench`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("suite", choices=("ralm", "knn"))
    add_measuring(parser)
    add_retrievers(parser)
    add("--prompts", metavar="DATASET", help="ralm: its column `question`; knn: its `text`")
    add("--config", metavar="NAME", help="the dataset's configuration")
    add("--split", default="validation", help="the dataset's split")
    add("--seed", type=int, default=0, metavar="N", help="draws the order of its rows")
    add("--knn-datastore", metavar="PATH", help="knn: a folder, built with the model")
    add("--methods", nargs="+", metavar="NAME", help="only these, by their names in the report")
    add("--ablate", action="store_true", help="measure every setting of speculation")
    args = parser.parse_args(arguments)
    read = {"ralm": _ralm, "knn": _knn}[args.suite]
    needed = {"ralm": "knowledge_base", "knn": "knn_datastore"}[args.suite]
    if getattr(args, needed) is None:
        parser.error(f"{args.suite} needs --{needed.replace('_', '-')}")
    if args.prompts and args.replay:
        parser.error("--prompts has no recorded answers; leave out --replay")
    tokenizer = prepare(args)
    # The methods belong to one model, and so to one dtype.
    jobs = {dtype: read(args, tokenizer) for dtype in args.dtype}

    def load(dtype: str) -> RetrievalBench:
        return RetrievalBench(**vars(load_bench(args, dtype, tokenizer, list)))

    return measure_suites(args, jobs, load)


if __name__ == "__main__":
    sys.exit(main())
