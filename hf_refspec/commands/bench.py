"""`hf-refspec bench` and `hf-refspec ablate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..bench.ablation import ablate
from ..bench.compare import compare
from ..bench.options import BenchOptions
from ..bench.run import run
from ..bench.suites import humaneval
from ..options import Option
from ..store.datastore import Datastore


@dataclass(frozen=True, kw_only=True)
class Bench(BenchOptions):
    """Measures suites, or compares two results."""

    def run(self) -> int:
        if self.suites[0] == "compare":
            return compare(self.suites[1:])
        return run(self)


@dataclass(frozen=True, kw_only=True)
class Ablate:
    """MAT on HumanEval's problems with datastores of growing size."""

    store: Annotated[str, Option("the folder of a datastore with its full form", positional=True)]
    data: Annotated[Path, Option("HumanEval.jsonl.gz")]
    tokenizer: Annotated[str | None, Option("else the one that the datastore names")] = None
    max_draft_tokens: Annotated[int, Option()] = 64
    limit: Annotated[int | None, Option("so many prompts only")] = None
    out: Annotated[Path, Option("a folder for table and plot")]

    def run(self) -> int:
        store = Datastore(self.store, form="full")
        tokenizer = store.load_tokenizer(self.tokenizer)
        answers = humaneval(self.data, tokenizer)[: self.limit]
        ablate(store, tokenizer, answers, self.max_draft_tokens, self.out)
        return 0
