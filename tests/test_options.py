"""A field of a command's dataclass is an option of the command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest

from hf_refspec.options import Option, add_options


@dataclass(kw_only=True)
class Base:
    store: Annotated[str, Option("its folder", positional=True)]
    form: Annotated[Literal["full", "compact"] | None, Option()] = None


@dataclass(kw_only=True)
class Command(Base):
    files: Annotated[list[Path], Option(positional=True, nargs="*")]
    out_folder: Annotated[Path, Option("where to")]
    nodes: Annotated[int, Option("how many")] = 24
    most: Annotated[int | None, Option()] = None
    loud: Annotated[bool, Option("say more"), "only at night"] = False
    word: Annotated[list[str], Option(action="append")] = field(default_factory=list)


def read(*arguments: str) -> Command:
    parser = argparse.ArgumentParser()
    add_options(parser, Command)
    return Command(**vars(parser.parse_args(arguments)))


def test_types_and_defaults_say_how_an_option_is_read():
    given = ["s", "a", "b", "--out-folder", "o", "--loud", "--most", "3", "--form", "full"]
    assert read(*given, "--word", "x", "--word", "y") == Command(
        store="s",
        files=[Path("a"), Path("b")],
        out_folder=Path("o"),
        most=3,
        loud=True,
        form="full",
        word=["x", "y"],
    )
    assert read("s", "--out-folder", "o") == Command(store="s", files=[], out_folder=Path("o"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["s"], "--out-folder"),
        (["--out-folder", "o"], "store"),
        (["s", "--out-folder", "o", "--nodes", "0"], "must be at least 1, but is 0"),
        (["s", "--out-folder", "o", "--form", "short"], "invalid choice: 'short'"),
    ],
)
def test_what_an_option_does_not_take_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        read(*arguments)
    assert message in capsys.readouterr().err


def test_what_else_is_stated_is_in_the_help():
    parser = argparse.ArgumentParser()
    add_options(parser, Command)
    assert "say more (only at night)" in parser.format_help()
