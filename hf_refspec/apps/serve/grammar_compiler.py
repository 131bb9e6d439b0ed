"""Compiles grammars of clients, each first in a process that may be ended.

The intersection of a dozen regular expressions may take any time and memory, and nothing ends a
compilation but the end of its process.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...drafting.grammar.compiled import llguidance
from ...drafting.grammar.grammar_drafts import GrammarDrafts
from .constraints import Constraint
from .errors import ApiError, too_many

_SECONDS = 3  # for one grammar
_STARTING_SECONDS = 30
_MOST_WAITING = 64  # grammars that wait to be compiled

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
    print(json.dumps(LLMatcher.validate_grammar(grammar)[:2000]), flush=True)
"""


class GrammarCompiler:
    """Compiles one grammar after another for a tokenizer, while the event loop goes on."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def compiled(self, constraint: Constraint) -> GrammarDrafts:
        """Compiles a grammar, or raises an `ApiError`. A request that is cancelled, because its
        client has left, gives up its turn at once."""
        if self._waiting == _MOST_WAITING:
            raise too_many(f"{_MOST_WAITING} grammars wait to be compiled", 1)
        self._waiting += 1
        try:
            llguidance()
            async with self._turn:
                await self._check(constraint)
                arguments: dict[str, Any] = {constraint.kind: constraint.given}
                return await asyncio.to_thread(GrammarDrafts, self._tokenizer, **arguments)
        except ImportError as error:
            why = "this server was installed without the extra grammar"
            raise ApiError(400, f"{constraint.param}: {why}", constraint.param) from error
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            why = " ".join(str(error).split())[:500]
            raise ApiError(400, f"{constraint.param}: {why}", constraint.param) from error
        finally:
            self._waiting -= 1

    async def _check(self, constraint: Constraint) -> None:
        """Refuses a grammar that cannot be compiled, or takes too long."""
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _PROGRAM, stdin=PIPE, stdout=PIPE
            )
            if not await self._answer(b"", _STARTING_SECONDS):
                raise RuntimeError("the process that compiles grammars did not start")
        line = json.dumps([constraint.kind, constraint.given]) + "\n"
        answer = await self._answer(line.encode(), _SECONDS)
        if not answer:
            raise ValueError(f"takes more than {_SECONDS} s or 4 GiB to compile; make it simpler")
        if error := json.loads(answer):
            raise ValueError(f"cannot be compiled: {error}")

    async def _answer(self, line: bytes, seconds: float) -> bytes:
        """Sends a line to the process and returns its answer; ends the process, and returns
        nothing, if that does not come in time."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        answer = b""
        try:
            process.stdin.write(line)
            answer = await asyncio.wait_for(process.stdout.readline(), seconds)
        except (asyncio.TimeoutError, ConnectionError):
            pass
        finally:
            if not answer:
                self._process = None
                if process.returncode is None:
                    process.kill()
        return answer
