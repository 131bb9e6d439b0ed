"""docs/how_it_works.md shows the step as it is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from hf_refspec.generation.loop import Loop

PAGE = Path(__file__).parents[2] / "docs" / "how_it_works.md"


def test_the_page_shows_the_lines_of_the_step():
    [shown] = re.findall(r"```text\n(plan = .*?)```", PAGE.read_text(), flags=re.DOTALL)
    source = [line.strip() for line in inspect.getsource(Loop.step).splitlines()]
    first = source.index(shown.splitlines()[0])
    assert source[first : first + len(shown.splitlines())] == shown.splitlines()
