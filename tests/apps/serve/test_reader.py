"""Requests are read one after another, and not too many wait for it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hf_refspec.apps.serve import parsing
from hf_refspec.apps.serve.errors import ApiError
from hf_refspec.apps.serve.parsing import Reader


def test_when_too_many_wait_to_be_read_the_next_is_refused(monkeypatch):
    monkeypatch.setattr(parsing, "_MOST_UNREAD", 2)
    may_end = threading.Event()

    def wait(body: bytes) -> bytes:
        assert may_end.wait(60)
        return body

    async def ask() -> None:
        own = Reader()
        tasks = [asyncio.create_task(own.read(wait, body)) for body in (b"a", b"b")]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="2 requests wait") as refusal:
            await own.read(wait, b"c")
        assert refusal.value.status_code == 429
        may_end.set()
        assert await asyncio.gather(*tasks) == [b"a", b"b"]
        assert await own.read(bytes.upper, b"d") == b"D"

    asyncio.run(ask())
