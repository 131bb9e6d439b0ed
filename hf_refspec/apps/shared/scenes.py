"""Scenes of the demo and the page: a question about a document, an edit, and a chat."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

FILE_TOKENS = 400  # of a file that the model reads, at most

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
BUILT_IN_SCENES = [
    Scene("document", (NEWS,), NOTICE, "A question about a document", FROM_THE_TEXT),
    Scene("edit", (EDIT,), TEMPERATURE, "An edit of Python code"),
    Scene("chat", QUERIES, title="Two turns of a chat"),
]


def scenes_of_file(text: str, name: str, tokenizer: PreTrainedTokenizerBase) -> list[Scene]:
    """A question about a text, and an edit of it, or of the first lines of a long one."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) > FILE_TOKENS:
        text = tokenizer.decode(ids[:FILE_TOKENS])
        text = text[: text.rfind("\n") + 1] or text
    question = "What is this about?"
    edit = "Correct the spelling of this text."
    if name.endswith(".py"):
        edit = "Add docstrings to this code."
        text = f"```python\n{text}```"
    return [
        Scene("document", (question,), text, f"A question about {name}", FROM_THE_TEXT),
        Scene("edit", (edit,), text, f"An edit of {name}"),
    ]
