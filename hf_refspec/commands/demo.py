"""`hf-refspec demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..demo.run import run_demo
from ..options import Option


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Returns 1 if ids differed."""

    file: Annotated[Path | None, Option("your own file instead of standard library files")] = None
    model: Annotated[str | None, Option("a folder or a Hub id instead of the bundled model")] = None
    max_new_tokens: Annotated[int, Option()] = 160
    no_color: Annotated[bool, Option()] = False
    datastore: Annotated[
        bool,
        Option("draft from a datastore of the standard library as well, built for the model first"),
    ] = False

    def run(self) -> int:
        color = False if self.no_color else None
        same = run_demo(self.file, self.model, self.max_new_tokens, color, self.datastore)
        return 0 if same else 1
