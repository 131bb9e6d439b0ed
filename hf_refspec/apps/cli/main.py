"""`hf-refspec`: the command line."""

from __future__ import annotations

import argparse
import io
import os
import sys
from importlib import import_module

from ...store.printable import one_line
from ...version import __version__
from .messages import in_options
from .parser import Parser

# The help of each command, and the function that adds its arguments. Only the chosen command's
# module is imported: torch takes seconds to load, and --help should not wait for it.
COMMANDS = {
    "demo": ("show answers of a small model, plainly and drafted", "demo.add_demo"),
    "chat": ("talk to a model in the terminal", "chat.add_chat"),
    "generate": ("generate text, drafting from references", "generate.add_generate"),
    "serve": ("serve a model by the OpenAI API", "serve.add_serve"),
    "space": ("open a page in the browser: plain and drafted side by side", "space.add_space"),
    "build": ("build a datastore from a corpus", "datastore.add_build"),
    "extend": ("add documents to a datastore", "datastore.add_extend"),
    "merge": ("merge the shards of a datastore", "datastore.add_merge"),
    "retokenize": ("build a datastore for another model from one", "datastore.add_retokenize"),
    "compact": ("build the compact form of a datastore", "datastore.add_compact"),
    "info": ("describe a datastore", "datastore.add_info"),
    "recycle": ("learn what a model expects next in texts", "recycle.add_recycle"),
    "search": ("show what a datastore has for a text, and the draft tree", "search.add_search"),
    "evaluate": ("measure whether a datastore pays for a model", "evaluate.add_evaluate"),
    "ralm": ("answer questions from texts, with speculative retrieval", "ralm.add_ralm"),
    "knn": ("build kNN datastores", "knn.add_knn"),
    "publish-generate": (
        'write the Hub repository for generate(custom_generate="user/name")',
        "publish_generate.add_publish_generate",
    ),
    "warmup": (
        "compile what drafts and searches, for the image of a container",
        "warmup.add_warmup",
    ),
    "bench": ("measure suites, or compare two results", "bench.add_bench"),
}
# These say that they load a model, which takes up to half a minute with torch. The standard error
# of `generate`, which does so too, is its statistics.
_LOADING = {"chat", "demo", "serve", "space"}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 if ids differed, 2 for bad input, 130 after
    ctrl-C, also while libraries are loaded."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return 130


def _announce(arguments: list[str]) -> None:
    """Says which model is loaded, before any of it is."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model", nargs="?", default="SmolLM2-135M-Instruct")
    parser.add_argument("--help", "-h", "--push", dest="nothing", nargs="?", const=True)
    given, _ = parser.parse_known_args(arguments)
    if given.model and not given.nothing:
        print(f"Loading {given.model} ...", file=sys.stderr, flush=True)


def _run(arguments: list[str] | None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = Parser(prog="hf-refspec", description="Lossless speculative decoding by look-up.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    chosen = next((name for name in arguments if not name.startswith("-")), None)
    for name, (help, place) in COMMANDS.items():
        command = parsers.add_parser(name, help=help, description=help)
        if name == chosen:
            if name in _LOADING:
                _announce(arguments)
            module, _, add_arguments = place.partition(".")
            commands = import_module(f".{module}", __package__)
            getattr(commands, add_arguments)(command)  # and sets `run`
    args = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # its encoding may lack what a model writes
            stream.reconfigure(errors="replace")
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # Python would complain again when it writes its buffers at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as a command that the signal SIGPIPE ends
    except (ImportError, OSError, ValueError) as error:
        message = in_options(one_line(error), args, COMMANDS)
        print(f"hf-refspec: {message}", file=sys.stderr)
        return 2
