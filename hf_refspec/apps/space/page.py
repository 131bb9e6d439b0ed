"""The page: its parts and their events."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from html import escape
from importlib.metadata import distributions
from itertools import chain, pairwise
from time import perf_counter, sleep
from typing import Any

import gradio as gr
import torch

from ...store.files import DatastoreError
from ..shared.scenes import EDIT, FROM_THE_TEXT, NEWS, NOTICE, QUERIES, TEMPERATURE, Scene
from .conversation import AUTO, Conversation, Host
from .views import conversation_html, step_html

logger = logging.getLogger("hf_refspec")

_SECONDS_BETWEEN_PICTURES = 0.15
_SECONDS_IN_LINE = 0.5  # between two looks at the line
_SHOWN = ("chat", "document", "message", "stop", "looking", "number", "tree")
_INTRO = """\
<div class="rs"><h1>hf_refspec</h1>
<p>A language model writes one token at a time. Here {model} answers twice, plainly and drafted:
likely next tokens are looked up, and the model checks many of them at once and keeps those that it
would have written. {promise} Coloured words were drafted.{documentation}</p></div>"""
_MEASURING = """<div class="rs"><p class="quiet">How the race is measured: two real calls of
<code>generate()</code>, greedy, in {dtype}, on {device}, take turns; each has a clock that runs
only while it computes, and the call whose clock is behind goes next.</p></div>"""
_PAPERS = {
    "REST": "REST finds the longest match in the whole datastore",
    "CREST": "CREST looks up the datastore's commonest n-grams alone",
}


# Examples; after an answer, the next message of its example is offered.
_HOURS = "When is the library open on Saturdays?"
_ACCOUNT = "Write a Python class for a bank account with deposit, withdraw and balance."
_TRANSFER = "Write it again, with a method that transfers an amount to another account."
PRESETS = (
    Scene("RAG", (f"{FROM_THE_TEXT} {NEWS}", _HOURS), NOTICE),
    Scene("Edit", (EDIT,), TEMPERATURE),
    Scene("Chat", QUERIES),
    Scene("Code", (_ACCOUNT, _TRANSFER)),
)


def following(message: str) -> str:
    """The next message of the preset that has this one, or an empty text."""
    later = dict(pair for preset in PRESETS for pair in pairwise(preset.questions))
    return later.get(message.strip(), "")


def page(host: Host) -> gr.Blocks:
    """The page on which a host answers."""
    intro, measuring = _texts(host)
    _, *names = host.sources()
    corpora = {str(store.config.source.get("corpus")) for store in host.choices}
    with gr.Blocks(title="hf_refspec", analytics_enabled=False) as blocks:
        gr.HTML(intro)
        state = gr.State(None, time_to_live=3600)
        with gr.Row(elem_id="rs-presets"):
            presets = [gr.Button(p.name, size="sm", min_width=60) for p in PRESETS]
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                document = gr.Textbox(
                    label="Document",
                    info="Stands before the first message.",
                    lines=6,
                    max_lines=16,
                    elem_id="rs-document",
                )
                with gr.Accordion("Settings", open=False):
                    new_tokens = gr.Slider(
                        16,
                        512,
                        160,
                        step=16,
                        label="New tokens at most",
                        elem_id="rs-new-tokens",
                        buttons=[],
                    )
                    drafts = gr.Radio(
                        [AUTO, *names],
                        value=AUTO,
                        label="Drafts",
                        info=f"{'; '.join(_PAPERS[name] for name in names)}: {', '.join(corpora)}.",
                        visible=bool(host.choices),
                        elem_id="rs-drafts",
                        buttons=[],
                    )
            with gr.Column(scale=5, min_width=300, elem_id="rs-talk"):
                chat = gr.HTML(conversation_html(Conversation()), elem_id="rs-chat")
                with gr.Column(elem_id="rs-ask"):
                    message = gr.Textbox(label="Message", max_lines=6, elem_id="rs-message")
                    with gr.Row():
                        send = gr.Button("Send", variant="primary", elem_id="rs-send", min_width=80)
                        stop = gr.Button("Stop", interactive=False, elem_id="rs-stop", min_width=80)
                        new = gr.Button("New chat", elem_id="rs-new", min_width=80)
        with gr.Column(visible=False, elem_id="rs-steps") as looking:
            number = gr.Slider(
                1, 2, 1, step=1, label="Look into a forward pass", elem_id="rs-number", buttons=[]
            )
            tree = gr.HTML(elem_id="rs-tree")
        gr.HTML(measuring)

        private: dict[str, Any] = {"api_visibility": "private"}
        shown = [chat, document, message, stop, looking, number, tree]
        racing: dict[str, Any] = {
            "outputs": [state, *shown],
            # Races wait in the host's line, each in one of 40 threads.
            "concurrency_limit": 30,
            "concurrency_id": "race",
            "show_progress": "hidden",
            "trigger_mode": "once",
            **private,
        }
        settings = [new_tokens, drafts]
        asked = [state, document, message, *settings]
        gr.on([send.click, message.submit], partial(_race, host), asked, **racing)
        for button, preset in zip(presets, PRESETS, strict=True):
            button.click(partial(_race_preset, host, preset), [state, *settings], **racing)
        new.click(_begin_anew, state, [state, *shown], **private)
        stop.click(_stop, state, None, queue=False, **private)
        looked = partial(_look, host)
        number.change(looked, [state, number], tree, show_progress="hidden", **private)
    return blocks


def _texts(host: Host) -> tuple[str, str]:
    """What stands above everything else, and below."""
    model, promise = host.model, "The words are those of plain decoding."
    dtype = str(model.dtype).removeprefix("torch.")
    if model.dtype != torch.float32:
        promise += f" Where two are within the rounding of {dtype}, either of them may come out."
    # Where the documentation is stands in the package's metadata alone.
    found = [each.metadata.get_all("Project-URL", []) for each in distributions(name="hf_refspec")]
    links = [url.partition(", ")[2] for url in chain(*found) if url.startswith("Documentation,")]
    more = f' <a href="{links[0]}" target="_blank">Documentation</a>' if links else ""
    device = "the CPU" if model.device.type == "cpu" else "a GPU"
    intro = _INTRO.format(model=escape(host.name), promise=promise, documentation=more)
    return intro, _MEASURING.format(dtype=dtype, device=device)


def _race_preset(
    host: Host, preset: Scene, conversation: Conversation | None, *settings: Any
) -> Iterator[tuple[Any, ...]]:
    """Begins anew with a preset's texts, and sends its first message."""
    anew = _begin_anew(conversation, preset)
    yield anew
    yield from _race(host, anew[0], preset.document, preset.questions[0], *settings)


