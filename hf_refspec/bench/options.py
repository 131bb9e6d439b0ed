"""What `hf-refspec bench` is told: its options, what they refuse, and what is recorded of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from ..demo.default_model import DEFAULT_MODEL
from ..options import Option, flag, stated
from .models import SIZES

DECODING = ("rag", "humaneval", "spec-bench", "multi-turn", "cached-sessions", "no-overlap")
RETRIEVING = ("ralm", "knn")
SUITES = (*DECODING, *RETRIEVING)


def _described(value: Any) -> Any:
    """A value; of a folder its name with a digest of what says what it is: others have it
    elsewhere."""
    if not isinstance(value, str) or not Path(value).is_dir():
        return value
    files = (Path(value) / name for name in ("config.json", "tokenizer.json"))
    digests = [sha256(file.read_bytes()).hexdigest()[:8] for file in files if file.exists()]
    return " ".join([Path(value).name, *digests])


def _not_recorded(value: Any) -> None:
    """Of an option that does not decide about the figures."""


class _BenchOption(Option):
    """An option with the suites that read it, if not all do, and what is recorded of it."""

    def __init__(
        self,
        help: str | None = None,
        *,
        suites: tuple[str, ...] = SUITES,
        record: Callable[[Any], Any] = _described,
        **argument: Any,
    ) -> None:
        super().__init__(help, **argument)
        self.suites = suites
        self.record = record


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, but is {number}")
    return number


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure, and how."""

    suites: Annotated[
        list[str],
        _BenchOption(
            f"{', '.join(SUITES)}; or compare A.json B.json",
            positional=True,
            nargs="+",
            metavar="SUITE",
            record=_not_recorded,
        ),
    ]
    out: Annotated[
        Path | None,
        _BenchOption("a folder for results, report and plots", record=_not_recorded),
    ] = None
    data: Annotated[
        Path | None, _BenchOption("the folder of the suites' files", record=_not_recorded)
    ] = None
    limit: Annotated[
        int | None, _BenchOption("so many questions a suite", record=_not_recorded)
    ] = None
    resume: Annotated[bool, _BenchOption("go on with what was stopped", record=_not_recorded)] = (
        False
    )
    model: Annotated[
        str | None, _BenchOption("a folder or a Hub id instead of the bundled model")
    ] = None
    random_model: Annotated[
        str | None,
        _BenchOption("a Llama of that size with random weights instead", choices=tuple(SIZES)),
    ] = None
    tokenizer: Annotated[
        str | None, _BenchOption("of the random model; else that of the bundled one")
    ] = None
    datastore: Annotated[
        str | None, _BenchOption("a folder or a Hub id, to draft from as well", suites=DECODING)
    ] = None
    replay: Annotated[bool, _BenchOption("force the recorded answers")] = False
    max_new_tokens: Annotated[
        int | None, _BenchOption("of an answer; by default 256, of a recorded one all")
    ] = None
    device: Annotated[Literal["cpu", "cuda"] | None, _BenchOption()] = None
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, _BenchOption()] = None
    seconds: Annotated[
        float | None,
        _BenchOption(
            "the most for all, loading among it, shared out among the suites; a question that was "
            "begun is finished",
            metavar="S",
        ),
    ] = None
    knowledge_base: Annotated[
        str | None, _BenchOption("a folder or a Hub id", metavar="PATH", suites=("ralm",))
    ] = None
    encoder: Annotated[
        str | None,
        _BenchOption(
            "the sentence-transformers model that embedded the knowledge base",
            metavar="PATH",
            suites=("ralm",),
        ),
    ] = None
    distractors: Annotated[
        int, _BenchOption("pad the exact index with so many random vectors", suites=("ralm",))
    ] = 0
    milvus: Annotated[
        str | None,
        _BenchOption(
            "a server or a file, to search as well",
            metavar="URI",
            suites=("ralm",),
            record=lambda uri: uri is not None or None,
        ),
    ] = None
    knn_datastore: Annotated[
        str | None,
        _BenchOption("a folder, made with the model", metavar="PATH", suites=("knn",)),
    ] = None
    repeat: Annotated[int, _BenchOption("runs of each retrieving method", suites=RETRIEVING)] = 1
    ablate: Annotated[
        int,
        _BenchOption(
            "questions on which every setting of speculation is measured",
            type=_count,
            suites=RETRIEVING,
        ),
    ] = 3

    def check(self) -> None:
        """Refuses what does not go together, or does not go here.

        Raises:
            ValueError: If it does not.
        """
        for name in self.suites:
            if name not in SUITES:
                raise ValueError(f"{name!r} is no suite; there are {', '.join(SUITES)}")
        if self.random_model is not None and self.model is not None:
            raise ValueError("--model and --random-model are two models; leave one of them out")
        if self.random_model is not None and not self.replay:
            raise ValueError(
                "what a random model says by itself is no workload: add --replay to "
                f"--random-model {self.random_model}, or name a trained model with --model"
            )
        if self.tokenizer is not None and self.random_model is None:
            raise ValueError(
                f"--tokenizer {self.tokenizer} is for --random-model; a trained model has its own"
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                "device is 'cuda', but torch sees no GPU; use --device cpu, or install a torch "
                "with CUDA and check the driver"
            )
        for field, _, option in stated(BenchOptions):
            value = getattr(self, field.name)
            read = set(option.suites) & set(self.suites)
            if not read and value != field.default:  # it would be taken to have counted
                raise ValueError(
                    f"{flag(field)} {value} is read by {', '.join(option.suites)}; leave it out, "
                    "or measure one of these"
                )

    def resolved(self) -> BenchOptions:
        """The same with everything chosen that depends on the machine or on other options."""
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        model = self.model or (None if self.random_model else DEFAULT_MODEL)
        return replace(
            self,
            device=device,
            dtype=self.dtype or ("bfloat16" if device == "cuda" else "float32"),
            model=model,
            tokenizer=self.tokenizer or model or DEFAULT_MODEL,
        )

    def settings(self) -> dict[str, Any]:
        """What decides about the figures, by name; without what was left as it is."""
        values = (
            (field.name.replace("_", " "), option.record(getattr(self, field.name)))
            for field, _, option in stated(BenchOptions)
            if getattr(self, field.name) != field.default
        )
        return {name: value for name, value in values if value is not None}

    def file(self, name: str) -> Path:
        """A data file.

        Raises:
            ValueError: If no folder was named.
        """
        if self.data is None:
            raise ValueError(f"{name} is needed; name the folder that it is in with --data")
        return self.data / name
