"""The host of the page, and the conversation of each visitor."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...drafting.auto import default_sources
from ...drafting.datastore_drafts import DatastoreDrafts
from ...smollm2 import HUB_ID
from ...store.datastore import Datastore
from ..shared.prompts import chat_inputs, chat_messages, tokens_left
from ..shared.streams import LiveDrafts
from .race import Race


@dataclass(frozen=True)
class Host:
    """A model that answers the visitors."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase  # with a chat template
    datastore: Datastore | None = None  # a further source of drafts
    name: str = HUB_ID  # for people

    def drafter(self) -> LiveDrafts:
        """A new default drafter, with the datastore."""
        stores = [DatastoreDrafts(self.datastore)] if self.datastore else []
        return LiveDrafts([*default_sources(), *stores])


@dataclass
class Conversation:
    """Messages with the races of their answers, and a drafter that learns from race to race."""

    document: str = ""  # precedes the first message, with which it came
    turns: list[tuple[str, Race]] = field(default_factory=list)
    busy: Any = field(default_factory=Lock)  # held while an answer is shown
    left: bool = False  # the visitor has begun another one
    _drafter: LiveDrafts | None = None

    def ask(self, host: Host, message: str, max_new_tokens: int, document: str = "") -> Race:
        """Adds a message. Running the race decodes its answer.

        The `document` counts with the first message alone."""
        if not self.turns:
            self.document = document
        if not message.strip():
            raise ValueError("the message is empty; type one, or choose an example")
        questions = [*(earlier for earlier, _ in self.turns), message]
        answers = [race.drafted.text for _, race in self.turns]
        messages = chat_messages(questions, answers, document=self.document)
        inputs = chat_inputs(host.tokenizer, messages)
        about = ("the message with its document", "shorten them")
        if self.turns:
            about = ("the conversation", "begin a new one")
        fitting = tokens_left(inputs, host.model.config, *about, max_new_tokens)
        self._drafter = self._drafter or host.drafter()
        race = Race(host.model, host.tokenizer, inputs, fitting, self._drafter)
        self.turns.append((message, race))
        return race

    def stop(self) -> None:
        """Ends the current answer."""
        if self.turns:
            self.turns[-1][1].stopped = True

    def leave(self) -> None:
        """Ends the current answer, and waits until nothing more of it is shown."""
        self.left = True
        self.stop()
        with self.busy:
            pass
