"""Requests and errors in OpenAI's form, and how the supported fields are read."""

import json
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from typing_extensions import Self

from ...store.folder_config import is_deeper

_IGNORED = {"metadata", "moderation", "safety_identifier", "service_tier", "store", "user"}
_IGNORED |= {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
_IGNORED |= {"reasoning_effort"}
# docs/tasks/serving.md has the same table.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(["audio", "verbosity", "web_search_options"], ()),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "suffix": ("",),
}

UNKNOWN = "unknown_parameter"  # OpenAI's code
TOO_SLOW = "grammar_too_slow"
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}

_MAX_ITEMS = 2048  # messages of a chat, and parts of a message
MAX_ROWS = 128  # `n`, and the prompts of a completion
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


@dataclass(eq=False)
class ApiError(HTTPException):
    """Refuses a request; `param` is its field, `code` OpenAI's name of the error."""

    status_code: int
    detail: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status_code, "invalid_request_error")
        about = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": about}


def not_json(where: str = "") -> ApiError:
    return ApiError(400, f"the body is not JSON{where}; send an object as application/json")


def internal_error() -> ApiError:
    return ApiError(500, "the server failed on this request; its log says why")


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down")


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


class RequestObject(BaseModel):
    """An object of a request, which refuses fields that it does not have."""

    # Fields that change no answer.
    ignored: ClassVar[Set[str]] = frozenset()
    # Fields that would change the answer and are not supported, each with the values that, like
    # null, ask for nothing.
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="wrap")
    @classmethod
    def _only_supported(cls, data: Any, read: Callable[[Any], Self]) -> Self:
        found = read(data)  # a wrong `type` says more than the fields that belong to it
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in data.items() if isinstance(data, dict) else ():
            if name in known or name in cls.ignored:
                continue
            if name not in cls.unsupported:
                raise _refused("is not a field", name, UNKNOWN)
            if value is not None and value not in cls.unsupported[name]:
                raise _refused("is not supported with this value", name)
        return found


def _refused(why: str, field: str, code: str = "unsupported") -> PydanticCustomError:
    shown = ascii(field[:64])  # it may hold lone surrogates
    return PydanticCustomError(code, "{shown} " + why + "; leave it out", {"shown": shown})


class TextPart(RequestObject):
    type: Literal["text"]
    text: Text


Content: TypeAlias = Text | Annotated[list[TextPart], Field(max_length=_MAX_ITEMS, fail_fast=True)]


def content_text(content: Content | None) -> str:
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


class FunctionCall(RequestObject):
    ignored = {"parsed_arguments"}  # the arguments again, by OpenAI's client
    unsupported = {"description": ()}  # huggingface_hub sends null

    name: Text
    arguments: Text


class ToolCall(RequestObject):
    ignored = {"index"}  # of streamed calls

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(RequestObject):
    """A message of a chat: text, the model's calls, or the result of a call."""

    ignored = {"annotations", "parsed"}  # they describe the content of an answer
    unsupported = dict.fromkeys(["audio", "function_call", "reasoning", "refusal"], ())

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[ToolCall], Field(max_length=_MAX_ITEMS, fail_fast=True)] | None = (
        None
    )
    tool_call_id: Text | None = None
    content: Content | None = Field(None, validate_default=True)
    name: Text | None = None
    reasoning_content: Text | None = None

    @field_validator("content")
    @classmethod
    def _only_calls_have_no_text(cls, content: Content | None, about: Any) -> Content | None:
        if content is None and about.data.get("tool_calls", ()) is None:
            raise ValueError("Input should be a text, or a list of texts")
        return content


class PredictedContent(RequestObject):
    type: Literal["content"]
    content: Content


class StreamOptions(RequestObject):
    unsupported = {"include_obfuscation": (False,)}

    include_usage: bool | None = None


class Function(RequestObject):
    """A function that a model may call; without `parameters` it takes none."""

    name: FunctionName
    description: Text | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(RequestObject):
    type: Literal["function"]
    function: Function


class JsonSchema(RequestObject):
    name: Text = ""
    description: Text | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestObject):
    """OpenAI's form, llama.cpp's (`schema`), or TGI's and huggingface_hub's (`value`)."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Schema | None = Field(None, alias="schema")
    value: Schema | None = None

    @model_validator(mode="after")
    def _one_schema(self) -> Self:
        forms = {"json_schema": self.json_schema, "schema": self.schema_, "value": self.value}
        given = [name for name, form in forms.items() if form is not None]
        most = int(self.type != "text")
        if len(given) > most:
            raise _refused(f"is one schema too many for the type {self.type}", given[most])
        if self.type == "json_schema" and not given:
            raise ValueError("the type json_schema needs the field json_schema")
        return self

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; `None` for a text."""
        if self.type == "text":
            return None
        of_openai = self.json_schema.schema_ if self.json_schema else None
        given = (form for form in (of_openai, self.schema_, self.value) if form is not None)
        return next(given, {"type": "object"})


class TextRequest(RequestObject):
    """The fields that chats and completions share; null means a field that is left out."""

    ignored = _IGNORED
    unsupported = UNSUPPORTED
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
    n: int | None = Field(None, ge=1, le=MAX_ROWS)
    logprobs: int | None = None  # each kind of request has its own
    stop: Stop | None = None
    prediction: PredictedContent | None = None


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
    """The body of `/v1/completions`; a prompt is a text, or its ids."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[list[int]], Field(min_length=1, fail_fast=True)]
    )
    logprobs: int | None = Field(None, ge=0, le=5)

    @field_validator("logprobs", mode="before")
    @classmethod
    def _false_is_none(cls, logprobs: Any) -> Any:
        return None if logprobs is False else logprobs


RequestT = TypeVar("RequestT", bound=TextRequest)


def parsed(kind: type[RequestT], body: bytes) -> RequestT:
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
    # A field of several types has an error for each; the error inside of the right type says more.
    of_field = [mistake for mistake in errors if mistake["loc"][:1] == errors[0]["loc"][:1]]
    first = max(of_field, key=lambda each: (not each["type"].endswith("_type"), len(each["loc"])))
    kind = first["type"]
    # Fields and indices: other parts name one of several types.
    place = [
        str(part)
        for part in first["loc"]
        if isinstance(part, int) or (part.isidentifier() and part not in ("str", "Tool"))
    ]
    why = first["msg"].removeprefix("Value error, ")  # of our own validators
    if kind == "model_type":
        why = "Input should be an object"
    message = ": ".join([*filter(None, [".".join(place)]), why])
    if shown := first.get("ctx", {}).get("shown"):
        place.append(shown[1:-1])
    return ApiError(400, message, ".".join(place), kind if kind == UNKNOWN else None)
