"""What was measured, in one JSON file that is whole at any time."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from .measure import Sample

FORMAT = 3
FILE = "results.json"


@dataclass
class Results:
    """All that was measured, and with what.

    Attributes:
        machine, versions, settings (`dict`): With what.
        pass_costs (`dict`): What a forward pass costs, see [`measure_pass_costs`].
        suites (`dict`): For each suite, how many questions it has, and those that are done, by id:
            what was measured, or why it was skipped.
    """

    machine: dict[str, Any]
    versions: dict[str, Any]
    settings: dict[str, Any]
    pass_costs: dict[str, Any] = field(default_factory=dict)
    suites: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def begin(self, suite: str, questions: int) -> None:
        """Makes a place for a suite, if there is none."""
        self.suites.setdefault(suite, {"questions": questions, "done": {}})
        done = len(self.suites[suite]["done"])  # more, where another limit was asked for
        self.suites[suite]["questions"] = max(questions, done)

    def is_done(self, suite: str, question: Any) -> bool:
        """Whether a question, which has an `id`, has been measured or skipped.

        Raises:
            ValueError: If it was, and something else was asked.
        """
        done = self.suites.get(suite, {}).get("done", {}).get(question.id)
        if done is not None and done["asked"] != fingerprint(question):
            raise ValueError(
                f"{suite}, question {question.id} was measured with another text than the data "
                "has now; choose another --out"
            )
        return done is not None

    def add(
        self, suite: str, question: Any, entries: list[dict[str, Any]], skipped: str | None
    ) -> None:
        """Adds what came of a question."""
        asked = fingerprint(question)
        entries = [{**entry, "asked": asked} for entry in entries]
        done = {"asked": asked, "entries": entries, "skipped": skipped}
        self.suites[suite]["done"][question.id] = done

    def entries(self, suite: str) -> list[dict[str, Any]]:
        """All that was measured of a suite."""
        done = self.suites[suite]["done"].values()
        return [entry for question in done for entry in question["entries"]]

    def skipped(self, suite: str) -> list[str]:
        """Why questions of a suite were skipped."""
        done = self.suites[suite]["done"].values()
        return [question["skipped"] for question in done if question["skipped"]]

    def write(self, folder: Path) -> None:
        """Writes results.json; an earlier one is replaced in one go."""
        new = folder / f".{FILE}.new"
        with open(new, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, folder / FILE)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Reads a file, or the results.json of a folder.

        Raises:
            OSError: If it cannot be read.
            ValueError: If it is something else.
        """
        path = path / FILE if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: name a results.json, or its folder")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.get("format") == 2:
                content = _from_format_2(content)
            if content.get("format") != FORMAT:
                raise ValueError(f"its format is {content.get('format')!r}, not {FORMAT}")
            results = cls(**content)
            for suite in results.suites.keys():  # noqa: SIM118 (a list has none)
                for entry in results.entries(suite):
                    _check_entry(entry)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no results of hf-refspec bench: {error!r}") from None
        return results


def _from_format_2(content: dict[str, Any]) -> dict[str, Any]:
    """Methods were called ways; what was measured of retrieval cannot be read any more."""
    text = json.dumps({**content, "format": FORMAT})
    return json.loads(text.replace('"way": ', '"method": '))


def _check_entry(entry: dict[str, Any]) -> None:
    """Refuses what no suite has measured, as far as names tell."""
    for name in ("samples", "name", "asked"):
        if name not in entry:
            raise ValueError(f"an entry lacks {name}: {entry!r:.200}")
    for i, sample in enumerate(entry["samples"]):
        entry["samples"][i] = sample = asdict(Sample(**sample))
        _check_numbers(sample, "tokens", "forward_passes", "prefill_seconds")
        if sample["tokens"] > 1:  # an answer of one token is all prefill
            _check_numbers(sample, "decoding_seconds")


def _check_numbers(sample: dict[str, Any], *names: str) -> None:
    for name in names:
        if not isinstance(sample[name], (int, float)) or not sample[name] > 0:
            raise ValueError(f"{name} must be a number above 0, but is {sample[name]!r:.80}")


def fingerprint(question: Any) -> str:
    """Of a question: the texts, numbers and ids of a dataclass, and of those in it."""

    def plain(value: Any) -> Any:
        if not is_dataclass(value):
            return None  # what the question is put to: the settings say what that is
        return {each.name: getattr(value, each.name) for each in fields(value)}

    return sha256(json.dumps(question, default=plain).encode()).hexdigest()[:16]


def open_results(folder: Path, fresh: Results, resume: bool) -> Results:
    """What an earlier run left in a folder, or fresh results in a new one.

    Args:
        folder (`Path`): Where they are, or will be.
        fresh ([`Results`]): Those of a run that begins.
        resume (`bool`): Whether to go on with what is there.

    Raises:
        FileExistsError: If there are results, and they are not to be gone on with.
        ValueError: If they were measured with other settings or versions, or elsewhere.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"--out {folder} is a file; name a folder")
    if not (folder / FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        return fresh
    if not resume:
        raise FileExistsError(
            f"{folder / FILE} exists; add --resume to go on with it, or choose another --out"
        )
    earlier = Results.read(folder)
    for kind in ("machine", "versions", "settings"):
        before, now = getattr(earlier, kind), getattr(fresh, kind)
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                raise ValueError(
                    f"{folder} was measured with {name} {before.get(name)!r}, not "
                    f"{now.get(name)!r}; choose another --out"
                )
    return earlier
