"""A request's way through the engine, and its answer, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .answers import Answer, Event
from .engine import Engine
from .errors import ApiError, grammar_too_slow, internal_error, shutting_down
from .generation import Piece
from .served_model import Prepared


class Stream:
    """Submits a request to the engine, and has its answer written in the event loop, piece by
    piece."""

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
        parts = self._readers[row].feed(piece.text)
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
        events = [
            event for part in self._readers[row].end() for event in self.answer.add(row, part, [])
        ]
        return [*events, *self.answer.end(row, generation)]

    def _put(self, row: int, piece: Piece | None) -> None:  # called in the engine's thread
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, (row, piece))
        except RuntimeError:  # the event loop is closed
            self._generations[row].cancelled = True


async def unless_left(http: Request, response: Coroutine[Any, Any, Response]) -> Response:
    """Awaits a response, whose work is cancelled when the client leaves."""
    work = asyncio.create_task(response)

    async def client_leaves() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.create_task(client_leaves())
    try:
        await asyncio.wait([work, leaving], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        return Response(status_code=499)  # nobody reads it
    finally:
        leaving.cancel()
        work.cancel()


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
            yield _line(event)
    except ApiError as error:
        yield _line(error.body)
        return
    yield "data: [DONE]\n\n"


def _line(event: Event) -> str:
    return f"data: {json.dumps(event)}\n\n"
