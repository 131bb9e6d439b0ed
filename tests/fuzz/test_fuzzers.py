"""The fuzzers end clean, and notice defects.

Each in a process of its own, for they fork: where other tests have left threads, a fork may wait
for a lock that none of its own threads will ever release.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def output(*arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    return done.stdout


def test_damaged_folders_are_used_or_refused_in_one_line_with_their_path():
    table = output("tests.fuzz", "mutate", "--count", "240").split("\n\n")[0]
    for row in table.splitlines()[1:]:  # if all are refused at once, nothing behind that is tested
        same, other, *_, refused = map(int, re.findall(r"\d+", row))
        assert same and other and refused > 10, table


def test_killed_writers_and_planted_defects(tmp_path):
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={tmp_path / 'tmp'}"]
    output("pytest", "-q", *options, "tests/fuzz/defects.py")
