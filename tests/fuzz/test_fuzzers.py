"""The fuzzers end clean, and notice defects.

Those that fork are run in a process of their own: where other tests have left threads, a fork may
wait for a lock that none of its own threads will ever release.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hf_refspec.generation.row import Row

from .decoding import Case
from .outcomes import DIFFERENT, EQUAL

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.nightly


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


COUNT, CHUNKS = 120, 3


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_what_a_caller_sees_is_what_plain_decoding_shows(chunk):
    cases = [Case(number) for number in range(chunk, COUNT, CHUNKS)]
    outcomes = [case.run() for case in cases]
    bad = [(c.number, o) for c, o in zip(cases, outcomes, strict=True) if o.is_bad]
    assert [f"{number}: {outcome.name}: {outcome.detail}" for number, outcome in bad] == []
    # What is always refused, or never accepted, would test nothing.
    assert Counter(outcome.name for outcome in outcomes)[EQUAL] > len(cases) / 4
    assert sum(case.accepted for case in cases) > len(cases) / 4


def test_a_case_is_always_the_same():
    first, again = ([Case(number) for number in (3, 14)] for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert one.run() == other.run()
        assert (one.name, one.done, one.accepted) == (other.name, other.done, other.accepted)


def test_a_row_that_draws_twice_is_found(monkeypatch):
    choose = Row.choose

    def choose_twice(row, logits):
        choose(row, logits)
        return choose(row, logits)

    monkeypatch.setattr(Row, "choose", choose_twice)
    assert DIFFERENT in {Case(number).run().name for number in range(20)}
