"""Arguments that several commands share, and what they name: models, sources of drafts."""

from __future__ import annotations

import errno
import logging
import socket
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, _ArgumentGroup
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ...drafting.contract import Drafter

logger = logging.getLogger("hf_refspec")

WRITTEN_TO = "write the repository into a new folder instead of pushing it"  # what --out does


def positive(text: str) -> int:
    """Reads an integer of at least 1."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise ArgumentTypeError(f"must be a whole number of at least 1, but is {text!r}")
    return number


def draft_budget(text: str) -> int | str:
    """Reads how many draft tokens to verify in a pass: an integer of at least 1, or auto."""
    from ...refusals import check_options  # loads torch

    number = text if text == "auto" else positive(text)
    try:
        check_options(number, "auto")
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
    return number


def port(text: str) -> int:
    number = int(text) if text.isdecimal() else -1
    if not 0 <= number < 1 << 16:
        raise ArgumentTypeError(f"must be from 0 to 65535, but is {text!r}")
    return number


def add_listening(parser: ArgumentParser, default: int, more: str = "") -> None:
    """Adds the arguments of [`listen`]."""
    host = "the address to listen on; only this machine reaches 127.0.0.1, the default"
    parser.add_argument("--host", default="127.0.0.1", help=host)
    parser.add_argument("--port", type=port, default=default, metavar="N", help=f"to use{more}")


def listen(host: str, port: int) -> socket.socket:
    """Binds a port, or any free one for 0; errors name the option."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        why = f"--port {port} is in use"
        if error.errno != errno.EADDRINUSE:
            why = f"--host {host}, --port {port} cannot be bound: {error.strerror}"
        raise OSError(f"{why}; choose another") from error


def add_model(parser: ArgumentParser, dtype: bool = True) -> None:
    """Adds the arguments that choose the model and how it is loaded."""
    add = parser.add_argument
    add("--model", help="a folder or a Hub id; SmolLM2-135M-Instruct by default")
    if dtype:
        help = "by default the model's own; float32 for the default model"
        add("--dtype", choices=("float32", "bfloat16", "float16"), help=help)
    help = "a device (cpu, cuda:1), or auto: all GPUs, then the CPU; by default one GPU, if any"
    add("--device-map", "--device", metavar="MAP", help=help)


class _StderrHandler(logging.StreamHandler):
    """Writes to the current `sys.stderr`: an earlier one may be closed."""

    stream = property(lambda _: sys.stderr, lambda *_: None)


def log_to_stderr(format: str) -> None:
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(format))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)


def read_text(path: Path, option: str) -> str:
    """Reads a file of UTF-8 text; errors name the option."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path} is not UTF-8 text: {error}") from error
    if not text.strip():
        raise ValueError(f"{option} {path} is empty; leave it out")
    return text


def add_answering(parser: ArgumentParser, max_new_tokens: int) -> None:
    add = parser.add_argument
    add_model(parser)
    add("--max-new-tokens", type=positive, default=max_new_tokens, metavar="N", help="of an answer")
    help = "at most this many in one forward pass; auto: those that pay"
    add("--max-draft-tokens", type=draft_budget, default="auto", metavar="N", help=help)
    texts = parser.add_argument_group("texts")
    help = "a text before the prompt: the model reads it, and drafts are copied from it"
    texts.add_argument("--context", type=Path, metavar="FILE", help=help)
    add_sources(texts)
    add_assistants(parser)
    add = parser.add_argument_group("sampling, as in transformers").add_argument
    add("--do-sample", action="store_true", help="sample instead of taking the most probable token")
    add("--temperature", type=float, metavar="X", help="by default the model's own")
    add("--seed", type=int, metavar="N", help="the same seed gives the same text; by default any")


def add_sources(texts: _ArgumentGroup) -> None:
    """Adds the arguments that name further sources of drafts."""
    add = texts.add_argument
    help = "a text to copy drafts from; the model never sees it; can be repeated"
    add("--reference", type=Path, action="append", metavar="FILE", help=help)
    add("--datastore", metavar="STORE", help="a folder or a Hub id; drafts are looked up in it")
    help = "a folder that keeps answers; this and later calls draft from them"
    add("--cache", type=Path, metavar="PATH", help=help)


def add_assistants(parser: ArgumentParser) -> None:
    """Adds the arguments of [`assistants`], which have the names that `generate` gives them."""
    add = parser.add_argument_group("models that draft").add_argument
    help = (
        "a smaller model of the same family, an assistant of Gemma 4, or a block drafter (DFlash)"
    )
    add("--assistant-model", metavar="MODEL", help=help)
    help = "the model's own layers for multi-token prediction"
    add("--use-mtp", action="store_true", help=help)


def sources(
    args: Namespace, tokenizer: PreTrainedTokenizerBase
) -> Callable[[PreTrainedModel], list[Drafter]]:
    """A function that creates a target model's drafters: the default ones, and all that are named.

    Refuses sources with ids of other models."""
    from ...drafting.auto import default_sources  # these load torch
    from ...drafting.datastore_drafts import DatastoreDrafts
    from ...drafting.session_drafts import SessionDrafts
    from ...store.datastore import Datastore
    from ..shared.loading import check_sources

    references = [read_text(path, "--reference") for path in args.reference or ()]
    drafters: list[Drafter] = [*default_sources(references or None, tokenizer)]
    if args.datastore is not None:
        store = Datastore.from_pretrained(args.datastore, tokenizer=tokenizer)
        drafters.append(DatastoreDrafts(store))
    if args.cache is not None:
        drafters.append(SessionDrafts(tokenizer=tokenizer, path=args.cache))
    check_sources(drafters, args.model)
    of_model = assistants(args)
    return lambda model: [*drafters, *of_model(model)]


def assistants(args: Namespace) -> Callable[[PreTrainedModel], list[Drafter]]:
    """A function that creates a target model's drafters that run its own layers or another model.

    It loads the other model before the target, which may take longer."""
    from ..shared.loading import layers_of, load_assistant

    new: list[Callable[[PreTrainedModel], Drafter]] = [layers_of] if args.use_mtp else []
    if args.assistant_model is not None:
        new.append(load_assistant(args.assistant_model))
    return lambda model: [new_drafter(model) for new_drafter in new]


def decoding_options(args: Namespace) -> dict[str, Any]:
    """Checks the sampling options, sets the seed, and returns arguments of `generate`."""
    options = {"do_sample": args.do_sample, "max_draft_tokens": args.max_draft_tokens}
    for name in ("temperature", "seed"):
        value = getattr(args, name)
        if value is not None and not args.do_sample:
            raise ValueError(f"--{name} {value} has no effect without --do-sample; add it")
    if args.temperature is not None:
        if not args.temperature > 0:
            raise ValueError(f"--temperature {args.temperature} must be above 0")
        options["temperature"] = args.temperature
    if args.seed is not None:
        import torch

        try:
            torch.manual_seed(args.seed)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"--seed {args.seed} must fit into 64 bits") from error
    return options
