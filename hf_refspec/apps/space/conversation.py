"""A visitor's conversation with the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...drafting.datastore_drafts import DatastoreDrafts
from ...generation.default_drafter import default_sources
from ...store.datastore import Datastore
from ..shared.prompts import assistant, chat_inputs, tokens_left, user, with_document
from .public_store import open_public
from .race import Race
from .steps import RecordedDrafts


@dataclass(frozen=True)
class Host:
    """What answers the visitors: a model, its tokenizer with a chat template, and the datastore, a
    folder or a Hub id, that is drafted from unless a visitor names another."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    datastore: str | None = None

    def drafter(self, datastore: str) -> RecordedDrafts:
        """The default sources, and a datastore if one is named: the host's own or a public one.

        Raises:
            OSError: If it cannot be read.
            ValueError: If it is no datastore on the Hub, damaged, or of another tokenizer.
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
    """Messages, each with the race of its answer, and the drafter that learns from one to the next.

    `document` stands before the first message. `busy` is held while an answer is shown, and `left`
    is set when the visitor has begun another conversation.
    """

    document: str = ""
    turns: list[tuple[str, Race]] = field(default_factory=list)
    busy: Any = field(default_factory=Lock)
    left: bool = False
    _datastore: str | None = None
    _drafter: RecordedDrafts | None = None

    def ask(self, host: Host, message: str, datastore: str, max_new_tokens: int) -> Race:
        """Adds a message; running the race decodes its answer.

        Raises:
            OSError: If the datastore cannot be read.
            ValueError: If the message is empty or too long, or the datastore cannot be used.
        """
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
        if self._drafter is None or datastore.strip() != self._datastore:
            self._drafter = host.drafter(datastore.strip())
            self._datastore = datastore.strip()
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
