"""What `generate` and `chat` have in common: their drafters, sampling, and texts from files."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ...drafting.datastore_drafts import DatastoreDrafts
from ...drafting.drafter import Drafter
from ...drafting.sessions.retrieval_cache import RetrievalCache
from ...generation.default_drafter import default_sources
from ...store.datastore import Datastore
from .arguments import positive

_SAMPLING = ("temperature", "top_k", "top_p")


def add_answering(parser: ArgumentParser, max_new_tokens: int) -> None:
    """Adds the arguments that say what the model is, what it reads, and how it answers."""
    add = parser.add_argument
    add("--model", help="a folder or a Hub id; SmolLM2-135M-Instruct by default")
    add("--max-new-tokens", type=positive, default=max_new_tokens, metavar="N")
    texts = parser.add_argument_group("texts")
    add = texts.add_argument
    add(
        "--context",
        type=Path,
        metavar="FILE",
        help="a text that the model reads, before the prompt, and drafts are copied from",
    )
    add_sources(texts)
    sampling = parser.add_argument_group("sampling, as transformers has it")
    add = sampling.add_argument
    add("--do-sample", action="store_true", help="sample instead of taking the most probable token")
    add("--temperature", type=float, metavar="X")
    add("--top-k", type=int, metavar="N", help="0 for all tokens")
    add("--top-p", type=float, metavar="X")
    add("--seed", type=int, metavar="N", help="the same seed gives the same text")


def add_sources(texts: _ArgumentGroup) -> None:
    """Adds the arguments that say what drafts are looked up in, beside what the model reads."""
    add = texts.add_argument
    add(
        "--reference",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="texts that drafts are copied from; the model never sees them, so that they change "
        "nothing but the speed",
    )
    add("--datastore", metavar="STORE", help="a folder or a Hub id; drafts are looked up in it")
    add(
        "--cache",
        type=Path,
        metavar="PATH",
        help="a folder that keeps the answers of this and of later calls to draft from",
    )


def quieten_transformers() -> None:
    """No progress bar for weights, and no warning, between what a command draws."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


@dataclass(frozen=True)
class Texts:
    """The texts of the files that the arguments name.

    Attributes:
        context (`str`, *optional*): What the model reads before the prompt.
        references (`list[str]`): What drafts are copied from beside.
    """

    context: str | None
    references: list[str]


def read_texts(args: Namespace) -> Texts:
    """Reads --context and --reference, before anything is loaded or typed.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If one is empty, or no text.
    """
    context = None if args.context is None else read_text(args.context, "--context")
    return Texts(context, [read_text(path, "--reference") for path in args.reference or ()])


def sources(args: Namespace, texts: Texts, tokenizer: PreTrainedTokenizerBase) -> list[Drafter]:
    """The default drafters, and those that the arguments name.

    Raises:
        OSError: If the datastore or the cache cannot be read.
        ValueError: If one of them is damaged, or of another tokenizer.
    """
    found = default_sources(texts.references or None, tokenizer)
    if args.datastore is not None:
        store = Datastore.from_pretrained(args.datastore)
        store.check_tokenizer(tokenizer)
        found.append(DatastoreDrafts(store))
    if args.cache is not None:
        if args.cache.is_file():
            raise ValueError(f"--cache {args.cache} is a file; name a folder, or a new one")
        found.append(RetrievalCache(tokenizer=tokenizer, path=args.cache))
    return found


def sampling_options(args: Namespace) -> dict[str, Any]:
    """The sampling options for `generate`; sets the seed.

    Raises:
        ValueError: If one is given without --do-sample, or cannot be.
    """
    given = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    for name, value in given.items():
        option = f"--{name.replace('_', '-')} {value}"
        if not args.do_sample:
            raise ValueError(f"{option} has no effect without --do-sample; add it")
        if name == "top_k":
            allowed, limits = value >= 0, "0, for all tokens, or more"
        elif name == "top_p":
            allowed, limits = 0 < value <= 1, "above 0 and at most 1"
        else:
            allowed, limits = value > 0, "above 0"
        if not allowed:
            raise ValueError(f"{option} must be {limits}")
    if args.seed is not None:
        if not args.do_sample:
            raise ValueError(f"--seed {args.seed} has no effect without --do-sample; add it")
        try:
            torch.manual_seed(args.seed)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"--seed {args.seed} must fit into 64 bits") from error
    return {"do_sample": args.do_sample, **given}


def read_text(path: Path, option: str) -> str:
    """Reads a text file.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it holds no UTF-8 text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        hint = "; it takes all words up to the next option" if option == "--reference" else ""
        raise FileNotFoundError(f"{option} {path} does not exist{hint}") from error
    except OSError as error:
        raise OSError(f"{option} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path} is not a text in UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"{option} {path} is empty; leave it out")
    return text
