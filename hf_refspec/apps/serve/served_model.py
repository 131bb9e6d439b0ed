"""Checks a request against the model, and prepares it for generation."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import signature
from time import thread_time
from typing import Any

import numpy as np
import torch
from transformers import (
    BatchEncoding,
    LogitsProcessor,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from ...corpus.rows import REFUSALS
from ...text_config import context_length, text_config
from ..shared.prompts import check_chat_template
from .grammars import GrammarBudget, GrammarCompiler, constraint
from .protocol import (
    MAX_ROWS,
    ApiError,
    ChatRequest,
    CompletionRequest,
    TextRequest,
    Tool,
    content_text,
)
from .served_row import PreparedRequest
from .tool_calls import CallReader, template_messages

# Logits divided by less are no longer finite; the most probable token is chosen instead.
_LEAST_TEMPERATURE = 1e-5
# Texts with more characters than this for each token of the context are refused unread.
_CHARACTERS_A_TOKEN = 16
_NOUNS = {"messages": "this chat", "prompt": "this prompt", "prediction": "the prediction"}


@dataclass(frozen=True)
class ServedModel:
    """Prepares requests for a model, or raises an `ApiError`."""

    names: Sequence[str]  # by which clients call it
    tokenizer: PreTrainedTokenizerBase
    config: PretrainedConfig
    max_new_tokens: int  # of an answer
    clock: Callable[[], float] = thread_time  # measures grammars

    def chat(self, request: ChatRequest) -> list[PreparedRequest]:
        self.check_name(request.model)
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, "top_logprobs: set logprobs to true as well", "top_logprobs")
        tools = [] if request.tool_choice == "none" else request.tools or []
        constrained = constraint(request)
        text = self._prompt(request, tools)
        options: dict[str, Any] = {"constraint": constrained}
        if request.logprobs:
            options["top_logprobs"] = request.top_logprobs or 0
        if tools:
            template = getattr(self.tokenizer, "response_template", None)
            common = constrained is not None or template is None
            options["reader"] = partial(CallReader, self.tokenizer, text, tools, common)
            options["keeps_special_tokens"] = not common
        ids = self._ids(text, "messages", add_special_tokens=False)
        most = request.max_completion_tokens or request.max_tokens
        return [self._prepared(request, ids, most, **options)]

    async def constrained(self, request: PreparedRequest) -> PreparedRequest:
        """Compiles the grammar that constrains a request, if there is one."""
        if request.constraint is None:
            return request
        grammar = await self._grammars.compiled(request.constraint)
        return replace(request, grammar=grammar, grammar_budget=GrammarBudget(self.clock))

    def _prompt(self, request: ChatRequest, tools: list[Tool]) -> str:
        field = "chat_template_kwargs"
        of_client = request.chat_template_kwargs or {}
        # Arguments of the method; among them are other templates.
        refused = [*of_client.keys() & signature(self.tokenizer.apply_chat_template).parameters]
        if not isinstance(of_client.get("enable_thinking", True), bool):
            refused.append("enable_thinking")
        if refused:
            message = f"{field}: {refused[0]} cannot have this value; leave it out"
            raise ApiError(400, message, field)
        try:
            check_chat_template(self.tokenizer, self.names[0], "use /v1/completions")
            messages, shown = template_messages(self.tokenizer, request.messages, tools)
            options = {"tools": shown, "add_generation_prompt": True, "tokenize": False}
            return str(self.tokenizer.apply_chat_template(messages, **options, **of_client))
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from error
        except REFUSALS as error:
            why = " ".join(str(error).split())
            noun = f"these messages{f' with these {field}' if of_client else ''}"
            message = f"the model's chat template does not take {noun}: {why}"
            raise ApiError(400, message, "messages") from error

    def completion(self, request: CompletionRequest) -> list[PreparedRequest]:
        self.check_name(request.model)
        prompts: Sequence[Any] = request.prompt
        if not prompts or isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        if len(prompts) > MAX_ROWS:
            raise ApiError(400, f"prompt: a request has at most {MAX_ROWS} prompts", "prompt")
        prepared = []
        for ids in prompts:
            if isinstance(ids, str):
                ids = self._ids(ids, "prompt", add_special_tokens=True)
            else:
                self._check_length(len(ids), "prompt")
                self._check_ids(ids, "prompt", "the prompt's ids")
            if not ids:
                why = "the prompt is empty; the model needs at least one token"
                raise ApiError(400, why, "prompt")
            options = {"top_logprobs": request.logprobs}
            prepared.append(self._prepared(request, ids, request.max_tokens, **options))
        return prepared

    def check_name(self, name: str | None) -> None:
        if name not in (None, *self.names):
            message = f"there is no such model here; this server has {' and '.join(self.names)}"
            raise ApiError(404, message, "model", "model_not_found")

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer)

    def _ids(self, text: str, param: str, add_special_tokens: bool) -> list[int]:
        self._check_length(len(text), param, "characters", _CHARACTERS_A_TOKEN)
        options = {"add_special_tokens": add_special_tokens, "verbose": False}
        ids: list[int] = self.tokenizer(text, **options)["input_ids"]
        self._check_length(len(ids), param)
        self._check_ids(ids, param, f"the ids of {_NOUNS[param]}")
        return ids

    def _check_length(
        self, length: int, param: str, unit: str = "tokens", units_a_token: int = 1
    ) -> None:
        longest = context_length(self.config)
        if longest is not None and length >= units_a_token * longest:
            holds = f"the model's context holds {longest:,} tokens with the answer"
            message = f"{_NOUNS[param]} has {length:,} {unit}, and {holds}; shorten it"
            raise ApiError(400, message, param, "context_length_exceeded")

    def _check_ids(self, ids: Iterable[int], param: str, noun: str) -> None:
        last = text_config(self.config).vocab_size - 1
        if not all(0 <= token <= last for token in ids):
            raise ApiError(400, f"{noun} must be from 0 to {last}", param)

    def _prepared(
        self, request: TextRequest, ids: list[int], max_tokens: int | None, **options: Any
    ) -> PreparedRequest:
        self._check_ids(request.logit_bias or (), "logit_bias", "logit_bias: the ids")
        fitting = min(max_tokens or self.max_new_tokens, self.max_new_tokens)
        if (longest := context_length(self.config)) is not None:
            fitting = min(fitting, longest - len(ids))
        stop = request.stop or []
        text = content_text(request.prediction.content) if request.prediction else ""
        predicted = self._ids(text, "prediction", add_special_tokens=False) if text else []
        input_ids = torch.tensor([ids], dtype=torch.int64)
        return PreparedRequest(
            BatchEncoding({"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}),
            {"max_new_tokens": fitting, **_sampling_options(request)},
            rows=request.n or 1,
            processors=_logits_processors(request, len(ids)),
            seed=request.seed,
            stop_strings=[stop] if isinstance(stop, str) else stop,
            prediction=np.array(predicted) if predicted else None,
            **options,
        )


def _sampling_options(request: TextRequest) -> dict[str, Any]:
    """The request's options for `generate`; the model's own apply to those that it leaves out."""
    options: dict[str, Any] = request.model_dump(
        include={"temperature", "top_p", "min_p"}, exclude_none=True
    )
    if request.top_k is not None:
        options["top_k"] = max(request.top_k, 0)
    if options.get("temperature", 1) < _LEAST_TEMPERATURE:
        options = {"do_sample": False}
    elif options:
        options["do_sample"] = True
    if request.repetition_penalty is not None:
        options["repetition_penalty"] = 1.0  # turns the model's off; the request's is a processor
    return options


def _logits_processors(request: TextRequest, prompt_length: int) -> list[LogitsProcessor]:
    """The request's processors. They depend on the ids alone, so that rows can share them."""
    processors: list[LogitsProcessor] = []
    if request.logit_bias:
        biases = [[[token], float(bias)] for token, bias in request.logit_bias.items()]
        processors.append(SequenceBiasLogitsProcessor(biases))
    if (penalty := request.repetition_penalty) not in (None, 1):
        processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    frequency = request.frequency_penalty or 0
    presence = request.presence_penalty or 0
    if frequency or presence:
        processors.append(OutputPenalties(frequency, presence, prompt_length))
    return processors


@dataclass(frozen=True)
class OutputPenalties(LogitsProcessor):
    """OpenAI's penalties, for which the prompt does not count.

    A token's logit falls by `frequency` for each occurrence in the answer so far, and by `presence`
    if there is one."""

    frequency: float
    presence: float
    prompt_length: int

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, ids in zip(scores, input_ids[:, self.prompt_length :], strict=True):
            tokens, counts = ids.unique(return_counts=True)
            row[tokens] -= self.frequency * counts + self.presence
        return scores
