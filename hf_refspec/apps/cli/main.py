"""`hf-refspec`: the command line."""

import argparse
import io
import os
import sys
from importlib import import_module
from typing import TypeAlias

from ...corpus.untrusted import one_line
from ...version import __version__

# For each command its help, and further commands or the module and function that run it, which may
# return an exit status; `add_` and its name is the function that adds the arguments, and `EPILOG`
# ends the help. Only the chosen command's module is imported: torch takes seconds to load, and
# --help should not wait.
Commands: TypeAlias = "dict[str, tuple[str, str | Commands]]"
_STORE: Commands = {
    "build": ("build a datastore from a corpus", "store.build"),
    "compact": ("build the compact form of a datastore", "store.compact"),
    "info": ("describe a datastore", "store.info"),
    "search": ("show a text's longest match in a datastore, and its draft tree", "search.search"),
    "evaluate": ("measure whether a datastore pays off for a model", "evaluate.evaluate"),
    "push": ("publish a datastore on the Hub", "store.push"),
}
GROUPS: dict[str, Commands] = {
    "try it": {
        "demo": ("show a small model's answers with and without drafts", "demo.demo"),
        "chat": ("talk to a model in the terminal", "chat.chat"),
        "generate": ("generate a text, drafting from references", "generate.generate"),
        "space": ("open a page in the browser: plain against drafted decoding", "space.space"),
    },
    "measure": {
        "check": ("show how drafts are verified for a model, and their cost", "check.check"),
        "bench": ("measure whether drafts pay off for your model and prompts", "bench.bench"),
    },
    "draft from texts": {
        "store": ("build, measure and publish datastores", _STORE),
    },
    "serve and publish": {
        "serve": ("serve a model with the OpenAI API", "serve.serve"),
        "publish": ('publish a repository for custom_generate="user/name"', "publish.publish"),
        "warmup": ("compile all kernels ahead, as for a container image", "warmup.warmup"),
    },
}
COMMANDS: Commands = {name: about for group in GROUPS.values() for name, about in group.items()}
# These say that they load, which takes up to half a minute. `generate` does not: its standard error
# is for the statistics.
_LOADING = {"bench", "chat", "check", "demo", "evaluate", "serve", "space"}


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows each default, unless an option has none, is a flag, or its help names the default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False) or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if ids differed, 2 for bad input, 130 after ctrl-C."""
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str]) -> int:
    lines = ["Lossless speculative decoding by look-up."]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:10}{about}" for name, (about, _) in group.items())]
    lines += ["", "Each command has a --help."]
    parser = argparse.ArgumentParser(
        prog="hf-refspec",
        usage="%(prog)s COMMAND ...",
        description="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    _add_commands(parser, COMMANDS, arguments, argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # its encoding may lack a model's characters
            stream.reconfigure(errors="replace")
    try:
        status = args.run(args) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # Python would complain again when it writes its buffers at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as a command that the signal SIGPIPE ends
    except (ImportError, OSError, ValueError) as error:
        print(f"hf-refspec: {one_line(error)}", file=sys.stderr)
        return 2


def _add_commands(
    parser: argparse.ArgumentParser,
    commands: Commands,
    arguments: list[str],
    help: str | None = None,
) -> None:
    """Adds commands, and the arguments of the chosen one; without one the help is printed."""
    parser.set_defaults(run=lambda _: parser.print_help())
    parsers = parser.add_subparsers(prog=parser.prog, metavar="COMMAND", help=help)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, (about, place) in commands.items():
        if name != chosen:
            parsers.add_parser(name, help=about)
        elif isinstance(place, dict):
            command = parsers.add_parser(name, help=about, description=about)
            _add_commands(command, place, arguments[arguments.index(name) + 1 :])
        else:
            if name in _LOADING and not {"-h", "--help", "--push", "--out"} & {*arguments}:
                print("Loading ...", file=sys.stderr, flush=True)
            module, function = place.split(".")
            found = import_module(f".{module}", __package__)
            from transformers.utils import logging

            logging.disable_progress_bar()
            logging.set_verbosity_error()
            epilog = getattr(found, "EPILOG", None)
            command = parsers.add_parser(
                name, help=about, description=about, epilog=epilog, formatter_class=_Help
            )
            getattr(found, f"add_{function}")(command)
            command.set_defaults(run=getattr(found, function))
