"""What `hf-refspec bench` is told: its options, what they refuse, and what is recorded of them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
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
# What decides about the figures is recorded with them; these do not.
UNRECORDED = ("suites", "out", "data", "limit", "resume")


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, but is {number}")
    return number


@dataclass(frozen=True)
class ReadBy:
    """The suites that read an option, if not all do."""

    suites: tuple[str, ...]

    def __str__(self) -> str:
        return "without retrieval" if self.suites == DECODING else ", ".join(self.suites)


DECODERS, RETRIEVERS, RALM, KNN = map(ReadBy, (DECODING, RETRIEVING, ("ralm",), ("knn",)))


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure, and how."""

    suites: Annotated[
        list[str],
        Option(
            f"{', '.join(SUITES)}; or compare A.json B.json",
            positional=True,
            nargs="+",
            metavar="SUITE",
        ),
    ]
    out: Annotated[Path | None, Option("a folder for results, report and plots")] = None
    data: Annotated[Path | None, Option("the folder of the suites' files")] = None
    limit: Annotated[int | None, Option("so many questions a suite")] = None
    resume: Annotated[bool, Option("go on with what was stopped")] = False
    model: Annotated[str | None, Option("a folder or a Hub id instead of the bundled model")] = None
    random_model: Annotated[
        str | None,
        Option("a Llama of that size with random weights instead", choices=tuple(SIZES)),
    ] = None
    tokenizer: Annotated[
        str | None, Option("of the random model; else that of the bundled one")
    ] = None
    datastore: Annotated[
        str | None, Option("a folder or a Hub id, to draft from as well"), DECODERS
    ] = None
    replay: Annotated[bool, Option("force the recorded answers")] = False
    max_new_tokens: Annotated[
        int | None, Option("of an answer; by default 256, of a recorded one all")
    ] = None
    device: Annotated[Literal["cpu", "cuda"] | None, Option()] = None
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, Option()] = None
    seconds: Annotated[
        float | None,
        Option("the most for all, shared out among the suites: none begins a question after"),
    ] = None
    knowledge_base: Annotated[str | None, Option("a folder or a Hub id", metavar="PATH"), RALM] = (
        None
    )
    encoder: Annotated[
        str | None, Option("the sentence-transformers model that embedded it", metavar="PATH"), RALM
    ] = None
    distractors: Annotated[int, Option("pad the exact index with so many random vectors"), RALM] = 0
    milvus: Annotated[
        str | None, Option("a server or a file, to search as well", metavar="URI"), RALM
    ] = None
    knn_datastore: Annotated[
        str | None, Option("a folder, made with the model", metavar="PATH"), KNN
    ] = None
    repeat: Annotated[int, Option("runs of each method"), RETRIEVERS] = 1
    ablate: Annotated[
        int,
        Option("questions on which every setting of speculation is measured", type=_count),
        RETRIEVERS,
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
        for field, _, _, *read_by in stated(BenchOptions):
            value = getattr(self, field.name)
            for each in read_by:  # else it would be taken to have counted
                if value != field.default and not set(each.suites) & set(self.suites):
                    raise ValueError(
                        f"{flag(field)} {value} is read by {', '.join(each.suites)}; leave it "
                        "out, or measure one of these"
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
        settings = {
            field.name.replace("_", " "): _described(getattr(self, field.name))
            for field in fields(BenchOptions)
            if field.name not in UNRECORDED and getattr(self, field.name) != field.default
        }
        if self.milvus is not None:
            settings["milvus"] = True  # an address may have a password in it
        return settings

    def file(self, name: str) -> Path:
        """A data file.

        Raises:
            ValueError: If no folder was named.
        """
        if self.data is None:
            raise ValueError(f"{name} is needed; name the folder that it is in with --data")
        return self.data / name


def _described(value: Any) -> Any:
    """A value; of a folder its name with a digest of what says what is in it: others have it
    elsewhere."""
    if not isinstance(value, str) or not Path(value).is_dir():
        return value
    files = (Path(value) / name for name in ("config.json", "tokenizer.json"))
    digests = [sha256(file.read_bytes()).hexdigest()[:8] for file in files if file.exists()]
    return " ".join([Path(value).name, *digests])
