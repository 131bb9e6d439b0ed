"""Turns chats and plain texts into input ids, and checks that they fit into a model's context."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

from transformers import BatchEncoding, PretrainedConfig, PreTrainedTokenizerBase

from ...corpus.rows import REFUSALS
from ...corpus.untrusted import one_line
from ...smollm2 import HUB_ID
from ...text_config import context_length

Message: TypeAlias = dict[str, str]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


system = partial(_message, "system")
user = partial(_message, "user")
assistant = partial(_message, "assistant")


def with_document(document: str | None, question: str) -> str:
    """A question after the text that it is about, if there is one."""
    return f"{document.strip()}\n\n{question}" if document and document.strip() else question


def tokens_left(
    prompt: BatchEncoding, config: PretrainedConfig, noun: str, hint: str, wanted: int
) -> int:
    """How many of the `wanted` tokens fit into the context after a prompt; at least one must."""
    length = prompt["input_ids"].shape[1]
    longest = context_length(config)
    if longest is None:
        return wanted
    if length >= longest:
        raise ValueError(
            f"{noun} has {length:,} tokens, and the model's context holds {longest:,} with the "
            f"answer; {hint}"
        )
    return min(wanted, longest - length)


def check_chat_template(tokenizer: PreTrainedTokenizerBase, name: str | None, hint: str) -> None:
    """Refuses a tokenizer without a chat template; `hint` says what to do."""
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {name or HUB_ID} has no chat template; {hint}")


def chat_inputs(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> BatchEncoding:
    """A chat up to its answer, in the model's template or as a text: ids and mask, `(1, n)`. Raises
    a ValueError if the template refuses the chat."""
    if tokenizer.chat_template is None:
        return text_inputs(tokenizer, "\n\n".join(message["content"] for message in messages))
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            tokenizer_kwargs={"return_token_type_ids": False},
        )
    except REFUSALS as error:
        raise ValueError(f"the chat template refuses these messages: {one_line(error)}") from error


def text_inputs(tokenizer: PreTrainedTokenizerBase, text: str) -> BatchEncoding:
    """A text for the model to continue: ids and mask, `(1, n)`."""
    return tokenizer(text, return_tensors="pt", return_token_type_ids=False)
