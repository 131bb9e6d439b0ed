"""Grammars that an answer must follow: JSON of a schema, calls of tools, or either.

Each is first compiled in another process: the intersection of a dozen regular expressions may take
any time and memory, and only the end of its process ends a compilation. Masks and drafts of a
compiled grammar have a budget of time.
"""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import thread_time
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...drafting.grammar.grammar_drafts import GrammarDrafts
from ...drafting.grammar.processor import llguidance
from ...drafting.grammar.schemas import JSON_FORM, VALUES, call_schema, changed
from .protocol import ApiError, ChatRequest, Tool
from .tool_calls import CLOSE, OPEN

_BUDGET = 0.05  # seconds; a mask of an ordinary grammar takes 0.2 ms
_BUDGET_A_TOKEN = 0.003
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
    kind, source = json.loads(line)
    if kind == "json_schema":
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(source))
    else:
        grammar = LLMatcher.grammar_from_lark(source)
    print(json.dumps(LLMatcher.validate_grammar(grammar)[:2000]), flush=True)
"""


@dataclass(frozen=True)
class Constraint:
    """A grammar that is not compiled yet."""

    param: str  # the request's field that it comes from
    kind: str  # an argument of `GrammarDrafts`
    source: Any  # and its value


def constraint(request: ChatRequest) -> Constraint | None:
    """The constraint that a request names, if any; an answer in JSON may still call a tool."""
    tools = request.tools or []
    choice = request.tool_choice
    named = ""
    if isinstance(choice, Tool):
        named = f" {choice.function.name}"
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    if choice not in (None, "none", "auto"):
        if not tools:
            raise ApiError(400, f"tool_choice: there is no tool{named} in tools", "tool_choice")
        return Constraint("tools", "lark", _lark(request, tools, None))
    form = request.response_format
    schema = form.answer_schema if form else None
    if schema is None:
        return None
    if tools and choice != "none":
        return Constraint("response_format", "lark", _lark(request, tools, schema))
    return Constraint("response_format", "json_schema", schema)


def _lark(request: ChatRequest, tools: Sequence[Tool], schema: dict[str, Any] | None) -> str:
    """A grammar of calls, or of JSON of the schema, in llguidance's dialect of Lark."""
    # Parts of an intersection must allow each other's properties.
    calls = changed(call_schema([tool.model_dump() for tool in tools]), _closed, VALUES | {"allOf"})
    is_one = request.parallel_tool_calls is False or isinstance(request.tool_choice, Tool)
    further = "" if is_one else ' ("\\n" call)*'
    start = f"start: call{further}"
    call = f"call: {json.dumps(OPEN)} %json {_formed(calls)} {json.dumps(CLOSE)}"
    if schema is None:
        return f"{start}\n{call}"
    return f"{start} | json\n{call}\njson: %json {_formed(schema)}"


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Forbids properties that a schema neither names nor allows: no function knows them."""
    if schema.get("type") == "object" and "properties" in schema:
        return {"additionalProperties": False, **schema}
    return schema


def _formed(schema: dict[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": JSON_FORM})


class GrammarCompiler:
    """Compiles one grammar after another for a tokenizer, each for a few seconds at most."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seconds: float = 3) -> None:
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    async def compiled(self, constraint: Constraint) -> GrammarDrafts:
        """Compiles a grammar, or raises an `ApiError`. A cancelled request gives up its turn."""
        arguments: dict[str, Any] = {constraint.kind: constraint.source}
        try:
            llguidance()
            async with self._turn:
                await self._check(constraint)
                return await asyncio.to_thread(GrammarDrafts, self._tokenizer, **arguments)
        except (ImportError, ValueError, TypeError, AttributeError, KeyError) as error:
            why = " ".join(str(error).split())[:500]
            if isinstance(error, ImportError):
                why = "this server was installed without the extra grammar"
            raise ApiError(400, f"{constraint.param}: {why}", constraint.param) from error

    async def _check(self, constraint: Constraint) -> None:
        """Refuses a grammar that cannot be compiled, or takes too long."""
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _PROGRAM, stdin=PIPE, stdout=PIPE
            )
            if not await self._answer(b"", _STARTING_SECONDS):
                raise RuntimeError("the process that compiles grammars did not start")
        line = json.dumps([constraint.kind, constraint.source]) + "\n"
        answer = await self._answer(line.encode(), self._seconds)
        if not answer:
            raise ValueError(f"takes more than {self._seconds} s or 4 GiB to compile; simplify it")
        if error := json.loads(answer):
            raise ValueError(f"cannot be compiled: {error}")

    async def _answer(self, line: bytes, seconds: float) -> bytes:
        """The process's answer to a line; if none comes in time, ends the process."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        answer = b""
        try:
            with suppress(asyncio.TimeoutError, ConnectionError):
                process.stdin.write(line)
                answer = await asyncio.wait_for(process.stdout.readline(), seconds)
        finally:
            if not answer:
                self._process = None
                if process.returncode is None:
                    process.kill()
        return answer


class GrammarBudget:
    """The time for masks and drafts of a request's grammar, in all of its rows together.

    It is 50 ms, and 3 ms for each token, of computing in `with` blocks; one step of the grammar,
    which nothing interrupts, may exceed it. Drafts leave half of the 50 ms to the masks."""

    def __init__(self, clock: Callable[[], float] = thread_time) -> None:
        self._clock = clock
        self._left = _BUDGET
        self._began: float | None = None  # None while nothing is counted

    def add_token(self) -> None:
        self._left += _BUDGET_A_TOKEN

    @property
    def left(self) -> float:
        return self._left - (0.0 if self._began is None else self._clock() - self._began)

    def ends_drafts(self) -> bool:
        return self.left < _BUDGET / 2

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *error: Any) -> None:
        self._left = self.left
        self._began = None
