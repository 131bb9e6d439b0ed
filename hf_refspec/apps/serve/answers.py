"""The answers, as OpenAI documents them."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .generation import Generation


@dataclass
class Answer:
    """An answer to one request, whole or in chunks.

    Args:
        model (`str`): The model's name.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, generation: Generation) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        choice = {**self._text(text), **self._end(generation.finish_reason)}
        return {**self._about(self.kind), "choices": [choice], "usage": usage(generation)}

    def first_chunk(self) -> dict[str, Any] | None:
        """What a stream begins with, if anything."""
        return None

    def chunk(self, text: str) -> dict[str, Any]:
        """A part of the text."""
        return self._chunk({**self._delta(text), **self._end(None)})

    def last_chunk(self, generation: Generation) -> dict[str, Any]:
        """Why the text has ended."""
        return self._chunk({**self._delta(""), **self._end(generation.finish_reason)})

    def usage_chunk(self, generation: Generation) -> dict[str, Any]:
        """What a stream ends with where the usage was asked for."""
        return {**self._about(self.chunk_kind), "choices": [], "usage": usage(generation)}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._about(self.chunk_kind), "choices": [choice]}

    def _about(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _end(self, finish_reason: str | None) -> dict[str, Any]:
        return {"index": 0, "logprobs": None, "finish_reason": finish_reason}

    def _text(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str) -> dict[str, Any]:
        raise NotImplementedError


class ChatAnswer(Answer):
    """To `/v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def first_chunk(self) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"delta": delta, **self._end(None)})

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


class CompletionAnswer(Answer):
    """To `/v1/completions`."""

    kind = chunk_kind = "text_completion"

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _delta = _text


def usage(generation: Generation) -> dict[str, Any]:
    """The tokens of a request. A prediction's tokens are accepted where they were drafted and the
    model chose them, and rejected where not; `completion_tokens` are those of the answer alone."""
    prompt, completion = generation.prompt_tokens, generation.tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": {
            "accepted_prediction_tokens": generation.accepted_prediction_tokens,
            "rejected_prediction_tokens": generation.rejected_prediction_tokens,
        },
    }
