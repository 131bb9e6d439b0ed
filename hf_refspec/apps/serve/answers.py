"""Answers in OpenAI's form: whole, or streamed in chunks."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .engine import RequestEngine
from .errors import TOO_SLOW, ApiError, internal_error, shutting_down
from .protocol import ChatRequest, TextRequest
from .served_row import Piece, PreparedRequest, TokenLogprob
from .tool_calls import AnswerPart, CallReader, Reasoning

Event: TypeAlias = dict[str, Any]


@dataclass
class RowAnswer:
    """The answer of a row so far; the reader finds calls in its text, if it may have any."""

    reader: CallReader | None
    parts: list[AnswerPart] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if not isinstance(part, Reasoning | dict))

    @property
    def calls(self) -> list[Event]:
        return [part for part in self.parts if isinstance(part, dict)]


class Answer:
    """Submits a request, and writes its answer in the event loop: a choice for each row."""

    def __init__(
        self,
        engine: RequestEngine,
        prompts: Sequence[PreparedRequest],
        model: str,
        request: TextRequest,
    ) -> None:
        self._engine = engine
        self._is_chat = isinstance(request, ChatRequest)
        self._source_names = engine.source_names if self._is_chat else None
        self._about = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": model}
        self._logprobs = prompts[0].top_logprobs is not None
        options = request.stream_options
        self._includes_usage = bool(options and options.include_usage)
        self._choices = [RowAnswer(each.reader()) for each in prompts for _ in range(each.rows)]
        self._rows_a_prompt = prompts[0].rows
        self._pieces: asyncio.Queue[tuple[int, Piece | None]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._rows = engine.submit(prompts, self._put)

    async def events(self) -> AsyncIterator[Event]:
        """The events of a stream; raises an `ApiError` if a row could not be generated."""
        for row in range(len(self._choices)) if self._is_chat else ():
            yield self._chunk(row, {"delta": {"role": "assistant", "content": ""}}, None)
        left = len(self._choices)
        while left:
            row, piece = await self._pieces.get()
            left -= piece is None
            if piece is None and self._source_names is not None:
                await asyncio.to_thread(getattr, self._rows[row].stats, "copied")
            for event in self._ended(row) if piece is None else self._read(row, piece):
                yield event
        if self._includes_usage:
            yield {**self._described([], ".chunk"), **self._figures()}

    async def whole(self) -> Event:
        """The complete answer. Its end, even by an error, ends its rows."""
        try:
            async for _ in self.events():
                pass
        finally:
            self.cancel()
        choices = [
            self._choice(row, self._message(row, choice), self._listed(choice.logprobs, 0))
            for row, choice in enumerate(self._choices)
        ]
        return {**self._described(choices), **self._figures()}

    def cancel(self) -> None:
        for row in self._rows:
            self._engine.cancel(row)

    def _read(self, row: int, piece: Piece) -> Iterator[Event]:
        reader = self._choices[row].reader
        logprobs = piece.logprobs
        parts = [piece.text] if reader is None else reader.read(piece.text)
        for part in parts or ([""] if logprobs else []):  # where the reader holds the text back
            yield self._add(row, part, logprobs)
            logprobs = []

    def _ended(self, row: int) -> Iterator[Event]:
        served = self._rows[row]
        choice = self._choices[row]
        if served.outcome == "error":
            raise internal_error()
        if served.outcome == "grammar":
            assert served.request.constraint is not None
            param = served.request.constraint.param
            why = "the grammar takes more than 50 ms and 3 ms for each token; make it simpler"
            raise ApiError(400, f"{param}: {why}", param, TOO_SLOW)
        if served.outcome == "cancelled":  # while its client still reads
            raise shutting_down()
        if choice.reader is not None:
            for part in choice.reader.read(None, cut_off=served.outcome != "stop"):
                yield self._add(row, part, [])
        choice.finish_reason = "length"
        if served.outcome == "stop":
            choice.finish_reason = "tool_calls" if choice.calls else "stop"
        delta = {"delta": self._annotations(row)} if self._is_chat else {"text": ""}
        yield self._chunk(row, delta, None)

    def _add(self, row: int, part: AnswerPart, logprobs: list[TokenLogprob]) -> Event:
        """Adds a part to its choice; returns its event."""
        choice = self._choices[row]
        if not self._is_chat:
            delta: Event = {"text": part}
        elif isinstance(part, dict):
            delta = {"delta": {"tool_calls": [{"index": len(choice.calls), **part}]}}
        else:
            field = "reasoning_content" if isinstance(part, Reasoning) else "content"
            delta = {"delta": {field: part}}
        offset = len(choice.text) if logprobs else 0
        chunk = self._chunk(row, delta, self._listed(logprobs, offset))
        choice.parts.append(part)
        choice.logprobs += logprobs
        return chunk

    def _chunk(self, row: int, delta: Event, logprobs: Event | None) -> Event:
        return self._described([self._choice(row, delta, logprobs)], ".chunk")

    def _choice(self, row: int, content: Event, logprobs: Event | None) -> Event:
        finish_reason = self._choices[row].finish_reason
        return {**content, "index": row, "logprobs": logprobs, "finish_reason": finish_reason}

    def _described(self, choices: list[Event], suffix: str = "") -> Event:
        kind = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        return {**self._about, "object": kind, "choices": choices}

    def _annotations(self, row: int) -> Event:
        """The parts of a text, by characters, that sources or the prompt have; none with calls."""
        names = self._source_names
        if names is None:
            return {}
        choice = self._choices[row]
        ends = self._rows[row].ends
        found: list[Event] = []
        for span in self._rows[row].stats.copied if choice.reader is None else ():
            begin = ends[span.start]
            if begin in ends[: span.start]:  # the first tokens complete another character
                begin = min((end for end in ends if end > begin), default=begin)
            end = min(ends[span.end], len(choice.text))
            if begin < end:  # not after a stop string
                place: Event = {"source": names.get(span.source, span.source)}
                place |= {"document": span.document, "offset": span.offset}
                place |= {"start_index": begin, "end_index": end}
                found.append({"type": "copied_span", "copied_span": place})
        return {"annotations": found}

    def _message(self, row: int, choice: RowAnswer) -> Event:
        if not self._is_chat:
            return {"text": choice.text}
        message: Event = {"role": "assistant", "content": choice.text, "refusal": None}
        message |= self._annotations(row)
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": choice.calls}
        if reasoning := "".join(part for part in choice.parts if isinstance(part, Reasoning)):
            message["reasoning_content"] = reasoning
        return {"message": message}

    def _listed(self, logprobs: Sequence[TokenLogprob], offset: int) -> Event | None:
        """Log probabilities; for a completion also the places of its tokens in the text."""
        if not self._logprobs:
            return None
        if self._is_chat:
            return {"content": logprobs, "refusal": None}
        listed: Event = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in logprobs:
            listed["tokens"].append(token["token"])
            listed["token_logprobs"].append(token["logprob"])
            top = {other["token"]: other["logprob"] for other in token["top_logprobs"]}
            listed["top_logprobs"].append(top)
            listed["text_offset"].append(offset)
            offset += len(token["token"])
        return listed

    def _figures(self) -> Event:
        """The usage and, for a single row, draft statistics in vLLM's form."""
        rows = self._rows
        prompt = sum(row.prompt_tokens for row in rows[:: self._rows_a_prompt])  # each counts once
        completion = sum(row.tokens for row in rows)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "completion_tokens_details": {
                name: sum(getattr(row, name) for row in rows)
                for name in ("accepted_prediction_tokens", "rejected_prediction_tokens")
            },
        }
        if len(rows) > 1:
            return {"usage": usage}
        stats = rows[0].stats
        longer = stats.accepted_lengths[1:]
        drafting = {
            "mean_acceptance_length": 1 + stats.accepted / max(stats.drafts, 1),
            "draft_acceptance_rate": stats.accepted / max(stats.drafted, 1),
            "acceptance_histogram": [stats.drafts - sum(longer), *longer],
            "num_spec_steps": stats.drafts,  # passes with drafts
            "num_accepted_draft_tokens": stats.accepted,
            "num_draft_tokens": stats.drafted,
            "num_spec_tokens": None,  # has no fixed bound
        }
        return {"usage": usage, "metrics": {"speculative_decoding": drafting}}

    def _put(self, row: int, piece: Piece | None) -> None:  # called in the engine's thread
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, (row, piece))
        except RuntimeError:  # the event loop is closed
            self._rows[row].cancel()


class EventStream(StreamingResponse):
    """An answer as server-sent events. Its end, even by an error, ends its rows."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(self._lines(), media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.cancel()

    async def _lines(self) -> AsyncIterator[str]:
        try:
            async for event in self._answer.events():
                yield f"data: {json.dumps(event)}\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(error.body)}\n\n"
            return
        yield "data: [DONE]\n\n"
