"""Grammars change no text: it is that of plain `generate` with the grammar's processor. What cannot
be compiled is refused, and no client waits for it."""

import asyncio
import json
from functools import partial
from itertools import count

import numpy as np
import openai
import pytest

from hf_refspec import GrammarDrafts
from hf_refspec.apps.serve.engine import Grammar
from hf_refspec.apps.serve.grammars import Constraint, GrammarBudget, GrammarCompiler
from hf_refspec.apps.serve.protocol import ApiError
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.contract import Call
from tests.helpers.running_server import Reply, serving, wait_until

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["human", "robot"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "marks": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
        "name": {"type": "string", "pattern": "^[a-z]{3,9}$"},
    },
    "required": ["kind", "age", "marks", "name"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}

# An intersection that no compiler can tell from the empty one.
PATTERNS = [{"pattern": f"(a|b)*a(a|b){{{i}}}" + "c" * (i % 3)} for i in range(12, 24)]
HOSTILE = {"type": "object", "properties": {"a": {"allOf": [{"type": "string"}, *PATTERNS]}}}


@pytest.fixture(scope="module")
def free_server(byte_llama, tokenizer):
    """Serves a model that may write any byte, and end its text."""
    with serving(byte_llama, tokenizer, max_rows=2) as server:
        yield server


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.9}])
def test_json_is_the_text_of_plain_generate_with_the_grammars_processor(
    free_server, byte_llama, tokenizer, plain, sampling
):
    for seed, message in enumerate(["one", "größer 🙂"], start=3):
        options = {"do_sample": True, **sampling} if sampling else {}
        processors = [GrammarDrafts(tokenizer, json_schema=SCHEMA).processor()]
        options |= {"seed": seed, "max_new_tokens": 200, "model": byte_llama}
        expected = plain(message, logits_processor=processors, **options)
        options = {"seed": seed, "max_tokens": 200, "response_format": FORMAT, **sampling}
        [choice] = free_server.chat(message, **options).choices
        assert choice.message.content == expected and choice.finish_reason == "stop"
        assert json.loads(expected).keys() == SCHEMA["properties"].keys()
        stream = free_server.chat(message, stream=True, **options)
        assert Reply(stream).text == expected


@pytest.mark.parametrize("field", ["schema", "value"])
@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_is_honoured_in_the_forms_of_other_servers(free_server, kind, field):
    answers = [
        free_server.chat("one", response_format=form, max_tokens=200)
        for form in (FORMAT, {"type": kind, field: SCHEMA})
    ]
    assert answers[0].choices == answers[1].choices


def test_what_a_grammar_forces_is_drafted(byte_llama, tokenizer):
    with serving(byte_llama, tokenizer, max_draft_tokens=16) as server:
        server.chat("two", max_tokens=200, response_format=FORMAT)
        metrics = server.metrics()
    assert metrics["generated_tokens_total"] > 2 * metrics["forward_passes_total"]


def test_json_or_a_call_where_the_model_may_choose(free_server):
    kinds = set()
    for seed in range(12):
        options = {"seed": seed, "temperature": 2.0, "max_tokens": 300, "tools": [TOOL]}
        [choice] = free_server.chat("one", response_format=FORMAT, **options).choices
        kinds.add(choice.finish_reason)
        texts = [call.function.arguments for call in choice.message.tool_calls or []]
        for text in texts or [choice.message.content]:
            assert json.loads(text).keys() == SCHEMA["properties"].keys()
    assert kinds == {"stop", "tool_calls"}


def test_no_call_where_the_client_wants_none(free_server):
    options = {"tools": [TOOL], "tool_choice": "none", "max_tokens": 200}
    answer = free_server.chat("one", response_format=FORMAT, **options)
    same = free_server.chat("one", response_format=FORMAT, max_tokens=200)
    assert answer.choices == same.choices


def test_a_schema_that_cannot_be_compiled_is_refused_and_others_go_on(
    free_server, plain, byte_llama
):
    stream = free_server.chat("one", stream=True, max_tokens=60)
    hostile = {"type": "json_schema", "json_schema": {"name": "x", "schema": HOSTILE}}
    with pytest.raises(openai.BadRequestError, match="cannot be compiled") as refusal:
        free_server.chat("one", response_format=hostile)
    assert refusal.value.param == "response_format"
    assert Reply(stream).text == plain("one", max_new_tokens=60, model=byte_llama)
    answer = free_server.chat("one", response_format=FORMAT, max_tokens=200)
    assert json.loads(answer.choices[0].message.content)


CONSTRAINT = Constraint("response_format", "json_schema", SCHEMA)
ENDLESS = "start: X\nX: " + " & ".join(f"/(a|b)*a(a|b){{{n}}}/" for n in range(12, 24))


