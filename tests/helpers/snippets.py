"""The snippets of a page of documentation, and what they print.

All snippets of a page run one after another in one namespace and one folder. A block titled
"Output" under a snippet is what it prints. Under "Output, for example" numbers may be others:
times, and what depends on them. Command lines with an output are run, others only parsed.
"""

import argparse
import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hf_refspec.apps.cli.main import COMMANDS, main
from tests.helpers.running_server import forked_server

_BLOCK = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```$", re.M | re.S)
OUTPUT, EXAMPLE = 'text title="Output"', 'text title="Output, for example"'
_DEFAULT_URL = "http://localhost:8000"
_FIGURE = re.compile(r"-?\d[\d.,]*")
# Of statistics: the percentages of accepted drafts and of times, and what else depends on time.
_TIMED = re.compile(r" \([\d.]+ %\)|[:,] [\d.]+ % [a-z]+|; [\d.]+ passes probed .*|; nothing .*")


@dataclass
class Snippet:
    """A block of code, and the block with its output, if there is one.

    Attributes:
        kind (`str`): `"python"` or `"bash"`.
        code (`str`): Its lines.
        line (`int`): Of the page, where it begins.
        output (`str`, *optional*): What the page says that it prints.
        place (`slice`, *optional*): Of the page, where that stands.
        for_example (`bool`): Whether the numbers of the output may be others.
    """

    kind: str
    code: str
    line: int
    output: str | None = None
    place: slice | None = None
    for_example: bool = False

    def prints(self, output: str) -> bool:
        """Whether an output is the one of the page; without one nothing may be printed."""
        compared = masked if self.for_example else str.rstrip
        return compared(output) == compared(self.output or "")


def snippets(text: str) -> list[Snippet]:
    """All blocks of Python and of command lines of a page, in order."""
    found: list[Snippet] = []
    for block in _BLOCK.finditer(text):
        kind, body = block["kind"], block["body"]
        if kind in ("python", "bash"):
            found.append(Snippet(kind, body, text.count("\n", 0, block.start("body")) + 1))
        elif kind in (OUTPUT, EXAMPLE):
            last = found[-1]
            assert last.output is None, f"two outputs of one snippet, the second:\n{body}"
            last.output, last.place = body, slice(*block.span("body"))
            last.for_example = kind == EXAMPLE
    return found


def run(snippet: Snippet, page: Path, namespace: dict[str, Any], url: str) -> str:
    """Runs a snippet; returns what it prints. The page's server is at `url`."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if snippet.kind == "python":
            code = "\n" * (snippet.line - 1) + snippet.code  # so that errors name the page's lines
            code = code.replace(_DEFAULT_URL, url)
            exec(compile(code, page, "exec"), namespace)
        else:
            for arguments in commands(snippet.code):
                assert main(arguments) == 0
    return printed.getvalue()


@contextlib.contextmanager
def server(page: list[Snippet]) -> Iterator[str]:
    """The server that a page starts with "hf-refspec serve &", at a free port: its address."""
    if not any("hf-refspec serve &" in snippet.code for snippet in page):
        yield _DEFAULT_URL
        return
    with forked_server() as (address, _):
        yield address.removesuffix("/v1")


def commands(code: str) -> Iterator[list[str]]:
    """The arguments of each `hf-refspec` in command lines."""
    for line in code.replace("\\\n", " ").splitlines():
        if "hf-refspec" in line:
            words = shlex.split(line, comments=True)
            arguments = words[words.index("hf-refspec") + 1 :]
            yield [word for word in arguments if word != "&"]


def parse(arguments: list[str]) -> argparse.Namespace:
    """What a command makes of its arguments; ends in `SystemExit` where it does not know them."""
    name, *rest = arguments
    place = COMMANDS[name][1]
    while isinstance(place, dict):
        name, *rest = rest
        place = place[name][1]
    module, _, function = place.partition(".")
    parser = argparse.ArgumentParser(name)
    found = import_module(f"hf_refspec.apps.cli.{module}")
    getattr(found, f"add_{function}")(parser)
    parser.set_defaults(run=getattr(found, function))
    return parser.parse_args(rest)


def with_outputs(text: str, outputs: list[tuple[Snippet, str]]) -> str:
    """A page with other outputs in place of its own."""
    for snippet, output in reversed(outputs):
        if snippet.place is not None:
            text = text[: snippet.place.start] + output.rstrip() + "\n" + text[snippet.place.stop :]
    return text


def masked(output: str) -> str:
    """An output without what depends on time, and without its numbers."""
    return _FIGURE.sub("0", _TIMED.sub("", output.rstrip()))
