"""Tools are shown to any model, and its calls are found in its text, however it is cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.apps.serve.protocol import ChatMessage, Tool
from hf_refspec.apps.serve.tool_calls import CallReader, template_messages
from tests.helpers.byte_model import byte_llama, changed, qwen_tokenizer
from tests.helpers.running_server import serving

TOOL = Tool.model_validate({"type": "function", "function": {"name": "f"}})
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
ASKED = {"id": "123456789", "function": {"name": "f", "arguments": '{"a": 1}'}}
MESSAGES = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "tool_calls": [ASKED]},
    {"role": "tool", "tool_call_id": "123456789", "content": "7"},
]


def messages() -> list[ChatMessage]:
    return [ChatMessage.model_validate(each) for each in MESSAGES]


def read(tokenizer, pieces, cut_off=False):
    reader = CallReader(tokenizer, "", [TOOL], forced=True)
    parts = [
        part for piece in [*pieces, None] for part in reader.read(piece, cut_off and piece is None)
    ]
    text = "".join(part for part in parts if isinstance(part, str))
    functions = [part["function"] for part in parts if isinstance(part, dict)]
    return text, [(each["name"], each["arguments"]) for each in functions]


@given(st.lists(st.integers(0, 200), max_size=5))
def test_calls_are_found_however_the_text_is_cut(tokenizer, places):
    text = f"so: {CALL}\n{CALL}"
    cuts = sorted({0, len(text), *(place for place in places if place < len(text))})
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    assert read(tokenizer, pieces) == ("so:", [("f", '{"a": 1}')] * 2)


NO_CALLS = ["{", "3", '{"name": 3}', '{"name": "f", "arguments": 3}', "[]x"]
NO_CALLS += ['{"name": "f", "arguments": "x"}', '{"name": "f", "arguments": "[1]"}']


@pytest.mark.parametrize("body", NO_CALLS)
def test_what_is_no_call_stays_text_with_its_tags(tokenizer, body):
    written = f"<tool_call>{body}</tool_call> end"
    assert read(tokenizer, [written]) == read(tokenizer, written) == (written, [])


@given(st.integers(1, len(CALL) - 1))
def test_a_call_that_is_cut_off_stays_text_with_its_tag(tokenizer, length):
    begun = "\n" + CALL[:length]
    assert read(tokenizer, [CALL, begun], cut_off=True) == (begun, [("f", '{"a": 1}')])
    assert read(tokenizer, "so:" + begun, cut_off=True) == ("so:" + begun, [])


def test_several_calls_may_stand_in_a_list(tokenizer):
    body = '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'
    assert read(tokenizer, [f"<tool_call>{body}</tool_call>"])[1] == [("f", "{}"), ("g", "{}")]


def test_a_template_that_knows_no_tools_gets_texts(tokenizer):
    shown, tools = template_messages(tokenizer, messages(), [TOOL])
    assert tools is None and [each["role"] for each in shown] == [
        "system", "user", "assistant", "user"
    ]  # fmt: skip
    assert '{"type": "function", "function": {"name": "f"}}' in shown[0]["content"]
    assert shown[2]["content"] == CALL
    assert shown[3]["content"] == "<tool_response>\n7\n</tool_response>"


def test_a_template_that_knows_tools_gets_objects(tokenizer):
    knowing = changed(tokenizer, chat_template="{{ tools }}")
    shown, tools = template_messages(knowing, messages(), [TOOL])
    assert tools == [{"type": "function", "function": {"name": "f"}}]
    assert shown[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert shown[2] == {
        "role": "tool", "content": "7", "tool_call_id": "123456789", "name": "f"
    }  # fmt: skip


def test_a_template_gets_names_and_thoughts(tokenizer):
    about = {"role": "assistant", "content": "x", "name": "me", "reasoning_content": "so"}
    for template in ("{{ messages }}", "{{ tools }}"):
        other = changed(tokenizer, chat_template=template)
        assert template_messages(other, [ChatMessage.model_validate(about)], [])[0] == [about]


def test_calls_in_the_models_own_form_are_read_as_its_tokenizer_says(tokenizer):
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "assistant: ",
        "fields": {
            "tool_calls": {
                "open": "[[", "close": "]]", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"content": "text"},
        },
    }  # fmt: skip
    reader = CallReader(
        changed(tokenizer, response_template=template), "user: x\nassistant: ", [TOOL], forced=False
    )
    call = json.dumps({"name": "f", "arguments": {"a": 1}})
    pieces = [f"well [[{call}]]", "[[{nonsense]]", None]
    parts = [part for piece in pieces for part in reader.read(piece)]
    assert parts[0] == "well " and isinstance(parts[1], dict) and parts[2:] == ["[[{nonsense]]"]


@pytest.fixture(scope="module")
def tagged():
    """Serves a model whose tags are added tokens, as Qwen's."""
    tokenizer = qwen_tokenizer()
    model = byte_llama(len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with serving(model, tokenizer) as running:
        yield running


PLACE = {"type": "object", "properties": {"at": {"enum": ["Oslo", "<tool_call>"]}}}
PLACE["required"] = ["at"]
PLACES = {"type": "function", "function": {"name": "f", "parameters": PLACE}}
CHOICES = ["required", {"type": "function", "function": {"name": "f"}}]


def message(answer, stream: bool):
    """The content, the calls' functions and the finish reason of an answer."""
    if stream:
        [*chunks] = answer
        choices = [chunk.choices[0] for chunk in chunks]
        content = "".join(choice.delta.content or "" for choice in choices) or None
        calls = [call for choice in choices for call in choice.delta.tool_calls or []]
        return content, [call.function for call in calls], choices[-1].finish_reason
    [choice] = answer.choices
    calls = choice.message.tool_calls or []
    return choice.message.content, [call.function for call in calls], choice.finish_reason


@pytest.mark.parametrize("choice", CHOICES)
def test_a_demanded_call_of_a_model_whose_tags_are_added_tokens(tagged, choice, stream):
    pytest.importorskip("llguidance")
    options = {"tools": [PLACES], "tool_choice": choice, "parallel_tool_calls": False}
    answer = tagged.chat("one", stream=stream, max_tokens=100, **options)
    content, [function], reason = message(answer, stream)
    assert (content, function.name, reason) == (None, "f", "tool_calls")
    assert json.loads(function.arguments)["at"] in PLACE["properties"]["at"]["enum"]


def test_a_call_that_max_tokens_cuts_off_keeps_its_tag(tagged, stream):
    pytest.importorskip("llguidance")
    options = {"tools": [PLACES], "tool_choice": "required", "max_tokens": 6}
    content, calls, reason = message(tagged.chat("one", stream=stream, **options), stream)
    assert content.startswith('<tool_call>\n{"name') and (calls, reason) == ([], "length")
