"""A visitor's conversation with the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...drafting.datastore_drafts import DatastoreDrafts
from ...generation.default_drafter import default_sources
from ...store.datastore import Datastore
from ..shared.prompts import Message, assistant, chat_inputs, tokens_left, user, with_document
from .public_store import open_public
from .race import Race
from .steps import RecordedDrafts


@dataclass(frozen=True)
class Host:
    """What answers the visitors.

    Attributes:
        model (`PreTrainedModel`): The target model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer, with a chat template.
        datastore (`str`, *optional*): The datastore that is drafted from unless a visitor names
            another: a folder or a Hub id.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    datastore: str | None = None

    def drafter(self, datastore: str) -> RecordedDrafts:
        """The default sources, and a datastore if one is named: the host's own or a public one.

        Raises:
            OSError: If it cannot be read.
            ValueError: If it is none on the Hub, damaged, or of another tokenizer.
        """
        sources = default_sources()
        if datastore:
            own = datastore == self.datastore
            store = Datastore.from_pretrained(datastore) if own else open_public(datastore)
            store.check_tokenizer(self.tokenizer)
            sources.append(DatastoreDrafts(store))
        return RecordedDrafts(sources)


@dataclass
class Conversation:
    """Messages and answers, and the drafter that goes on learning from one to the next.

    Attributes:
        document (`str`): A text that stands before the first message.
        turns (`list[tuple[str, Race]]`): Each message, and its answer.
        busy (`Lock`): Is held while an answer is shown.
        left (`bool`): Whether the visitor has begun another conversation.
    """

    document: str = ""
    turns: list[tuple[str, Race]] = field(default_factory=list)
    busy: Any = field(default_factory=Lock)
    left: bool = False
    _datastore: str | None = None
    _drafter: RecordedDrafts | None = None

    def ask(self, host: Host, message: str, datastore: str, max_new_tokens: int) -> Race:
        """Adds a message; its answer is decoded as the race is run.

        Raises:
            OSError: If the datastore cannot be read.
            ValueError: If the message is empty or too long, or the datastore cannot be used.
        """
        if not message.strip():
            raise ValueError("the message is empty; type one, or choose an example")
        inputs = chat_inputs(host.tokenizer, [*self._messages(), self._next(message)])
        noun, way_out = "the message with its document", "shorten them"
        if self.turns:
            noun, way_out = "the conversation", "begin a new one"
        fitting = tokens_left(inputs, host.model.config, noun, way_out, max_new_tokens)
        if self._drafter is None or datastore.strip() != self._datastore:
            self._drafter = host.drafter(datastore.strip())
            self._datastore = datastore.strip()
        race = Race(host.model, host.tokenizer, inputs, fitting, self._drafter)
        self.turns.append((message, race))
        return race

    def stop(self) -> None:
        """Ends the answer that is under way."""
        if self.turns:
            self.turns[-1][1].stopped = True

    def leave(self) -> None:
        """Ends the answer that is under way, and waits until nothing of it is shown any more."""
        self.left = True
        self.stop()
        with self.busy:
            pass

    def _messages(self) -> list[Message]:
        messages: list[Message] = []
        for number, (message, race) in enumerate(self.turns):
            content = self._with_document(message) if number == 0 else message
            messages += [user(content), assistant(race.drafted.text)]
        return messages

    def _next(self, message: str) -> Message:
        return user(message if self.turns else self._with_document(message))

    def _with_document(self, message: str) -> str:
        return with_document(self.document, message) if self.document.strip() else message
