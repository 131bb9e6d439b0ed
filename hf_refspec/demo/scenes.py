"""What the demo shows: a question about a document, an edit, and a chat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .prompts import with_document

FILE_TOKENS = 400  # of a file that are shown to the model

DRAFTING = """\
A drafter proposes the next few tokens, and the target model checks all of them in one forward \
pass. The tokens that the target model would have chosen itself are accepted, and the first one \
that differs is replaced by the target model's own choice. The text is therefore the same as \
without a drafter; only the time that it takes changes.

hf_refspec drafts without a second model: it looks the next tokens up in texts that are already \
there. ReferenceCopy looks in the prompt and in the answer so far, and in documents that are given \
to it. DatastoreDrafts looks in a datastore, which is built once from a large corpus. \
RetrievalCache looks in earlier answers, which it remembers.

Drafts help most where an answer repeats something: a quotation from a document, a function of a \
file that is edited, or an earlier answer of a conversation."""

TEMPERATURE = """\
```python
def to_celsius(fahrenheit):
    return (fahrenheit - 32) * 5 / 9


def to_fahrenheit(celsius):
    return celsius * 9 / 5 + 32
```"""


@dataclass(frozen=True)
class Scene:
    """A chat of one or more questions.

    Attributes:
        name (`str`): In one word.
        title (`str`): What it shows.
        questions (`tuple[str, ...]`): What the user writes.
        document (`str`, *optional*): A text that stands before the first question.
    """

    name: str
    title: str
    questions: tuple[str, ...]
    document: str | None = None

    def messages(self) -> Iterator[tuple[str, str]]:
        """Each message that the model gets, and the question in it."""
        document = self.document
        for question in self.questions:
            yield question if document is None else with_document(document, question), question
            document = None


def built_in_scenes() -> list[Scene]:
    """Three scenes that a model of 135 million parameters can do."""
    return [
        Scene(
            "document", "A question about a document", ("What does RetrievalCache do?",), DRAFTING
        ),
        Scene("edit", "An edit of a file", ("Add docstrings to these functions.",), TEMPERATURE),
        Scene(
            "chat",
            "Two turns of a chat",
            (
                "Write a SQL query that lists all customers from Berlin.",
                "Change it so that it lists all customers from Paris.",
            ),
        ),
    ]


def scenes_of_file(text: str, name: str, tokenizer: PreTrainedTokenizerBase) -> list[Scene]:
    """A question about a text and an edit of it, both of its first lines.

    Args:
        text (`str`): The text, not empty.
        name (`str`): Its file's name; the suffix tells whether it is Python.
        tokenizer (`PreTrainedTokenizerBase`): Counts the tokens.
    """
    part = _beginning(text, tokenizer)
    python = name.endswith(".py")
    edit = "Add type hints to this code." if python else "Correct the spelling of this text."
    document = f"```python\n{part}```" if python else part
    return [
        Scene("document", f"A question about {name}", ("What is this about?",), document),
        Scene("edit", f"An edit of {name}", (edit,), document),
    ]


def _beginning(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The first lines, as many as have at most `FILE_TOKENS` tokens; part of the first if need
    be."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) <= FILE_TOKENS:
        return text
    part = tokenizer.decode(ids[:FILE_TOKENS])
    return part[: part.rfind("\n") + 1] or part
