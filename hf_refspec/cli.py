"""`hf-refspec`: the command line."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from .options import add_options
from .version import __version__

# What each command does, and the class whose fields are its options and whose `run` does it. It is
# imported only where it is run: torch takes seconds to load, and --help should not.
COMMANDS = {
    "demo": ("complete and edit Python files, plainly and drafted", "demo.Demo"),
    "generate": ("generate text, drafting from references", "generate.Generate"),
    "build": ("build a datastore out of a corpus", "datastore.Build"),
    "extend": ("add documents to a datastore", "datastore.Extend"),
    "compact": ("make the compact form of a datastore", "datastore.Compact"),
    "info": ("what is in a datastore", "datastore.Info"),
    "search": ("what a datastore knows of a text, and drafts", "search.Search"),
    "ralm": ("answer questions out of texts, with speculative retrieval and without", "ralm.Ralm"),
    "bench": ("measure suites, or compare two results", "bench.Bench"),
    "ablate": ("MAT against the size of a datastore, both forms", "bench.Ablate"),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 if it did not hold, 2 for bad input."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="hf-refspec", description="Lossless speculative decoding by look-up."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    chosen = next((name for name in arguments if not name.startswith("-")), None)
    for name, (help, place) in COMMANDS.items():
        command = parsers.add_parser(name, help=help, description=help)
        if name == chosen:
            module, _, class_name = place.partition(".")
            command_class = getattr(import_module(f".commands.{module}", __package__), class_name)
            add_options(command, command_class)
    given = vars(parser.parse_args(arguments))
    try:
        return command_class(**given).run()
    except (ImportError, OSError, ValueError) as error:
        print(f"hf-refspec: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
