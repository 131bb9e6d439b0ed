"""Requests in OpenAI's form: their supported fields, and how they are read."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from ...store.folder_config import is_deeper
from .errors import ApiError, not_json

# Fields that change no answer.
_IGNORED = {"metadata", "moderation", "safety_identifier", "service_tier", "store", "user"}
_IGNORED |= {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
# Fields that would change the answer and are not supported, each with the values that, like null,
# ask for nothing. docs/tasks/serving.md has the same table.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(["audio", "verbosity", "web_search_options"], ()),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "suffix": ("",),
}

_MAX_ITEMS = 2048  # messages of a chat, and parts of a message
_MAX_ROWS = 128  # `n`
_MAX_TOOLS = 128
_MAX_BIASES = 1024
_MAX_SCHEMA = 65_536  # characters of a JSON schema
_MAX_SCHEMA_DEPTH = 64
# A mask takes up to the cube of the references to one definition: 20 ms for 64, a minute for 1,500.
_MAX_REFERENCES = 64
# Strings, brackets and commas of a body. Python builds and frees the objects that they describe
# without letting other threads run: 30 ms for this number, a second for 4 MB of brackets.
_MAX_JSON_PARTS = 1 << 18
# A quote that is never closed matches, too, so that no text is searched twice.
_JSON_PART = re.compile(r'"[^"]*"?|\[|\{|,')


def _checked_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuses a JSON schema that is too large, too deep, too ambiguous or not valid JSON."""
    if is_deeper(schema, _MAX_SCHEMA_DEPTH):
        raise ValueError(f"is nested more than {_MAX_SCHEMA_DEPTH} levels deep")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        raise ValueError("has a number that is not finite, or lone surrogates") from None
    if len(text) > _MAX_SCHEMA:
        raise ValueError(f"has more than {_MAX_SCHEMA:,} characters")
    if text.count('"$ref"') > _MAX_REFERENCES:
        raise ValueError(f"has more than {_MAX_REFERENCES} references")
    return schema


# JSON may hold lone surrogates and text may not; without any bound pydantic lets them pass.
Text: TypeAlias = Annotated[str, Field(min_length=0)]
StopString: TypeAlias = Annotated[str, Field(min_length=1)]
Stop: TypeAlias = StopString | Annotated[list[StopString], Field(max_length=4, fail_fast=True)]
Schema: TypeAlias = Annotated[dict[str, Any], AfterValidator(_checked_schema)]
FunctionName: TypeAlias = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(BaseModel):
    type: Literal["text"]
    text: Text


Content: TypeAlias = Text | Annotated[list[TextPart], Field(max_length=_MAX_ITEMS, fail_fast=True)]


def content_text(content: Content | None) -> str:
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


class FunctionCall(BaseModel):
    name: Text
    arguments: Text


class ToolCall(BaseModel):
    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """A message of a chat: text, the model's calls, or the result of a call."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[ToolCall], Field(max_length=_MAX_ITEMS, fail_fast=True)] | None = (
        None
    )
    tool_call_id: Text | None = None
    content: Content | None = Field(None, validate_default=True)
    audio: None = None
    function_call: None = None

    @field_validator("content")
    @classmethod
    def _only_calls_have_no_text(cls, content: Content | None, about: Any) -> Content | None:
        if content is None and about.data.get("tool_calls") is None:
            raise ValueError("Input should be a text, or a list of texts")
        return content


class PredictedContent(BaseModel):
    type: Literal["content"]
    content: Content


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class Function(BaseModel):
    """A function that a model may call; without `parameters` it takes none."""

    name: FunctionName
    description: Text | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: Function


class JsonSchema(BaseModel):
    name: Text = ""
    description: Text | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class TextRequest(BaseModel):
    """The fields that chats and completions share; null stands for a field that is left out."""

    model_config = ConfigDict(allow_inf_nan=False)

    model: Text | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 and -1 mean all tokens")
    min_p: float | None = Field(None, ge=0, le=1)
    # Bounded so that logits stay finite.
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: (
        dict[int, Annotated[float, Field(ge=-100, le=100)]] | None
    ) = Field(None, max_length=_MAX_BIASES)  # fmt: skip
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=_MAX_ROWS)
    logprobs: int | None = None  # each kind of request has its own
    stop: Stop | None = None
    prediction: PredictedContent | None = None
    reasoning_effort: Any = Field(None, description="is ignored; a header of the answer says so")

    @model_validator(mode="before")
    @classmethod
    def _only_supported(cls, data: dict[str, Any]) -> dict[str, Any]:
        for name, value in data.items():
            if name in cls.model_fields or name in _IGNORED:
                continue
            if name not in UNSUPPORTED:
                shown = ascii(name[:64])  # it may hold lone surrogates
                why = f"{shown} is not a field; leave it out"
                raise ApiError(400, why, shown[1:-1], "unknown_parameter")
            if value is not None and value not in UNSUPPORTED[name]:
                why = f"{name!r} is not supported with this value; leave it out"
                raise ApiError(400, why, name)
        return data


class ChatRequest(TextRequest):
    """The body of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=_MAX_ITEMS, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, max_length=_MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None  # or the one to call
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Schema | None = None


class CompletionRequest(TextRequest):
    """The body of `/v1/completions`; the prompt is one text, or its ids."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=1)]
        | Annotated[list[int], Field(fail_fast=True)]
    )
    logprobs: int | None = Field(None, ge=0, le=5)


RequestT = TypeVar("RequestT", bound=TextRequest)
BodyT = TypeVar("BodyT", bound=BaseModel)


def parsed(kind: type[BodyT], body: bytes) -> BodyT:
    """Reads a request from a body, or raises an `ApiError` that names the first mistake."""
    try:
        text = body.decode()
        bare = text.replace("\\\\", "").replace('\\"', "")  # no string holds a quote now
        parts = sum(1 for _ in islice(_JSON_PART.finditer(bare), _MAX_JSON_PARTS + 1))
        if parts > _MAX_JSON_PARTS:
            bound = f"{_MAX_JSON_PARTS:,} strings, brackets and commas"
            raise ApiError(413, f"the body has more than {bound}; shorten it")
        # No field takes more digits, and thousands would take long to convert.
        data = json.loads(text, parse_int=lambda digits: int(digits[:40]))
    except json.JSONDecodeError as error:
        raise not_json(f" ({error.msg.removesuffix(' at')}, character {error.pos})") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, or thousands of brackets
        raise not_json() from error
    if not isinstance(data, dict):
        raise not_json()
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _first_of(error) from error


def _first_of(error: ValidationError) -> ApiError:
    """The first error, without the value, which may not be printable."""
    errors: list[Any] = error.errors(include_url=False, include_input=False)
    # A field of several types has an error for each; the error of the right type says more.
    of_field = [mistake for mistake in errors if mistake["loc"][:1] == errors[0]["loc"][:1]]
    fitting = (mistake for mistake in of_field if not mistake["type"].endswith("_type"))
    first = next(fitting, errors[0])
    # Fields and indices: other parts name one of several types.
    place = ".".join(
        str(part)
        for part in first["loc"]
        if isinstance(part, int) or (part.isidentifier() and part != "str")
    )
    why = first["msg"].removeprefix("Value error, ")  # of our own validators
    if first["type"] == "model_type":
        why = "Input should be an object"
    return ApiError(400, f"{place}: {why}", place)
