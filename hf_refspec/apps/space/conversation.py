"""The host, which answers one visitor after another, and the conversation of each visitor."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from huggingface_hub import constants
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...corpus.documents import python_stdlib
from ...drafting.auto import default_sources
from ...drafting.contract import Drafter
from ...drafting.datastore_drafts import DatastoreDrafts
from ...smollm2 import HUB_ID
from ...store.datastore import Datastore
from ...store.stored_tokenizer import tokenizer_fingerprint
from ...version import __version__
from ..shared.prompts import assistant, chat_inputs, tokens_left, user, with_document
from ..shared.streams import LiveDrafts
from .race import Race

logger = logging.getLogger("hf_refspec")

AUTO = "auto"
_CORPUS = "Python standard library"
_STDLIB_TOKENS = 500_000
_NGRAMS = 2_000  # of each length


@dataclass(frozen=True)
class Host:
    """A model that answers one visitor after another."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase  # with a chat template
    datastore: Datastore | None = None  # the default drafter's
    choices: Sequence[Datastore] = ()  # `datastore` itself, or REST's and CREST's
    name: str = HUB_ID  # for people
    line: list[Race] = field(default_factory=list)  # the first runs, the others wait

    @contextmanager
    def place_in_line(self, race: Race) -> Iterator[None]:
        """Holds the last place for a race, until it has run."""
        self.line.append(race)
        try:
            yield
        finally:
            self.line.remove(race)

    def wait(self, race: Race) -> str:
        """The number of answers before a race, in words; empty when it is its turn."""
        before = self.line.index(race)
        answers = "1 answer comes" if before == 1 else f"{before} answers come"
        return f"{answers} before yours." if before else ""

    def sources(self) -> dict[str, list[Drafter]]:
        """The sources to choose from, by name."""
        sources: dict[str, list[Drafter]] = {AUTO: [*default_sources()]}
        if self.datastore is not None:
            sources[AUTO].append(DatastoreDrafts(self.datastore))
        for store in self.choices:
            if store.form == "full":
                sources["REST"] = [DatastoreDrafts(store, published=True)]
            else:
                name = "compact" if store is self.datastore else "CREST"
                sources[name] = [DatastoreDrafts(store)]
        return sources


def python_datastores(tokenizer: PreTrainedTokenizerBase) -> list[Datastore]:
    """Both forms of a small datastore of Python's standard library; none if that fails.

    They are built once and kept in HF_HOME."""
    try:
        name = f"python-stdlib-{__version__}-{tokenizer_fingerprint(tokenizer)}"
        folder = Path(constants.HF_HOME, "hf_refspec", name)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            logger.info("Building a datastore of the %s, once (seconds) ...", _CORPUS)
            options: dict[str, Any] = {"corpus_name": _CORPUS, "license": "PSF-2.0"}
            options |= {"max_tokens": _STDLIB_TOKENS, "progress": False}
            Datastore.build(python_stdlib(), tokenizer, folder, **options)
        full = Datastore(folder, form="full")
        if full.config.ngrams is None:
            full.compact(published=True, ngrams_per_order=_NGRAMS, progress=False)
        return [full, Datastore(folder, form="compact")]
    except (OSError, ValueError) as error:
        logger.warning("There are no drafts by REST and CREST on the page: %s", error)
        return []


@dataclass
class Conversation:
    """Messages with the races of their answers, and drafters that learn from race to race."""

    document: str = ""  # precedes the first message
    turns: list[tuple[str, Race]] = field(default_factory=list)
    busy: Any = field(default_factory=Lock)  # held while an answer is shown
    left: bool = False  # the visitor has begun another one
    _drafters: dict[str, LiveDrafts] = field(default_factory=dict)

    def ask(self, host: Host, message: str, max_new_tokens: int, drafts: str = AUTO) -> Race:
        """Adds a message. Running the race decodes its answer, drafted from `sources()[drafts]`."""
        if not message.strip():
            raise ValueError("the message is empty; type one, or choose an example")
        messages = []
        for earlier, race in self.turns:
            messages += [user(earlier), assistant(race.drafted.text)]
        messages.append(user(message))
        messages[0] = user(with_document(self.document, messages[0]["content"]))
        inputs = chat_inputs(host.tokenizer, messages)
        noun = "the message with its document"
        hint = "shorten them"
        if self.turns:
            noun = "the conversation"
            hint = "begin a new one"
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
