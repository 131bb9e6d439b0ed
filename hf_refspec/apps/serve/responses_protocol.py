"""The body of `/v1/responses`, and the chat that it describes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Discriminator, Field, Tag

from .protocol import (
    AnyObject,
    AnyRequest,
    AnyText,
    ChatMessage,
    ChatRequest,
    Content,
    Function,
    FunctionCall,
    FunctionChoice,
    JsonSchema,
    NamedTool,
    ObjectOfSchema,
    Text,
    Tool,
    ToolCall,
)

_MOST = 2048  # items of an input
LOGPROBS = "message.output_text.logprobs"


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    type: Literal["message"] = "message"


class PastCall(BaseModel):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class PastOutput(BaseModel):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Content


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return str(kind or "message")


Item: TypeAlias = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[PastCall, Tag("function_call")]
    | Annotated[PastOutput, Tag("function_call_output")],
    Discriminator(_kind),
]


class ResponseTool(Function):
    type: Literal["function"]


class ResponseToolName(BaseModel):
    type: Literal["function"]
    name: Text


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class TextConfig(BaseModel):
    format: (
        Annotated[AnyText | AnyObject | SchemaFormat, Field(discriminator="type")] | None
    ) = None  # fmt: skip


class ResponsesRequest(AnyRequest):
    """The body of `/v1/responses`. Nothing is stored: each request has the whole conversation."""

    input: Text | Annotated[list[Item], Field(min_length=1, max_length=_MOST, fail_fast=True)]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[ResponseTool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ResponseToolName | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    include: list[Text] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def as_chat(self) -> ChatRequest:
        """The chat that it describes, already checked."""
        shared = {name: getattr(self, name) for name in AnyRequest.model_fields}
        choice: Any = self.tool_choice
        if isinstance(choice, ResponseToolName):
            choice = NamedTool(type="function", function=FunctionChoice(name=choice.name))
        return ChatRequest.model_construct(
            **shared,
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            tools=[Tool(type="function", function=each) for each in self.tools or []],
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self._response_format(),
            logprobs=self.top_logprobs is not None or LOGPROBS in (self.include or []),
            top_logprobs=self.top_logprobs,
        )

    def _response_format(self) -> AnyText | AnyObject | ObjectOfSchema | None:
        form = None if self.text is None else self.text.format
        if isinstance(form, SchemaFormat):
            return ObjectOfSchema(type="json_schema", json_schema=form)
        return form

    def _messages(self) -> list[ChatMessage]:
        items = self.input
        if isinstance(items, str):
            items = [Message(role="user", content=items)]
        messages = []
        if self.instructions:
            messages.append(ChatMessage(role="system", content=self.instructions))
        for item in items:
            if isinstance(item, PastCall):
                _add_call(messages, item)
            elif isinstance(item, PastOutput):
                messages.append(
                    ChatMessage(role="tool", tool_call_id=item.call_id, content=item.output)
                )
            else:
                messages.append(ChatMessage(role=item.role, content=item.content))
        return messages


def _add_call(messages: list[ChatMessage], item: PastCall) -> None:
    """A call belongs to the message before it, if that is the model's."""
    function = FunctionCall(name=item.name, arguments=item.arguments)
    call = ToolCall(id=item.call_id, function=function)
    if messages and messages[-1].role == "assistant":
        messages[-1].tool_calls = [*(messages[-1].tool_calls or []), call]
    else:
        messages.append(ChatMessage(role="assistant", tool_calls=[call], content=None))
