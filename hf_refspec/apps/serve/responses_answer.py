"""The answer to `/v1/responses`: items, whole or as the events in which they come about."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from .answers import Answer, Event
from .generation import Generation
from .logprobs import TokenLogprob
from .responses_protocol import ResponsesRequest
from .tool_calls import Call, Part, Reasoning

_NO_SCHEMA = {"parameters": None, "strict": None}  # no tool of OpenAI's types lacks these two


class ResponsesAnswer(Answer):
    """A response's items: messages, calls and what the model thought, each done before the next
    one begins."""

    ends_with_done = False

    def __init__(self, model: str, request: ResponsesRequest) -> None:
        asked = request.model_dump(exclude_none=True, by_alias=True)
        echoed = ["instructions", "max_output_tokens", "temperature", "text", "top_p"]
        self._response: Event = {
            "id": _id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "tool_choice": asked.get("tool_choice", "auto"),
            "tools": [_NO_SCHEMA | each for each in asked.get("tools", [])],
            "metadata": {},
            "usage": None,
            **{name: asked.get(name) for name in echoed},
        }
        self._open: Event | None = None  # the item that is being written
        self._events = 0

    def begin(self) -> list[Event]:
        return [
            self._event("response.created", response={**self._response}),
            self._event("response.in_progress", response={**self._response}),
        ]

    def add(self, row: int, part: Part, logprobs: list[TokenLogprob]) -> list[Event]:
        if isinstance(part, Call):
            return [*self._done("completed"), *self._call(part)]
        is_reasoning = isinstance(part, Reasoning)
        kind = "reasoning" if is_reasoning else "message"
        text = part.text if isinstance(part, Reasoning) else part
        events: list[Event] = []
        if self._open is None or self._open["type"] != kind:
            if self._response["output"] and not text.strip():  # between two items
                return []
            events = [*self._done("completed"), *self._begin_item(kind)]
        content = self._content()
        content["text"] += text
        if is_reasoning:
            return [*events, self._at_content("response.reasoning_text.delta", delta=text)]
        described = [each.described_with_top() for each in logprobs]
        content["logprobs"] += described
        about = {"delta": text, "logprobs": described}
        return [*events, self._at_content("response.output_text.delta", **about)]

    def end(self, row: int, generation: Generation) -> list[Event]:
        complete = generation.finish_reason == "stop"
        status = "completed" if complete else "incomplete"
        begun = self._open is not None or self._response["output"]
        events = [*([] if begun else self._begin_item("message")), *self._done(status)]
        if not complete:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._response |= {"status": status, "usage": _usage(generation)}
        return [*events, self._event(f"response.{status}", response=self._response)]

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        return self._response

    def _begin_item(self, kind: str) -> list[Event]:
        about: Event = {"id": _id("msg"), "role": "assistant", "content": []}
        if kind == "reasoning":
            about = {"id": _id("rs"), "summary": [], "content": []}
        item = self._open = {**about, "type": kind, "status": "in_progress"}
        events = [self._at_item("response.output_item.added", item={**item, "content": []})]
        if kind == "reasoning":
            item["content"].append({"type": "reasoning_text", "text": ""})
            return events
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"].append(part)
        empty = {**part, "logprobs": []}
        return [*events, self._at_content("response.content_part.added", part=empty)]

    def _done(self, status: str) -> list[Event]:
        """Ends the item that is being written, if there is one."""
        item, events = self._open, []
        if item is None:
            return []
        item["status"] = status
        content = self._content()
        if item["type"] == "reasoning":
            events = [self._at_content("response.reasoning_text.done", text=content["text"])]
        else:
            about = {"text": content["text"], "logprobs": content["logprobs"]}
            events = [
                self._at_content("response.output_text.done", **about),
                self._at_content("response.content_part.done", part=content),
            ]
        return [*events, *self._item_done(item)]

    def _call(self, call: Call) -> list[Event]:
        item = {"id": _id("fc"), "call_id": call.id, "type": "function_call", "name": call.name}
        begun = {**item, "arguments": "", "status": "in_progress"}
        about = {"item_id": item["id"]}
        prefix = "response.function_call_arguments"
        done = {**about, "name": call.name, "arguments": call.arguments}
        return [
            self._at_item("response.output_item.added", item=begun),
            self._at_item(f"{prefix}.delta", **about, delta=call.arguments),
            self._at_item(f"{prefix}.done", **done),
            *self._item_done({**item, "arguments": call.arguments, "status": "completed"}),
        ]

    def _item_done(self, item: Event) -> list[Event]:
        event = self._at_item("response.output_item.done", item=item)
        self._response["output"].append(item)
        self._open = None
        return [event]

    def _content(self) -> Event:
        assert self._open is not None
        content: Event = self._open["content"][0]
        return content

    def _at_content(self, kind: str, **about: Any) -> Event:
        assert self._open is not None
        return self._at_item(kind, item_id=self._open["id"], content_index=0, **about)

    def _at_item(self, kind: str, **about: Any) -> Event:
        return self._event(kind, output_index=len(self._response["output"]), **about)

    def _event(self, kind: str, **about: Any) -> Event:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **about}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _usage(generation: Generation) -> Event:
    prompt, completion = generation.prompt_tokens, generation.tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
