"""A visitor's conversation with the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from ..shared.live_drafts import LiveDrafts
from ..shared.prompts import assistant, chat_inputs, tokens_left, user, with_document
from .host import AUTO, Host
from .race import Race


@dataclass
class Conversation:
    """Messages, each with the race of its answer, and the drafters that learn from one to the next.

    `document` stands before the first message. `busy` is held while an answer is shown, and `left`
    is set when the visitor has begun another conversation.
    """

    document: str = ""
    turns: list[tuple[str, Race]] = field(default_factory=list)
    busy: Any = field(default_factory=Lock)
    left: bool = False
    _drafters: dict[str, LiveDrafts] = field(default_factory=dict)

    def ask(self, host: Host, message: str, max_new_tokens: int, drafts: str = AUTO) -> Race:
        """Adds a message; running the race decodes its answer, drafted from one of the host's
        `sources`."""
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
        if drafts not in self._drafters:
            self._drafters[drafts] = LiveDrafts(host.sources()[drafts])
        race = Race(host.model, host.tokenizer, inputs, fitting, self._drafters[drafts])
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
