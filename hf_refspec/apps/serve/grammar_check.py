"""Compiles grammars of clients once in a process that may be ended.

The intersection of a dozen regular expressions may take any time and memory, and nothing ends a
compilation but the end of its process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from selectors import EVENT_READ, DefaultSelector
from typing import Any

_SECONDS = 3  # for one grammar
_STARTING_SECONDS = 30

_PROGRAM = """
import json, sys
from llguidance import LLMatcher
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
except (ImportError, ValueError):
    pass
print(flush=True)
for line in sys.stdin:
    kind, given = json.loads(line)
    if kind == "json_schema":
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(given))
    else:
        grammar = LLMatcher.grammar_from_lark(given)
    print(json.dumps(LLMatcher.validate_grammar(grammar)), flush=True)
"""


class GrammarCheck:
    """A process that compiles one grammar after another, for one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def check(self, kind: str, given: Any) -> None:
        """Refuses a grammar that cannot be compiled, or takes too long.

        Raises:
            ValueError: If it does.
        """
        process = self._started()
        assert process.stdin is not None
        process.stdin.write(json.dumps([kind, given]) + "\n")
        process.stdin.flush()
        answer = self._line(process, _SECONDS)
        if answer is None:
            raise ValueError(f"takes more than {_SECONDS} s or 4 GiB to compile; make it simpler")
        if error := json.loads(answer):
            raise ValueError(f"cannot be compiled: {error}")

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            pipe = subprocess.PIPE
            command = [sys.executable, "-c", _PROGRAM]
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
            if self._line(self._process, _STARTING_SECONDS) is None:
                raise RuntimeError("the process that compiles grammars did not start")
        return self._process

    def _line(self, process: subprocess.Popen[str], seconds: float) -> str | None:
        """The process's next line; ends the process if it does not come."""
        assert process.stdout is not None
        with DefaultSelector() as selector:
            selector.register(process.stdout, EVENT_READ)
            line = process.stdout.readline() if selector.select(seconds) else ""
        if line:
            return line
        process.kill()
        process.communicate()
        self._process = None
        return None
