"""A visitor's conversation with the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...drafting.datastore_drafts import DatastoreDrafts
from ...generation.default_drafter import default_sources
from ...store.datastore import Datastore
from ..shared.live_drafts import LiveDrafts
from ..shared.prompts import assistant, chat_inputs, tokens_left, user, with_document
from .race import Race


@dataclass(frozen=True)
class Host:
    """What answers the visitors: a model, a tokenizer with a chat template, and perhaps a datastore
    to draft from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    datastore: Datastore | None = None

    def drafter(self) -> LiveDrafts:
        """The default sources and the datastore."""
        drafts = [] if self.datastore is None else [DatastoreDrafts(self.datastore)]
        return LiveDrafts([*default_sources(), *drafts])


@dataclass
class Conversation:
    """Messages, each with the race of its answer, and the drafter that learns from one to the next.

    `document` stands before the first message. `busy` is held while an answer is shown, and `left`
    is set when the visitor has begun another conversation.
    """

    document: str = ""
    turns: list[tuple[str, Race]] = field(default_factory=list)
    busy: Any = field(default_factory=Lock)
    left: bool = False
    _drafter: LiveDrafts | None = None

    def ask(self, host: Host, message: str, max_new_tokens: int) -> Race:
        """Adds a message; running the race decodes its answer."""
        if not message.strip():
            raise ValueError("the message is empty; type one, or choose an example")
        messages = []
        for earlier, race in self.turns:
            messages += [user(earlier), assistant(race.drafted.text)]
        messages.append(user(message))
        if self.document.strip():
            messages[0] = user(with_document(self.document, messages[0]["content"]))
        inputs = chat_inputs(host.tokenizer, messages)
        noun, hint = "the message with its document", "shorten them"
        if self.turns:
            noun, hint = "the conversation", "begin a new one"
        fitting = tokens_left(inputs, host.model.config, noun, hint, max_new_tokens)
        if self._drafter is None:
            self._drafter = host.drafter()
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
