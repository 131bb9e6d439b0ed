"""Tool calls: showing tools to a model, and reading its calls from its text.

If the chat template knows no tools, or the tokenizer does not say how calls are read, they have the
form of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias, cast

from transformers import PreTrainedTokenizerBase

from .protocol import ChatMessage, Tool, text_of

_ROLES = {"developer": "system"}  # OpenAI's newer name, which templates do not know
OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"

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


@dataclass(frozen=True)
class Reasoning:
    """The model's thoughts before its answer."""

    text: str


Call: TypeAlias = dict[str, Any]  # in OpenAI's form
Part: TypeAlias = str | Reasoning | Call


class CallReader:
    """Finds calls in an answer as it comes. They have the form of the tokenizer's
    `response_template`; if it has none, or if they are `forced`, the form above."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: str, tools: Sequence[Tool], forced: bool
    ) -> None:
        own = None if forced else getattr(tokenizer, "response_template", None)
        shown = [each.model_dump(exclude_none=True) for each in tools]
        template, prefix = (_HERMES, "") if own is None else (own, prompt)
        self._parser = tokenizer.get_response_parser(template, prefix=prefix, tools=shown)
        self._held = ""  # read, but neither text of a part nor the tags of a complete region
        self._failed = False

    def read(self, text: str | None, cut_off: bool = False) -> list[Part]:
        """The parts that a piece of the answer completes; `None` is its end. A call that this end
        has `cut_off`, or that cannot be read, is text as the model wrote it, with its tags."""
        parts: list[Part] = []
        # Character by character: then a region ends with the last one that was read.
        for piece in [None] if text is None else text:
            self._held += piece or ""
            try:
                if not self._failed:
                    parser = self._parser
                    events = parser.finalize()[1] if piece is None else parser.feed(piece)
                    for event in events:
                        parts += self._parts(event, cut_off)
            except (ValueError, KeyError, TypeError):  # not JSON, or not of a call
                self._failed = True
            if self._failed:
                parts.append(self._held)
                self._held = ""
        return _joined(parts)

    def _parts(self, event: dict[str, Any], cut_off: bool) -> list[Part]:
        kind, field, text = event["type"], event.get("field"), event.get("text") or ""
        if kind == "region_close" and field != "content":
            held, self._held = self._held, ""
            if field == "tool_calls":
                return (not cut_off and calls_in(event["value"])) or [held]
        if kind == "region_chunk" and field != "tool_calls":
            self._held = self._held.partition(text)[2]
            return [text if field == "content" else Reasoning(text)]
        return []


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Parts of which no two neighbours are text, or thoughts."""
    joined: list[Part] = []
    for kind, group in groupby(parts, type):
        if kind is str:
            joined.append("".join(cast(Iterator[str], group)))
        elif kind is Reasoning:
            joined.append(Reasoning("".join(cast(Reasoning, part).text for part in group)))
        else:
            joined += group
    return [part for part in joined if part not in ("", Reasoning(""))]


def calls_in(value: Any) -> list[Part]:
    """The calls that a parsed value describes, if any."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    calls: list[Part] = []
    for each in value if isinstance(value, list) else [value]:
        function = each.get("function", each) if isinstance(each, dict) else {}
        name, arguments = function.get("name"), function.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            return []
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        described = {"name": name, "arguments": text}
        # Mistral's templates refuse ids of any other length.
        calls.append({"id": uuid.uuid4().hex[:9], "type": "function", "function": described})
    return calls


def template_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[ChatMessage], tools: Sequence[Tool]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools for the chat template; if it knows no tools, messages of text alone."""
    shown = [each.model_dump(exclude_none=True) for each in tools]
    template = tokenizer.get_chat_template(tools=shown or None)
    if re.search(r"\btools\b", template):
        return _with_calls(messages), shown or None
    plain = []
    for each in messages:  # in roles that every template knows
        role = "user" if each.role == "tool" else _ROLES.get(each.role, each.role)
        plain.append({"role": role, "content": _as_text(each)})
    if shown:
        listed = "\n".join(json.dumps(each, ensure_ascii=False) for each in shown)
        if plain[0]["role"] != "system":
            plain.insert(0, {"role": "system", "content": ""})
        text = f"{plain[0]['content']}\n\n{_TOOLS_TEXT.format(tools=listed)}"
        plain[0]["content"] = text.lstrip()
    return plain, None


def _as_text(message: ChatMessage) -> str:
    text = text_of(message.content)
    if message.role == "tool":
        return f"<tool_response>\n{text}\n</tool_response>"
    calls = [
        f'{OPEN}{{"name": {json.dumps(each.function.name)}, '
        f'"arguments": {each.function.arguments}}}{CLOSE}'
        for each in message.tool_calls or []
    ]
    return "\n".join([*([text] if text or not calls else []), *calls])


def _with_calls(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages with arguments as objects, and the function's name beside each result."""
    names: dict[str | None, str] = {}
    described = []
    for each in messages:
        about: dict[str, Any] = {"role": _ROLES.get(each.role, each.role)}
        about["content"] = text_of(each.content)
        if each.tool_calls:
            names |= {call.id: call.function.name for call in each.tool_calls}
            about["tool_calls"] = [call.model_dump() for call in each.tool_calls]
            for call in about["tool_calls"]:
                with suppress(ValueError, RecursionError):  # otherwise it stays as it is
                    arguments = json.loads(call["function"]["arguments"] or "{}")
                    if isinstance(arguments, dict):
                        call["function"]["arguments"] = arguments
        if each.role == "tool":
            about["tool_call_id"] = each.tool_call_id
            about |= {"name": names[each.tool_call_id]} if each.tool_call_id in names else {}
        described.append(about)
    return described
