"""The answers, as OpenAI documents them."""

from __future__ import annotations

import time
import uuid
from typing import Any

from .generation import Generation


class CompletionAnswer:
    """The answer to `/v1/completions`, whole or in chunks."""

    kind = chunk_kind = "text_completion"

    def __init__(self, model: str) -> None:
        self._about = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": model}

    def whole(self, text: str, generation: Generation) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        choice = _choice(self._text(text), generation.finish_reason)
        return {**self._about, "object": self.kind, "choices": [choice], "usage": usage(generation)}

    def first_chunk(self) -> dict[str, Any] | None:
        """What a stream begins with, if anything."""
        return None

    def chunk(self, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        """A part of the text, or, where it has ended, the reason."""
        return self._chunk([_choice(self._delta(text), finish_reason)])

    def usage_chunk(self, generation: Generation) -> dict[str, Any]:
        """What a stream ends with if the usage was asked for."""
        return {**self._chunk([]), "usage": usage(generation)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._about, "object": self.chunk_kind, "choices": choices}

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _delta = _text


class ChatAnswer(CompletionAnswer):
    """The answer to `/v1/chat/completions`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def first_chunk(self) -> dict[str, Any]:
        return self._chunk([_choice({"delta": {"role": "assistant", "content": ""}}, None)])

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


def _choice(content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {**content, "index": 0, "logprobs": None, "finish_reason": finish_reason}


def usage(generation: Generation) -> dict[str, Any]:
    """The tokens of a request. Tokens of a prediction are accepted if they were drafted and the
    model chose them, and rejected otherwise; `completion_tokens` counts the answer alone."""
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