def test_a_compiler_that_has_died_is_started_again_and_one_that_takes_too_long_ended(tokenizer):
    async def compile_again() -> None:
        compiler = GrammarCompiler(tokenizer, seconds=600)
        assert await compiler.compiled(CONSTRAINT)
        compiler._process.kill()
        await compiler._process.wait()
        assert await compiler.compiled(CONSTRAINT)
        with pytest.raises(ApiError, match="takes more than 0 s or 4 GiB"):
            await GrammarCompiler(tokenizer, seconds=0).compiled(CONSTRAINT)

    asyncio.run(compile_again())


def test_grammars_of_clients_that_have_left_hold_nobody_up(tokenizer):
    """No limit of time ends a compilation here, so that only a client that leaves can."""

    async def leave() -> None:
        compiler = GrammarCompiler(tokenizer, seconds=600)
        assert await compiler.compiled(CONSTRAINT)
        process = compiler._process
        request = Constraint("response_format", "lark", ENDLESS)
        running, waiting = (asyncio.create_task(compiler.compiled(request)) for _ in range(2))
        await asyncio.sleep(0)
        waiting.cancel()
        running.cancel()
        assert await compiler.compiled(CONSTRAINT)
        assert running.cancelled() and waiting.cancelled()
        assert await process.wait() != 0 and compiler._process is not process

    asyncio.run(leave())


def test_a_tools_constants_are_written_as_they_are(free_server):
    looks_like_a_schema = {"type": "object", "properties": {}, "$ref": "#a"}
    properties = {"a": {"const": looks_like_a_schema}, "b": {"enum": [looks_like_a_schema]}}
    parameters = {"type": "object", "properties": properties, "required": ["a", "b"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    options = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    [choice] = free_server.chat("one", max_tokens=300, **options).choices
    arguments = json.loads(choice.message.tool_calls[0].function.arguments)
    assert arguments == {"a": looks_like_a_schema, "b": looks_like_a_schema}


def test_a_demanded_call_whose_schema_is_invalid_is_refused(free_server):
    parameters = {"type": "object", "properties": {"a": {"type": "x"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError) as refusal:
        free_server.chat("one", tools=[tool], tool_choice="required")
    assert refusal.value.param == "tools"


def test_a_grammar_that_takes_too_long_ends_its_request_alone(byte_llama, tokenizer, plain, stream):
    """This clock goes on by a second or by a millisecond whenever it is read."""
    part = {"$ref": "#/$defs/a"}
    alternatives = [*[{"type": "array", "items": part}] * 60, {"type": "integer"}]
    schema = {**part, "$defs": {"a": {"anyOf": alternatives}}}
    ambiguous = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    now, step = 0.0, 1.0

    def clock() -> float:
        nonlocal now
        now += step
        return now

    with serving(byte_llama, tokenizer, max_rows=2, clock=clock) as server:
        other = server.chat("one", stream=True, max_tokens=200)
        first = next(other)
        with pytest.raises(openai.APIError, match="takes more than 50 ms and 3 ms") as error:
            answer = server.chat("two", response_format=ambiguous, stream=stream, n=2)
            list(answer)
        assert (error.value.param, error.value.code) == ("response_format", "grammar_too_slow")
        text = Reply([first, *other]).text
        assert text == plain("one", max_new_tokens=200, model=byte_llama)
        wait_until(lambda: server.engine.running == 0)
        assert server.outcomes("grammar") + server.outcomes("cancelled") == 2
        assert server.outcomes("refused") == 0
        step = 0.001
        [choice] = server.chat("one", response_format=FORMAT, max_tokens=200).choices
        assert json.loads(choice.message.content).keys() == SCHEMA["properties"].keys()


def test_drafts_end_where_the_budget_is_spent_between_two_of_their_steps(tokenizer):
    """The clock goes on by as much as a draft may take whenever it is read."""
    drafted = []
    for step in (0.0, 0.02):
        grammar = Grammar()
        budget = GrammarBudget(partial(next, count(0, step)))
        drafts = GrammarDrafts(tokenizer, json_schema=SCHEMA)
        drafts.stops = budget.ends_drafts
        grammar.lend(drafts, budget)
        with drafter_call(grammar, [np.array([5])], len(tokenizer)):
            drafted.append(len(grammar.draft(40, Call())))
    assert 0 < drafted[1] < drafted[0]


def test_a_request_that_leaves_no_token_fails_alone(speller, tokenizer, plain):
    """This model never ends a text, and the grammar must."""
    with serving(speller, tokenizer, max_rows=2) as server:
        stream = server.chat("one", stream=True, max_tokens=200)
        first = next(stream)
        with pytest.raises(openai.InternalServerError):
            server.chat("two", response_format=FORMAT, temperature=1.0, max_tokens=200)
        text = Reply([first, *stream]).text
        assert text == plain("one", max_new_tokens=200)
        assert server.outcomes("error") == 1
