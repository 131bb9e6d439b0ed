"""Chats and texts as input ids that fit into a model's context; scenes of the demo and the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from transformers import BatchEncoding, PretrainedConfig, PreTrainedTokenizerBase

from ...corpus.rows import REFUSALS
from ...corpus.untrusted import one_line
from ...smollm2 import HUB_ID
from ...text_config import context_length

Message: TypeAlias = dict[str, str]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def chat_messages(
    questions: Sequence[str],
    answers: Sequence[str],
    system: str | None = None,
    document: str | None = None,
) -> list[Message]:
    """A chat up to the last question, with the answers to those before it.

    The first question comes after the `document` that it is about, if there is one."""
    questions = [with_document(document, questions[0]), *questions[1:]]
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in zip(questions, answers, strict=False):
        messages += [user(question), {"role": "assistant", "content": answer}]
    return [*messages, user(questions[-1])]


def with_document(document: str | None, question: str) -> str:
    """A question after the text that it is about, if there is one."""
    return f"{document.strip()}\n\n{question}" if document and document.strip() else question


def tokens_left(
    prompt: BatchEncoding, config: PretrainedConfig, noun: str, hint: str, wanted: int
) -> int:
    """The number of `wanted` tokens that fit into the context after a prompt, at least one."""
    length = prompt["input_ids"].shape[1]
    longest = context_length(config)
    if longest is None:
        return wanted
    if length >= longest:
        holds = f"the model's context holds {longest:,} with the answer"
        raise ValueError(f"{noun} has {length:,} tokens, and {holds}; {hint}")
    return min(wanted, longest - length)


def check_chat_template(tokenizer: PreTrainedTokenizerBase, name: str | None, hint: str) -> None:
    """Refuses a tokenizer without a chat template; `hint` says what to do."""
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {name or HUB_ID} has no chat template; {hint}")


def chat_inputs(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> BatchEncoding:
    """A chat up to its answer as ids and mask `(1, n)`, in the model's template or as a text.

    Raises a ValueError if the template refuses the chat."""
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


# Without this instruction a small model soon invents.
FROM_THE_TEXT = "Answer the question in up to three sentences of the text."

NEWS = "What is new at the library of Ashford?"
EDIT = "Add docstrings to these functions."
NOTICE = """\
The town library of Ashford opens again on Monday after a year of repairs. The roof has been \
renewed, and the reading room has new windows and forty new seats. The library will be open from \
9 am to 8 pm on weekdays and from 10 am to 4 pm on Saturdays. On the opening day, the writer Helen \
Moore reads from her new novel at 6 pm. Entry is free, and visitors can renew their cards at the \
desk."""
TEMPERATURE = """\
```python
def to_celsius(fahrenheit):
    return (fahrenheit - 32) * 5 / 9


def to_fahrenheit(celsius):
    return celsius * 9 / 5 + 32
```"""
QUERIES = (
    "Write a SQL query that lists all customers from Berlin.",
    "Change it so that it lists all customers from Paris.",
)


@dataclass(frozen=True)
class Scene:
    """A chat of one or more questions, the first of them about `document`."""

    name: str
    questions: tuple[str, ...]
    document: str = ""
    title: str = ""
    system: str | None = None


# A model of 135 million parameters can do these.
SCENES = [
    Scene("document", (NEWS,), NOTICE, "A question about a document", FROM_THE_TEXT),
    Scene("edit", (EDIT,), TEMPERATURE, "An edit of Python code"),
    Scene("chat", QUERIES, title="A chat: at first nothing to copy from, then an answer to change"),
]
