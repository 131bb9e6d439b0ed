"""Tool calls: showing tools to a model, and reading its calls from its text.

If the chat template takes no tools, or the tokenizer has no `response_template`, calls have the
form of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.
"""

import json
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from .protocol import ChatMessage, Tool, content_text

# For templates without tools, and without OpenAI's newer name of "system".
_TEMPLATE_ROLES = {"tool": "user", "developer": "system"}
OPEN = "<tool_call>\n"
CLOSE = "\n</tool_call>"

# In the words that Hermes and Qwen were trained with.
_TOOLS_TEXT = """You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

_HERMES = {
    "defaults": {"role": "assistant"},
    "start_anchor": OPEN,  # a prompt has no open one
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "content_args": {"allow_non_json": True},
        },
        "content": {"content": "text"},
    },
}


class Reasoning(str):
    """The model's thoughts before its answer."""


# Text, thoughts, or a call in OpenAI's form.
AnswerPart: TypeAlias = str | Reasoning | dict[str, Any]


class CallReader:
    """Finds calls in an answer while it is generated.

    They have the form of the tokenizer's `response_template`; if it has none, or if they are
    `forced`, the form above."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: str, tools: Sequence[Tool], forced: bool
    ) -> None:
        template = None if forced else getattr(tokenizer, "response_template", None)
        if template is None:
            template = _HERMES
            prompt = ""
        shown = [tool.model_dump(exclude_none=True) for tool in tools]
        self._parser = tokenizer.get_response_parser(template, prefix=prompt, tools=shown)
        self._held = ""  # read, but neither text of a part nor the tags of a complete region
        self._failed = False

    def read(self, text: str | None, cut_off: bool = False) -> list[AnswerPart]:
        """The parts that a piece of the answer completes; `None` is its end.

        A call that this end has `cut_off`, or that cannot be read, is text as the model wrote it,
        with its tags."""
        parts: list[AnswerPart] = []
        # Character by character: then a region ends with the last one that was read.
        for character in [None] if text is None else text:
            self._held += character or ""
            try:
                if not self._failed:
                    parser = self._parser
                    events = parser.feed(character) if character else parser.finalize()[1]
                    for event in events:
                        parts += self._parts(event, cut_off)
            except (ValueError, KeyError, TypeError):  # not JSON, or not of a call
                self._failed = True
            if self._failed:
                parts.append(self._held)
                self._held = ""
        joined: list[AnswerPart] = []
        for kind, group in groupby(parts, type):
            if kind is dict:
                joined += group
            else:
                joined.append(kind("".join(map(str, group))))
        return [part for part in joined if part]

    def _parts(self, event: dict[str, Any], cut_off: bool) -> list[AnswerPart]:
        field = event.get("field")
        if event["type"] == "region_close" and field != "content":
            held = self._held
            self._held = ""
            if field == "tool_calls":
                return (not cut_off and calls_in(event["value"])) or [held]
        if event["type"] == "region_chunk" and field != "tool_calls":
            text = event["text"]
            self._held = self._held.partition(text)[2]
            return [text if field == "content" else Reasoning(text)]
        return []


def calls_in(value: Any) -> list[AnswerPart]:
    """The calls that a parsed value describes, if any."""
    value = _json(value)
    calls: list[AnswerPart] = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else {}
        name = function.get("name")
        arguments = function.get("arguments", {})
        if not isinstance(name, str) or not isinstance(_json(arguments), dict):
            return []
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        described = {"name": name, "arguments": text}
        # Mistral's templates refuse ids of any other length.
        calls.append({"id": uuid.uuid4().hex[:9], "type": "function", "function": described})
    return calls


def _json(value: Any) -> Any:
    """The value of a text of JSON, `None` if it is another text; anything else itself."""
    with suppress(ValueError, RecursionError):
        return json.loads(value) if isinstance(value, str) else value
    return None


def template_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[ChatMessage], tools: Sequence[Tool]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools for the chat template; if it takes no tools, messages of text alone."""
    shown = [tool.model_dump(exclude_none=True) for tool in tools]
    template = tokenizer.get_chat_template(tools=shown or None)
    if re.search(r"\btools\b", template):
        return _with_calls(messages), shown or None
    plain = []
    for message in messages:  # in roles that every template knows
        role = _TEMPLATE_ROLES.get(message.role, message.role)
        plain.append({"role": role, "content": _as_text(message), **_further(message)})
    if shown:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in shown)
        if plain[0]["role"] != "system":
            plain.insert(0, {"role": "system", "content": ""})
        text = f"{plain[0]['content']}\n\n{_TOOLS_TEXT.format(tools=listed)}"
        plain[0]["content"] = text.lstrip()
    return plain, None


def _as_text(message: ChatMessage) -> str:
    text = content_text(message.content)
    if message.role == "tool":
        return f"<tool_response>\n{text}\n</tool_response>"
    lines = [text] if text or not message.tool_calls else []
    for call in message.tool_calls or []:
        name = json.dumps(call.function.name)
        lines.append(f'{OPEN}{{"name": {name}, "arguments": {call.function.arguments}}}{CLOSE}')
    return "\n".join(lines)


def _further(message: ChatMessage) -> dict[str, Any]:
    """Fields that some templates show with the content."""
    return message.model_dump(include={"name", "reasoning_content"}, exclude_none=True)


def _with_calls(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages with arguments as objects, and the function's name beside each result."""
    names: dict[str | None, str] = {}
    described = []
    for message in messages:
        about: dict[str, Any] = {"content": content_text(message.content), **_further(message)}
        about["role"] = "system" if message.role == "developer" else message.role
        if message.tool_calls:
            names |= {call.id: call.function.name for call in message.tool_calls}
            about["tool_calls"] = [call.model_dump() for call in message.tool_calls]
            for call in about["tool_calls"]:
                arguments = _json(call["function"]["arguments"] or "{}")
                if isinstance(arguments, dict):  # otherwise it stays a text
                    call["function"]["arguments"] = arguments
        if message.role == "tool":
            about["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in names:
                about["name"] = names[message.tool_call_id]
        described.append(about)
    return described
