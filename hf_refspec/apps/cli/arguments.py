"""Arguments that several commands share."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars
from rich.console import Console

from ...store.names import ask_hub, is_here

DTYPES = ("float32", "bfloat16", "float16")


def positive(text: str) -> int:
    """Reads an integer of at least 1."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise ArgumentTypeError(f"must be a whole number of at least 1, but is {text!r}")
    return number


def add_source(parser: ArgumentParser) -> None:
    """Adds the arguments that name a corpus: files and folders, or a dataset."""
    add = parser.add_argument
    add("source", nargs="*", type=Path, help="text files and folders")
    add("--dataset", metavar="NAME", help="a dataset on the Hub or on disk")
    add("--config", metavar="NAME", help="the dataset's configuration")
    add("--split", default="train", help="the dataset's split")
    add("--column", help="the dataset's column with texts or chats")
    add("--pattern", default="*", help='which files of a folder, for example "*.md"')


def check_source(args: Namespace) -> None:
    """Raises `ValueError` unless the arguments name either files and folders or a dataset."""
    if bool(args.source) == (args.dataset is not None):
        raise ValueError("give one of: files or folders, --dataset NAME")


def load_dataset(args: Namespace, streaming: bool = False) -> Any:
    """Loads the dataset of --dataset; where the Hub does not answer, from the cache."""
    try:
        import datasets
    except ImportError:
        raise ImportError('--dataset needs datasets: pip install "hf_refspec[datastore]"') from None
    silent = None
    if not is_here(args.dataset):
        silent = ask_hub(args.dataset, "dataset", "README.md", repo_type="dataset")
        if silent is not None:  # the cache may have it
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    # One line on a terminal in place of the libraries' progress bars; none in logs.
    datasets.disable_progress_bars()
    disable_progress_bars()
    console = Console(stderr=True, quiet=not sys.stderr.isatty())
    try:
        with console.status(f"loading the dataset {args.dataset}"):
            return datasets.load_dataset(
                args.dataset, args.config, split=args.split, streaming=streaming
            )
    except OSError as error:
        if silent is None:
            raise
        raise OSError(
            f"{args.dataset!r} is no folder here and no dataset in the cache, and the Hub cannot "
            f"be reached: {silent}"
        ) from error
