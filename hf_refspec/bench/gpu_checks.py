"""The tests of what holds on a GPU, run in a process of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "test_on_a_gpu.py"
_TO_STOP = 30  # seconds: a process that is told to stop writes down what it knows


@dataclass(frozen=True)
class Checks:
    """What became of the tests.

    Attributes:
        passed (`int`): How many hold.
        failed, skipped (`dict[str, str]`): The first line of why, by the test's name.
        figures (`dict[str, str]`): What they have counted.
        seconds (`float`): How long they took.
        trouble (`str`): What ended them early, "" if nothing has.
    """

    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    trouble: str = ""


def run_checks(device: str, seconds: float, name: str | None = None) -> Checks:
    """Runs the tests on a device for so long at most.

    Args:
        device (`str`): `"cuda"`, or `"cpu"` to try them.
        seconds (`float`): After which those that have not begun are left out.
        name (`str`, *optional*): Only tests with it in their names.
    """
    if not TESTS.exists():
        return Checks(trouble=f"{TESTS.name} is missing: run this in a checkout")
    with TemporaryDirectory() as folder:
        report = Path(folder, "checks.xml")
        command = [sys.executable, "-m", "pytest", str(TESTS), f"--junitxml={report}"]
        command += ["-p", "no:cacheprovider", *(["-k", name] if name else [])]
        environment = {**os.environ, "HF_REFSPEC_DEVICE": device}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        trouble = ""
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            trouble = f"stopped after {seconds:.0f} s"
            process.send_signal(signal.SIGINT)
            try:
                output, _ = process.communicate(timeout=_TO_STOP)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
        if report.exists():
            return _read(report, trouble)
        last = output.decode(errors="replace").strip().splitlines()[-5:]
        return Checks(trouble=trouble or f"pytest has not begun: {' / '.join(last)}")


def _read(report: Path, trouble: str) -> Checks:
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = _reasons(cases, "failure") | _reasons(cases, "error")
    skipped = _reasons(cases, "skipped")
    figures = {
        each.get("name", ""): each.get("value", "")
        for case in cases
        for each in case.iter("property")
    }
    passed = len(cases) - len(failed) - len(skipped)
    seconds = sum(float(case.get("time", 0)) for case in cases)
    return Checks(passed, failed, skipped, figures, seconds, trouble)


def _reasons(cases: list[ElementTree.Element], outcome: str) -> dict[str, str]:
    return {
        case.get("name", ""): (found.get("message") or "").partition("\n")[0]
        for case in cases
        if (found := case.find(outcome)) is not None
    }
