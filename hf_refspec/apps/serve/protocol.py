"""The requests, as OpenAI documents them, and what of them is supported."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from .errors import ApiError

# Fields that change no answer.
_IGNORED = {"metadata", "moderation", "parallel_tool_calls", "safety_identifier", "service_tier"}
_IGNORED |= {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "store", "user"}
# Fields that would change the answer and are not supported, each with the values beside null that
# ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(["audio", "reasoning_effort", "verbosity", "web_search_options"], ()),
    **dict.fromkeys(["best_of", "n"], (1,)),
    **dict.fromkeys(["echo", "logprobs"], (False,)),
    **dict.fromkeys(["frequency_penalty", "presence_penalty", "top_logprobs"], (0,)),
    **dict.fromkeys(["functions", "tools"], ([],)),
    "function_call": ("none",),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
}


def _in_utf8(text: str) -> str:
    """Refuses lone surrogates, which JSON may hold and text may not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("surrogates", "is no text: it has lone surrogates") from None
    return text


_MOST = 2048  # messages of a chat, and parts of a message

Text: TypeAlias = Annotated[str, AfterValidator(_in_utf8)]
StopString: TypeAlias = Annotated[Text, Field(min_length=1)]
StopStrings: TypeAlias = Annotated[list[StopString], Field(max_length=4, fail_fast=True)]


class TextPart(BaseModel):
    type: Literal["text"]
    text: Text


Content: TypeAlias = Text | Annotated[list[TextPart], Field(max_length=_MOST, fail_fast=True)]


def text_of(content: Content) -> str:
    """A message's text, or a prediction's."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ChatMessage(BaseModel):
    """A message of a chat, which may hold text alone. A `name` is ignored: no template uses it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    audio: None = None
    function_call: None = None
    tool_calls: None = None


class PredictedContent(BaseModel):
    """What the client expects the answer to be."""

    type: Literal["content"]
    content: Content


class StreamOptions(BaseModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class AnyRequest(BaseModel):
    """What both kinds of requests have in common; null means that a field is left out."""

    model_config = ConfigDict(allow_inf_nan=False)

    model: Text | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopString | StopStrings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prediction: PredictedContent | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_supported(cls, data: dict[str, Any]) -> dict[str, Any]:
        for name, value in data.items():
            if name in _UNSUPPORTED:
                if value is not None and not any(value == each for each in _UNSUPPORTED[name]):
                    why = f"{name} is not supported with this value; leave it out"
                    raise ApiError(400, why, name)
            elif name not in cls.model_fields and name not in _IGNORED:
                shown = ascii(name[:64])  # it may be no text
                raise ApiError(400, f"there is no field {shown}; leave it out", shown[1:-1])
        return data


class ChatRequest(AnyRequest):
    """The body of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=_MOST, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1)


class CompletionRequest(AnyRequest):
    """The body of `/v1/completions`; the prompt is one text, or its ids."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=1)]
        | Annotated[list[int], Field(fail_fast=True)]
    )
