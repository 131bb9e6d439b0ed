"""Limits on connections whose clients keep the server waiting."""

from __future__ import annotations

import math
from collections.abc import Set
from operator import itemgetter
from time import monotonic
from typing import Any

_HEAD_SECONDS = 10  # in which a request's head must have come
_READING_SECONDS = 30  # in which a client must have read on
# Connections that may wait for their clients for longer than a second; a client that is about to
# send its request does so at once.
_MOST = 256


class ConnectionLimits:
    """Closes connections whose clients owe a request or do not read the answer: after some time,
    and, where there are too many of them, those that have done so for longest.

    Args:
        connections (set): uvicorn's.
    """

    def __init__(self, connections: Set[Any]) -> None:
        self._connections = connections
        self._since: dict[tuple[Any, Any], float] = {}  # by connection and its latest request

    def enforce(self) -> None:
        """Is to be called several times a second."""
        now = monotonic()
        keys = [(each, each.cycle) for each in self._connections if _patience(each)]
        self._since = {key: self._since.get(key, now) for key in keys}
        newest_first = sorted(self._since.items(), key=itemgetter(1), reverse=True)
        for place, ((connection, _), since) in enumerate(newest_first):
            if now - since > (_patience(connection) if place < _MOST else 1):
                connection.transport.abort()


def _patience(connection: Any) -> float:
    """For how many seconds a connection may stay as it is; 0 if its client owes nothing."""
    cycle = connection.cycle
    if cycle is None or cycle.response_complete:
        return _HEAD_SECONDS
    if connection.flow.write_paused:
        return _READING_SECONDS
    return math.inf if cycle.more_body else 0  # how long a body may take: `BodyLimit`