def _race(host: Host, conversation: Conversation | None, *fields: Any) -> Iterator[tuple[Any, ...]]:
    """Shows the race, and then the tree of its best step; or what went wrong."""
    conversation = conversation or Conversation()
    if conversation.busy.locked():  # by an example's race
        return
    with conversation.busy:
        try:
            yield from _answer(host, conversation, *fields)
        except DatastoreError:  # its message names a path of this machine
            logger.exception("the datastore cannot be read")
            yield _failed(conversation, "The datastore cannot be read; choose other drafts.")
        except (RuntimeError, ValueError) as error:  # torch's are RuntimeErrors
            yield _failed(conversation, str(error))


def _answer(
    host: Host,
    conversation: Conversation,
    document: str,
    message: str,
    new_tokens: float,
    drafts: str,
) -> Iterator[tuple[Any, ...]]:
    if not conversation.turns:
        conversation.document = document
    race = conversation.ask(host, message, int(new_tokens), drafts)
    with host.place_in_line(race):
        yield _shown(
            conversation,
            document=gr.Textbox(interactive=False),
            message="",
            stop=gr.Button(interactive=True),
            looking=gr.Column(visible=False),
        )
        while not race.stopped and (wait := host.wait(race)):
            yield _shown(conversation, chat=conversation_html(conversation, wait=wait))
            sleep(_SECONDS_IN_LINE)
        drawn = perf_counter()
        for _ in race.run():
            if race.stopped or conversation.left:  # the last picture says so
                continue
            if perf_counter() - drawn > _SECONDS_BETWEEN_PICTURES:
                yield _shown(conversation)
                drawn = perf_counter()
    if conversation.left:
        return
    best = 1 + max(range(len(race.steps)), key=lambda i: len(race.steps[i].tokens), default=0)
    yield _shown(
        conversation,
        message=following(message),
        stop=gr.Button(interactive=False),
        looking=gr.Column(visible=bool(race.steps)),
        number=gr.Slider(maximum=max(2, len(race.steps)), value=best),
        tree=_look(host, conversation, best),
    )


def _shown(conversation: Conversation, **changes: Any) -> tuple[Any, ...]:
    """The state, the chat and whatever else changes."""
    changes.setdefault("chat", conversation_html(conversation))
    return conversation, *(changes.get(name, gr.skip()) for name in _SHOWN)


def _failed(conversation: Conversation, error: str) -> tuple[Any, ...]:
    stop = gr.Button(interactive=False)
    return _shown(conversation, chat=conversation_html(conversation, error), stop=stop)


def _look(host: Host, conversation: Conversation | None, number: int) -> str:
    """The tree of a forward pass of the last answer."""
    race = conversation.turns[-1][1] if conversation and conversation.turns else None
    if race is None or not 1 <= number <= len(race.steps):
        return ""
    return step_html(int(number), race.steps, race.sources, host.tokenizer)


def _stop(conversation: Conversation | None) -> None:
    if conversation is not None:
        conversation.stop()


def _begin_anew(conversation: Conversation | None, preset: Scene | None = None) -> tuple[Any, ...]:
    """A new conversation; a preset fills in its texts."""
    if conversation is not None:
        conversation.leave()
    document, message = gr.Textbox(interactive=True), ""
    if preset is not None:
        document, message = gr.Textbox(preset.document, interactive=True), preset.questions[0]
    hidden, off = gr.Column(visible=False), gr.Button(interactive=False)
    return _shown(Conversation(), document=document, message=message, stop=off, looking=hidden)
