"""What a request asks of the model that is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from transformers import BatchEncoding, PretrainedConfig, PreTrainedTokenizerBase

from ..demo.prompts import (
    chat_inputs,
    check_chat_template,
    context_length,
    text_inputs,
    tokens_left,
)
from .errors import ApiError
from .generation import GenerationRequest
from .protocol import AnyRequest, ChatRequest, CompletionRequest, text_of

# Below it, logits divided by it are no numbers any more, and the most probable token is chosen.
_LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class ServedModel:
    """The name of a model, and all that is needed to make requests of prompts.

    Attributes:
        name (`str`): What clients call it.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        config (`PretrainedConfig`): Its configuration.
        max_new_tokens (`int`): The most new tokens of an answer, and as many where a request does
            not say it.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    config: PretrainedConfig
    max_new_tokens: int

    def chat(self, request: ChatRequest) -> GenerationRequest:
        """What a chat asks for.

        Raises:
            ApiError: If it cannot be answered.
        """
        self.check_name(request.model)
        # OpenAI's newer name of the system's messages, which templates do not know.
        roles = {"developer": "system"}
        messages = [
            {"role": roles.get(message.role, message.role), "content": text_of(message.content)}
            for message in request.messages
        ]
        try:
            check_chat_template(self.tokenizer, self.name, "use /v1/completions")
            inputs = chat_inputs(self.tokenizer, messages)
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from error
        except TemplateError as error:
            why = " ".join(str(error).split())
            message = f"the model's chat template does not take these messages: {why}"
            raise ApiError(400, message, "messages") from error
        return self._request(request, inputs, "messages", "this chat")

    def completion(self, request: CompletionRequest) -> GenerationRequest:
        """What a prompt asks for.

        Raises:
            ApiError: If it cannot be answered.
        """
        self.check_name(request.model)
        match request.prompt:
            case [str(text)] | str(text):
                inputs = text_inputs(self.tokenizer, text)
            case ids:
                inputs = self._of_ids(ids)
        if inputs["input_ids"].shape[1] == 0:
            raise ApiError(
                400, "the prompt is empty; the model needs a token to go on from", "prompt"
            )
        return self._request(request, inputs, "prompt", "this prompt")

    def check_name(self, name: str | None) -> None:
        """Refuses the name of another model; none is this one.

        Raises:
            ApiError: If it is another.
        """
        if name not in (None, self.name):
            message = f"there is no such model here; this server has {self.name}"
            raise ApiError(404, message, "model", "model_not_found")

    def _of_ids(self, ids: list[Any]) -> BatchEncoding:
        vocab_size = self.config.get_text_config(decoder=True).vocab_size
        if not all(0 <= id < vocab_size for id in ids):
            raise ApiError(
                400, f"the ids of the prompt must be from 0 to {vocab_size - 1}", "prompt"
            )
        input_ids = torch.tensor([ids], dtype=torch.int64)
        return BatchEncoding({"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)})

    def _request(
        self, request: AnyRequest, inputs: BatchEncoding, param: str, noun: str
    ) -> GenerationRequest:
        wanted = min(request.most_tokens or self.max_new_tokens, self.max_new_tokens)
        try:
            fitting = tokens_left(inputs, self.config, noun, "shorten it", wanted)
        except ValueError as error:
            raise ApiError(400, str(error), param, "context_length_exceeded") from error
        return GenerationRequest(
            inputs,
            {"max_new_tokens": fitting, **_sampling(request)},
            request.seed,
            request.stop_strings,
            self._prediction(request),
        )

    def _prediction(self, request: AnyRequest) -> np.ndarray | None:
        text = text_of(request.prediction.content) if request.prediction else ""
        if not text:
            return None
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        longest = context_length(self.config)
        if longest is not None and len(ids) > longest:
            raise ApiError(
                400,
                f"the prediction has {len(ids):,} tokens, and the model's context holds "
                f"{longest:,}; shorten it",
                "prediction",
                "context_length_exceeded",
            )
        return np.array(ids) if ids else None


def _sampling(request: AnyRequest) -> dict[str, Any]:
    """The sampling options for `generate`; none where the request leaves it to the model."""
    if request.temperature is None and request.top_p is None:
        return {}
    if request.temperature is not None and request.temperature < _LEAST_TEMPERATURE:
        return {"do_sample": False}
    given = {"temperature": request.temperature, "top_p": request.top_p}
    return {"do_sample": True, **{name: x for name, x in given.items() if x is not None}}
