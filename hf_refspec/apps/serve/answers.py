"""The answers, as OpenAI documents them: whole, or streamed in chunks."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .engine import Engine
from .errors import ApiError, grammar_too_slow, internal_error, shutting_down
from .generation import Generation, Piece, TokenLogprob
from .protocol import ChatRequest, TextRequest
from .served_model import Prepared
from .tool_calls import Call, Part, Reasoning

Event: TypeAlias = dict[str, Any]


@dataclass
class Choice:
    """What has come of a row."""

    parts: list[Part] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[Call]:
        return [part for part in self.parts if isinstance(part, Call)]


class Answer:
    """The answer to a chat or a completion, with a choice for each row. It receives a row's parts
    one after another, and returns what a stream then sends."""

    def __init__(self, model: str, request: TextRequest) -> None:
        self._is_chat = isinstance(request, ChatRequest)
        self._about = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": model}
        self._choices = [Choice() for _ in range(request.n or 1)]
        self._logprobs = request.logprobs is not None and request.logprobs is not False
        options = request.stream_options
        self._includes_usage = bool(options and options.include_usage)

    def begin(self) -> list[Event]:
        """Only a chat's answer has a beginning."""
        delta = {"delta": {"role": "assistant", "content": ""}}
        rows = range(len(self._choices)) if self._is_chat else ()
        return [self._chunk(row, delta, None) for row in rows]

    def add(self, row: int, part: Part, logprobs: list[TokenLogprob]) -> list[Event]:
        """Receives a row's next part."""
        choice = self._choices[row]
        delta = self._delta(choice, part)
        described = self._described(logprobs, len(choice.text))
        choice.parts.append(part)
        choice.logprobs += logprobs
        return [self._chunk(row, delta, described)]

    def end(self, row: int, generation: Generation) -> list[Event]:
        """Ends a row."""
        choice = self._choices[row]
        choice.finish_reason = generation.finish_reason
        if choice.calls and choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"
        return [self._chunk(row, self._delta(choice, None), None, choice.finish_reason)]

    def close(self, generations: Sequence[Generation]) -> list[Event]:
        """Ends the answer, after all rows."""
        return [{**self._chunks([]), "usage": usage(generations)}] if self._includes_usage else []

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        choices = [
            {
                **self._message(choice),
                "index": row,
                "logprobs": self._described(choice.logprobs, 0),
                "finish_reason": choice.finish_reason,
            }
            for row, choice in enumerate(self._choices)
        ]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._about, "object": kind, "choices": choices, "usage": usage(generations)}

    def _chunk(
        self, row: int, delta: Event, logprobs: Event | None, finish_reason: str | None = None
    ) -> Event:
        choice = {**delta, "index": row, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._chunks([choice])

    def _chunks(self, choices: list[Event]) -> Event:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._about, "object": kind, "choices": choices}

    def _message(self, choice: Choice) -> Event:
        if not self._is_chat:
            return {"text": choice.text}
        message: Event = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            calls = [_described_call(each) for each in choice.calls]
            message |= {"content": choice.text or None, "tool_calls": calls}
        if reasoning := "".join(p.text for p in choice.parts if isinstance(p, Reasoning)):
            message["reasoning_content"] = reasoning
        return {"message": message}

    def _delta(self, choice: Choice, part: Part | None) -> Event:
        if not self._is_chat:
            return {"text": part or ""}
        if part is None:
            return {"delta": {}}
        if isinstance(part, Call):
            call = {"index": len(choice.calls), **_described_call(part)}
            return {"delta": {"tool_calls": [call]}}
        if isinstance(part, Reasoning):
            return {"delta": {"reasoning_content": part.text}}
        return {"delta": {"content": part}}

    def _described(self, logprobs: Sequence[TokenLogprob], offset: int) -> Event | None:
        """Log probabilities; of a completion with the places of tokens in its text."""
        if not self._logprobs:
            return None
        if self._is_chat:
            return {"content": logprobs, "refusal": None}
        tokens = [each["token"] for each in logprobs]
        top = [{t["token"]: t["logprob"] for t in each["top_logprobs"]} for each in logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [each["logprob"] for each in logprobs],
            "top_logprobs": top,
            "text_offset": [*accumulate(map(len, tokens[:-1]), initial=offset)][: len(tokens)],
        }


def _described_call(call: Call) -> Event:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
    """The tokens of a request, whose prompt counts once. Tokens of a prediction are accepted if
    they were drafted and the model chose them, and rejected otherwise."""
    prompt = generations[0].prompt_tokens
    completion = sum(each.tokens for each in generations)
    accepted = sum(each.accepted_prediction_tokens for each in generations)
    rejected = sum(each.rejected_prediction_tokens for each in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


class Stream:
    """Submits a request, and has its answer written in the event loop, piece by piece."""

    def __init__(self, engine: Engine, prepared: Prepared, answer: Answer) -> None:
        self._engine = engine
        self.answer = answer
        self._constraint = prepared.constraint
        self._readers = [prepared.reader() for _ in prepared.rows]
        self._pieces: asyncio.Queue[tuple[int, Piece | None]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._generations = engine.submit(prepared.rows, self._put)

    async def events(self) -> AsyncIterator[Event]:
        """What is streamed; raises an `ApiError` if a row could not be generated."""
        for event in self.answer.begin():
            yield event
        left = len(self._generations)
        while left:
            row, piece = await self._pieces.get()
            left -= piece is None
            for event in self._ended(row) if piece is None else self._read(row, piece):
                yield event
        for event in self.answer.close(self._generations):
            yield event

    async def whole(self) -> dict[str, Any]:
        """The complete answer. However it ends, so does the generation."""
        try:
            async for _ in self.events():
                pass
        finally:
            self.cancel()
        return self.answer.whole(self._generations)

    def cancel(self) -> None:
        """Ends the generation: its client has left."""
        for generation in self._generations:
            self._engine.cancel(generation)

    def _read(self, row: int, piece: Piece) -> list[Event]:
        reader = self._readers[row]
        parts = [piece.text] if reader is None else reader.read(piece.text)
        if not parts and piece.logprobs:
            parts = [""]  # the text is held back
        events = []
        for i, part in enumerate(parts):
            events += self.answer.add(row, part, [] if i else piece.logprobs)
        return events

    def _ended(self, row: int) -> list[Event]:
        generation = self._generations[row]
        if generation.outcome == "error":
            raise internal_error()
        if generation.outcome == "grammar":
            assert self._constraint is not None
            raise grammar_too_slow(self._constraint.param)
        if generation.outcome == "cancelled":  # while its client still reads
            raise shutting_down()
        reader = self._readers[row]
        parts = [] if reader is None else reader.read(None)
        events = [event for part in parts for event in self.answer.add(row, part, [])]
        return [*events, *self.answer.end(row, generation)]

    def _put(self, row: int, piece: Piece | None) -> None:  # called in the engine's thread
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, (row, piece))
        except RuntimeError:  # the event loop is closed
            self._generations[row].cancelled = True


class EventStream(StreamingResponse):
    """The answer in chunks, as server-sent events. However it ends, so does the generation."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(_lines(stream), media_type="text/event-stream")
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.cancel()


async def _lines(stream: Stream) -> AsyncIterator[str]:
    try:
        async for event in stream.events():
            yield f"data: {json.dumps(event)}\n\n"
    except ApiError as error:
        yield f"data: {json.dumps(error.body)}\n\n"
        return
    yield "data: [DONE]\n\n"
