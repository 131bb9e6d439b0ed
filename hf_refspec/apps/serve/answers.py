"""Answers in OpenAI's form: whole, or streamed in chunks."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .engine import RequestEngine
from .protocol import (
    TOO_SLOW,
    ApiError,
    ChatRequest,
    TextRequest,
    internal_error,
    shutting_down,
)
from .served_row import Piece, PreparedRequest, ServedRow, TokenLogprob
from .tool_calls import AnswerPart, Reasoning

Event: TypeAlias = dict[str, Any]


class Choice:
    """The answer of a row so far, in OpenAI's form: whole, or what a stream adds to it.

    An answer of a chat has annotations if there are `source_names`."""

    def __init__(
        self, index: int, row: ServedRow, is_chat: bool, source_names: Mapping[str, str] | None
    ) -> None:
        self.row = row
        self._index = index
        self._is_chat = is_chat
        self._source_names = source_names
        self._reader = row.reader
        self._parts: list[AnswerPart] = []
        self._logprobs: list[TokenLogprob] = []
        self._finish_reason: str | None = None

    @property
    def _text(self) -> str:
        return "".join(part for part in self._parts if not isinstance(part, Reasoning | dict))

    @property
    def _calls(self) -> list[Event]:
        return [part for part in self._parts if isinstance(part, dict)]

    def begin(self) -> Event:
        """What the stream of a chat begins with."""
        return self._with({"delta": {"role": "assistant", "content": ""}})

    def read(self, piece: Piece) -> Iterator[Event]:
        """What a piece of the text adds to a stream."""
        logprobs = piece.logprobs
        parts = [piece.text] if self._reader is None else self._reader.read(piece.text)
        for part in parts or ([""] if logprobs else []):  # where the reader holds the text back
            yield self._add(part, logprobs)
            logprobs = []

    def end(self) -> Iterator[Event]:
        """What the end adds to a stream; raises an `ApiError` if the row has failed."""
        outcome = self.row.outcome
        if outcome == "error":
            raise internal_error()
        if outcome == "grammar":
            assert self.row.request.constraint is not None
            param = self.row.request.constraint.param
            why = "the grammar takes more than 50 ms and 3 ms for each token; make it simpler"
            raise ApiError(400, f"{param}: {why}", param, TOO_SLOW)
        if outcome == "cancelled":  # while its client still reads
            raise shutting_down()
        if self._reader is not None:
            for part in self._reader.read(None, cut_off=outcome != "stop"):
                yield self._add(part, [])
        self._finish_reason = "length"
        if outcome == "stop":
            self._finish_reason = "tool_calls" if self._calls else "stop"
        yield self._with({"delta": self._annotations()} if self._is_chat else {"text": ""})

    def whole(self) -> Event:
        """The complete choice."""
        logprobs = self._listed(self._logprobs, 0)
        if not self._is_chat:
            return self._with({"text": self._text}, logprobs)
        message: Event = {"role": "assistant", "content": self._text, "refusal": None}
        message |= self._annotations()
        if self._calls:
            message |= {"content": self._text or None, "tool_calls": self._calls}
        if reasoning := "".join(part for part in self._parts if isinstance(part, Reasoning)):
            message["reasoning_content"] = reasoning
        return self._with({"message": message}, logprobs)

    def _add(self, part: AnswerPart, logprobs: list[TokenLogprob]) -> Event:
        """Adds a part of the answer; returns what it adds to a stream."""
        if not self._is_chat:
            added: Event = {"text": part}
        elif isinstance(part, dict):
            added = {"delta": {"tool_calls": [{"index": len(self._calls), **part}]}}
        else:
            field = "reasoning_content" if isinstance(part, Reasoning) else "content"
            added = {"delta": {field: part}}
        offset = len(self._text) if logprobs else 0
        self._parts.append(part)
        self._logprobs += logprobs
        return self._with(added, self._listed(logprobs, offset))

    def _with(self, content: Event, logprobs: Event | None = None) -> Event:
        about = {"index": self._index, "logprobs": logprobs, "finish_reason": self._finish_reason}
        return {**content, **about}

    def _annotations(self) -> Event:
        """The parts of a text, by characters, that sources or the prompt have; none with calls."""
        if self._source_names is None:
            return {}
        ends = self.row.ends
        found: list[Event] = []
        for span in self.row.stats.copied if self._reader is None else ():
            begin = ends[span.start]
            if begin in ends[: span.start]:  # the first tokens complete another character
                begin = min((end for end in ends if end > begin), default=begin)
            end = min(ends[span.end], len(self._text))
            if begin < end:  # not after a stop string
                source = self._source_names.get(span.source, span.source)
                place = {"source": source, "document": span.document, "offset": span.offset}
                place |= {"start_index": begin, "end_index": end}
                found.append({"type": "copied_span", "copied_span": place})
        return {"annotations": found}

    def _listed(self, logprobs: Sequence[TokenLogprob], offset: int) -> Event | None:
        """Log probabilities; for a completion also the places of its tokens in the text."""
        if self.row.request.top_logprobs is None:
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
        names = engine.source_names if self._is_chat else None
        self._annotates = names is not None
        self._about = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": model}
        options = request.stream_options
        self._includes_usage = bool(options and options.include_usage)
        self._pieces: asyncio.Queue[tuple[int, Piece | None]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._rows = engine.submit(prompts, self._put)
        rows = enumerate(self._rows)
        self._choices = [Choice(index, row, self._is_chat, names) for index, row in rows]

    async def events(self) -> AsyncIterator[Event]:
        """The events of a stream; raises an `ApiError` if a row could not be generated."""
        for choice in self._choices if self._is_chat else ():
            yield self._described([choice.begin()], ".chunk")
        left = len(self._choices)
        while left:
            index, piece = await self._pieces.get()
            choice = self._choices[index]
            left -= piece is None
            if piece is None and self._annotates:
                await asyncio.to_thread(getattr, choice.row.stats, "copied")
            for added in choice.end() if piece is None else choice.read(piece):
                yield self._described([added], ".chunk")
        if self._includes_usage:
            yield {**self._described([], ".chunk"), **self._figures()}

    async def whole(self) -> Event:
        """The complete answer. Its end, even by an error, ends its rows."""
        try:
            async for _ in self.events():
                pass
        finally:
            self.cancel()
        choices = [choice.whole() for choice in self._choices]
        return {**self._described(choices), **self._figures()}

    def cancel(self) -> None:
        for row in self._rows:
            self._engine.cancel(row)

    def _described(self, choices: list[Event], suffix: str = "") -> Event:
        kind = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        return {**self._about, "object": kind, "choices": choices}

    def _figures(self) -> Event:
        """The usage and, for a single row, draft statistics in vLLM's form."""
        rows = self._rows
        prompt = sum(row.prompt_tokens for row in rows[:: rows[0].request.rows])  # each counts once
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
