"""Measures speculative retrieval: the suites `ralm` (iterative RaLM) and `knn` (kNN-LM).

    python benchmarks/retrieval_bench.py ralm --knowledge-base BASE --data DATA --out DIR ...
    python benchmarks/retrieval_bench.py knn --knn-datastore KNN --out DIR ...

It takes the arguments of `hf-refspec bench` that choose model and prompts, and writes its report.
"""

from __future__ import annotations

import argparse
import sys

from knn_suite import knn_prompts, knn_settings
from ralm_suite import ralm_settings
from retrieval_settings import Prompt, RetrievalBench, suites_of
from transformers import PreTrainedTokenizerBase

from hf_refspec.apps.bench import suites
from hf_refspec.apps.bench.registry import Job, data_file, questions
from hf_refspec.apps.bench.run import load_bench, measure_suites, prepare
from hf_refspec.apps.bench.suites import answered, chat_prompt
from hf_refspec.apps.cli.arguments import positive
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
    for each in questions(args):
        answer_ids = answered(each, 0, tokenizer) if args.replay else None
        prompts.append((each.id, chat_prompt(each.turns[:1], tokenizer), answer_ids))
    return suites_of(args.suite, settings, prompts[: args.limit])


def _knn(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Job]]:
    settings = knn_settings(args, tokenizer)
    prompts: list[Prompt] = [(name, ids, None) for name, ids in knn_prompts(tokenizer)]
    return suites_of(args.suite, settings, prompts[: args.limit])


def main(arguments: list[str] | None = None) -> int:
    """Measures one of the two suites; returns the exit status of `hf-refspec bench`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("suite", choices=("ralm", "knn"))
    add_measuring(parser)
    add("--knowledge-base", metavar="PATH", help="ralm: a folder or a Hub id")
    add("--encoder", metavar="PATH", help="ralm: the sentence-transformers model that embedded it")
    add("--distractors", type=positive, default=0, metavar="N", help="ralm: add N random vectors")
    add("--milvus", metavar="URI", help="ralm: a server or a file, to search as well")
    add("--knn-datastore", metavar="PATH", help="knn: a folder, built with the model")
    add("--ablate", action="store_true", help="measure every setting of speculation")
    args = parser.parse_args(arguments)
    read = {"ralm": _ralm, "knn": _knn}[args.suite]
    needed = {"ralm": "knowledge_base", "knn": "knn_datastore"}[args.suite]
    if getattr(args, needed) is None:
        parser.error(f"{args.suite} needs --{needed.replace('_', '-')}")
    tokenizer = prepare(args)
    # The methods belong to one model, and so to one dtype.
    jobs = {dtype: read(args, tokenizer) for dtype in args.dtype}
    if args.milvus is not None:
        args.milvus = "used"  # its address may contain a password

    def load(dtype: str) -> RetrievalBench:
        return RetrievalBench(**vars(load_bench(args, dtype, tokenizer, list)))

    return measure_suites(args, jobs, load)


if __name__ == "__main__":
    sys.exit(main())
