"""What `generate` and `chat` have in common: their drafters, sampling, and texts from files."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ArgumentGroup
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
from .arguments import add_model, draft_budget, positive


def add_answering(parser: ArgumentParser, max_new_tokens: int) -> None:
    """Adds the arguments for the model, its drafts, its texts and sampling."""
    add = parser.add_argument
    add_model(parser)
    add("--max-new-tokens", type=positive, default=max_new_tokens, metavar="N")
    add(
        "--max-draft-tokens",
        type=draft_budget,
        default="auto",
        metavar="N",
        help="the most that one forward pass verifies; auto, the default, as many as pay",
    )
    texts = parser.add_argument_group("texts")
    texts.add_argument(
        "--context",
        type=Path,
        metavar="FILE",
        help="a text that the model reads, before the prompt, and drafts are copied from",
    )
    add_sources(texts)
    add = parser.add_argument_group("sampling, as transformers has it").add_argument
    add("--do-sample", action="store_true", help="sample instead of taking the most probable token")
    add("--temperature", type=float, metavar="X")
    add("--seed", type=int, metavar="N", help="the same seed gives the same text")


def add_sources(texts: _ArgumentGroup) -> None:
    """Adds the arguments that name further sources of drafts."""
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
    """Switches transformers' progress bars and warnings off: they would disturb the output."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def sources(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Drafter]:
    """The default drafters, and those that the arguments name."""
    references = [read_text(path, "--reference") for path in args.reference or ()]
    found = default_sources(references or None, tokenizer)
    if args.datastore is not None:
        store = Datastore.from_pretrained(args.datastore)
        store.check_tokenizer(tokenizer)
        found.append(DatastoreDrafts(store))
    if args.cache is not None:
        if args.cache.is_file():
            raise ValueError(f"--cache {args.cache} is a file; name a folder, or a new one")
        found.append(RetrievalCache(tokenizer=tokenizer, path=args.cache))
    return found


def read_context(args: Namespace) -> str | None:
    """The text of --context, if it is given."""
    return None if args.context is None else read_text(args.context, "--context")


def decoding_options(args: Namespace) -> dict[str, Any]:
    """Checks the sampling options, sets the seed, and returns what is for `generate`."""
    options: dict[str, Any] = {
        "do_sample": args.do_sample,
        "max_draft_tokens": args.max_draft_tokens,
    }
    for name in ("temperature", "seed"):
        if getattr(args, name) is not None and not args.do_sample:
            raise ValueError(
                f"--{name} {getattr(args, name)} has no effect without --do-sample; add it"
            )
    if args.temperature is not None:
        if not args.temperature > 0:
            raise ValueError(f"--temperature {args.temperature} must be above 0")
        options["temperature"] = args.temperature
    if args.seed is not None:
        try:
            torch.manual_seed(args.seed)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"--seed {args.seed} must fit into 64 bits") from error
    return options


def read_text(path: Path, option: str) -> str:
    """Reads a file of UTF-8 text; errors name the option."""
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
