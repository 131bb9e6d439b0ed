"""`hf-refspec`: the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 if it did not hold, 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except (ImportError, OSError, ValueError) as error:
        print(f"hf-refspec: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-refspec", description="Lossless speculative decoding by look-up."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="name")

    demo = commands.add_parser("demo", help="complete and edit Python files, plainly and drafted")
    demo.add_argument("--file", type=Path, help="your own file instead of standard library files")
    demo.add_argument("--model", help="a folder or a Hub id instead of the bundled model")
    demo.add_argument("--max-new-tokens", type=_positive, default=160, metavar="N")
    demo.add_argument("--no-color", action="store_true")
    demo.add_argument(
        "--datastore",
        action="store_true",
        help="draft from a datastore of the standard library as well, built for the model first",
    )
    demo.set_defaults(command=_demo)

    generate = commands.add_parser("generate", help="generate text, drafting from references")
    generate.add_argument("--model", required=True, help="a folder or a Hub id")
    generate.add_argument("--prompt-file", required=True, type=Path)
    generate.add_argument(
        "--reference", nargs="+", type=Path, default=[], metavar="FILE", help="texts to copy from"
    )
    generate.add_argument("--max-draft-tokens", type=_draft_tokens, default="auto", metavar="N")
    generate.add_argument("--max-new-tokens", type=_positive, default=256, metavar="N")
    generate.set_defaults(command=_generate)

    build = commands.add_parser("build", help="build a datastore out of a corpus")
    _add_source(build)
    build.add_argument("--out", required=True, type=Path, help="the new folder")
    build.add_argument("--shard-tokens", type=_positive, default=32_000_000, metavar="N")
    build.add_argument("--license", help="of the corpus, for the card")
    build.add_argument("--corpus", help="what the corpus is called, for the card")
    build.set_defaults(command=_datastore_command)

    extend = commands.add_parser("extend", help="add documents to a datastore")
    extend.add_argument("store", help="its folder")
    _add_source(extend)
    extend.set_defaults(command=_datastore_command)

    compact = commands.add_parser("compact", help="make the compact form of a datastore")
    compact.add_argument("store", help="its folder")
    compact.add_argument("--out", type=Path, help="a new folder; else it is added to the store")
    compact.add_argument("--max-ngram", type=_positive, default=3, metavar="N")
    compact.add_argument("--ngrams-per-order", type=_positive, metavar="N")
    compact.add_argument("--max-bytes", type=_positive, metavar="N")
    compact.set_defaults(command=_datastore_command)

    info = commands.add_parser("info", help="what is in a datastore")
    info.add_argument("store", help="a folder or a Hub id")
    info.add_argument("--verify", action="store_true", help="read all files, check the checksums")
    info.set_defaults(command=_datastore_command)

    search = commands.add_parser("search", help="what a datastore knows of a text, and drafts")
    search.add_argument("store", help="a folder or a Hub id")
    search.add_argument("text")
    search.add_argument("--tokenizer", help="else the one that the datastore names")
    search.add_argument("--form", choices=("full", "compact"))
    search.add_argument("--nodes", type=_positive, default=24, metavar="N")
    search.set_defaults(command=_datastore_command)

    ablate = commands.add_parser("ablate", help="MAT against the size of a datastore, both forms")
    ablate.add_argument("store", help="the folder of a datastore with its full form")
    ablate.add_argument("--data", required=True, type=Path, help="HumanEval.jsonl.gz")
    ablate.add_argument("--tokenizer", help="else the one that the datastore names")
    ablate.add_argument("--max-draft-tokens", type=_positive, default=64, metavar="N")
    ablate.add_argument("--limit", type=_positive, metavar="N", help="so many prompts only")
    ablate.add_argument("--out", required=True, type=Path, help="a folder for table and plot")
    ablate.set_defaults(command=_ablate)

    ralm = commands.add_parser(
        "ralm", help="answer questions out of texts, with speculative retrieval and without"
    )
    ralm.add_argument("source", nargs="*", type=Path, help="text files and folders")
    ralm.add_argument("--dataset", metavar="NAME", help="a dataset of the Hub or of this machine")
    ralm.add_argument("--config", metavar="NAME", help="the dataset's configuration")
    ralm.add_argument("--split", default="train")
    ralm.add_argument("--column", help="of the dataset, with texts")
    ralm.add_argument("--pattern", default="*", help='files of a folder, as "*.md"')
    ralm.add_argument("--chunk-length", type=_positive, metavar="N", help="of a passage, in tokens")
    ralm.add_argument(
        "--knowledge-base", help="one that there is, or where to build it (else it is not kept)"
    )
    ralm.add_argument(
        "--question", action="append", default=[], metavar="TEXT", help="can be given repeatedly"
    )
    ralm.add_argument("--question-file", type=Path, metavar="FILE", help="a question a line")
    ralm.add_argument("--model", help="a folder or a Hub id instead of the bundled model")
    ralm.add_argument("--retriever", choices=("bm25", "dense", "hnsw"), default="bm25")
    ralm.add_argument(
        "--encoder", help="a sentence-transformers model, folder or Hub id, for dense and hnsw"
    )
    ralm.add_argument("--max-new-tokens", type=_positive, default=64, metavar="N")
    ralm.add_argument(
        "--generation-stride",
        type=_positive,
        default=4,
        metavar="N",
        help="tokens between two retrievals",
    )
    ralm.add_argument(
        "--speculation",
        default="psa",
        metavar="LETTERS",
        help="p: prefetching, s: stride scheduler, a: asynchronous verification",
    )
    ralm.add_argument("--copy", action="store_true", help="draft tokens from the passages, too")
    ralm.set_defaults(command=_ralm)

    bench = commands.add_parser("bench", help="measure suites, or compare two results")
    bench.add_argument(
        "suites",
        nargs="+",
        metavar="SUITE",
        help="rag, humaneval, spec-bench, multi-turn, cached-sessions, no-overlap, latency, ralm, "
        "knn; or compare A.json B.json",
    )
    bench.add_argument("--out", type=Path, help="a folder for results, report and plots")
    bench.add_argument("--data", type=Path, help="the folder of the suites' files")
    bench.add_argument("--model", help="a folder or a Hub id instead of the bundled model")
    bench.add_argument(
        "--random-model",
        metavar="SIZE",
        help="a Llama of that size with random weights instead: tiny, 500M, 1B, 8B or another",
    )
    bench.add_argument("--tokenizer", help="of the random model; else that of the bundled one")
    bench.add_argument("--datastore", help="a folder or a Hub id, to draft from as well")
    bench.add_argument("--replay", action="store_true", help="force the recorded answers")
    bench.add_argument("--limit", type=_positive, metavar="N", help="so many questions a suite")
    bench.add_argument("--resume", action="store_true", help="go on with what was stopped")
    bench.add_argument("--device", choices=("cpu", "cuda"))
    bench.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    bench.add_argument("--knowledge-base", metavar="PATH", help="a folder or a Hub id, for ralm")
    bench.add_argument(
        "--encoder", metavar="PATH", help="the sentence-transformers model that embedded it"
    )
    bench.add_argument(
        "--distractors",
        type=_positive,
        default=0,
        metavar="N",
        help="pad ralm's exact index with so many random vectors",
    )
    bench.add_argument(
        "--milvus", metavar="URI", help="a server or a file, for ralm to search as well"
    )
    bench.add_argument(
        "--knn-datastore", metavar="PATH", help="a folder, made with the model, for knn"
    )
    bench.add_argument(
        "--repeat", type=_positive, default=1, metavar="N", help="runs of ralm and knn"
    )
    bench.set_defaults(command=_bench)
    return parser


def _add_source(command: argparse.ArgumentParser) -> None:
    """What a datastore is built from, and how."""
    command.add_argument("source", nargs="*", type=Path, help="text files and folders")
    command.add_argument("--preset", choices=("python-stdlib",))
    command.add_argument(
        "--dataset", metavar="NAME", help="a dataset of the Hub or of this machine"
    )
    command.add_argument("--config", metavar="NAME", help="the dataset's configuration")
    command.add_argument("--split", default="train")
    command.add_argument("--streaming", action="store_true", help="do not download it first")
    command.add_argument("--column", help="of the dataset, with texts or chats")
    command.add_argument("--pattern", default="*", help='files of a folder, as "*.py"')
    command.add_argument("--tokenizer", required=True, help="a folder or a Hub id")
    command.add_argument("--num-proc", type=_positive, metavar="N")
    command.add_argument("--deduplicate", action="store_true", help="drop repeated documents")
    command.add_argument("--resume", action="store_true", help="go on with a build that was killed")
    command.add_argument("--engine", choices=("local", "ray"), default="local")


def _draft_tokens(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {number}")
    return number


def _demo(options: argparse.Namespace) -> int:
    from .demo.run import run_demo  # here: torch takes seconds to load, and --help should not

    color = False if options.no_color else None
    same = run_demo(options.file, options.model, options.max_new_tokens, color, options.datastore)
    return 0 if same else 1


def _datastore_command(options: argparse.Namespace) -> int:
    from .commands import datastore as commands

    return getattr(commands, options.name)(options)


def _ablate(options: argparse.Namespace) -> int:
    from .bench.ablation import ablate

    return ablate(options)


def _ralm(options: argparse.Namespace) -> int:
    from .commands import ralm as commands

    return commands.ralm(options)


def _bench(options: argparse.Namespace) -> int:
    from .bench.run import command

    return command(options)


def _generate(options: argparse.Namespace) -> int:
    prompt = options.prompt_file.read_text(encoding="utf-8")
    references = [path.read_text(encoding="utf-8") for path in options.reference]

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

    from . import ReferenceCopy

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    drafter = ReferenceCopy(references or None, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    model.generate(
        **inputs,
        max_new_tokens=options.max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        candidate_generator=drafter,
        max_draft_tokens=options.max_draft_tokens,
    )
    print(drafter.stats, file=sys.stderr)
    return 0
