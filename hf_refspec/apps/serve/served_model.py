"""Checks a request against the model, and prepares it for generation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from transformers import BatchEncoding, PretrainedConfig, PreTrainedTokenizerBase

from ...text_config import context_length, text_config
from ..shared.prompts import check_chat_template
from .errors import ApiError
from .generation import GenerationRequest
from .protocol import AnyRequest, ChatRequest, CompletionRequest, text_of
from .token_bound import TokenBound

# Logits divided by less are no longer finite; the most probable token is chosen instead.
_LEAST_TEMPERATURE = 1e-5
_ROLES = {"developer": "system"}  # OpenAI's newer name, which templates do not know
_NOUNS = {"messages": "this chat", "prompt": "this prompt", "prediction": "the prediction"}


@dataclass(frozen=True)
class ServedModel:
    """Prepares requests for the model that clients call `name`. `max_new_tokens` limits an answer,
    and is the limit of a request that names none."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    config: PretrainedConfig
    max_new_tokens: int

    def chat(self, request: ChatRequest) -> GenerationRequest:
        """Prepares a chat, or raises an `ApiError`."""
        self.check_name(request.model)
        messages = [
            {"role": _ROLES.get(each.role, each.role), "content": text_of(each.content)}
            for each in request.messages
        ]
        try:
            check_chat_template(self.tokenizer, self.name, "use /v1/completions")
            text = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from error
        except TemplateError as error:
            why = " ".join(str(error).split())
            message = f"the model's chat template does not take these messages: {why}"
            raise ApiError(400, message, "messages") from error
        ids = self._ids(text, "messages", add_special_tokens=False)
        return self._request(request, ids, request.max_completion_tokens or request.max_tokens)

    def completion(self, request: CompletionRequest) -> GenerationRequest:
        """Prepares a completion, or raises an `ApiError`."""
        self.check_name(request.model)
        match request.prompt:
            case [str(text)] | str(text):
                ids = self._ids(text, "prompt", add_special_tokens=True)
            case ids:
                self._check_length(len(ids), "prompt")
                last = text_config(self.config).vocab_size - 1
                if not all(0 <= id <= last for id in ids):
                    raise ApiError(400, f"the prompt's ids must be from 0 to {last}", "prompt")
        if not ids:
            raise ApiError(400, "the prompt is empty; the model needs at least one token", "prompt")
        return self._request(request, ids, request.max_tokens)

    def check_name(self, name: str | None) -> None:
        """Refuses the name of another model; a request need not name one."""
        if name not in (None, self.name):
            message = f"there is no such model here; this server has {self.name}"
            raise ApiError(404, message, "model", "model_not_found")

    @cached_property
    def _bound(self) -> TokenBound:
        return TokenBound(self.tokenizer)

    def _ids(self, text: str, param: str, add_special_tokens: bool) -> list[int]:
        """Tokenises a text, unless it is certainly too long."""
        self._check_length(self._bound.of(text), param, "tokens or more")
        encoded = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        ids: list[int] = encoded["input_ids"]
        self._check_length(len(ids), param)
        return ids

    def _check_length(self, length: int, param: str, unit: str = "tokens") -> None:
        longest = context_length(self.config)
        if longest is not None and length >= longest:
            holds = f"the model's context holds {longest:,} with the answer"
            message = f"{_NOUNS[param]} has {length:,} {unit}, and {holds}; shorten it"
            raise ApiError(400, message, param, "context_length_exceeded")

    def _request(
        self, request: AnyRequest, ids: list[int], max_tokens: int | None
    ) -> GenerationRequest:
        fitting = min(max_tokens or self.max_new_tokens, self.max_new_tokens)
        if (longest := context_length(self.config)) is not None:
            fitting = min(fitting, longest - len(ids))
        stop = request.stop or []
        text = text_of(request.prediction.content) if request.prediction else ""
        predicted = self._ids(text, "prediction", add_special_tokens=False) if text else []
        input_ids = torch.tensor([ids], dtype=torch.int64)
        return GenerationRequest(
            BatchEncoding({"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}),
            {"max_new_tokens": fitting, **_sampling(request)},
            request.seed,
            [stop] if isinstance(stop, str) else stop,
            np.array(predicted) if predicted else None,
        )


def _sampling(request: AnyRequest) -> dict[str, Any]:
    """The sampling options for `generate`; none if the request leaves them to the model."""
    asked = {"temperature": request.temperature, "top_p": request.top_p}
    given = {name: value for name, value in asked.items() if value is not None}
    if given.get("temperature", 1) < _LEAST_TEMPERATURE:
        return {"do_sample": False}
    return {"do_sample": True, **given} if given else {}
