"""The page: its parts and their events, and how it is served with a model."""

import logging
from collections.abc import Iterator
from functools import partial
from html import escape
from importlib.metadata import metadata
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import gradio as gr
import torch
from starlette.middleware import Middleware

from ...drafting.datastore_drafts import DatastoreDrafts
from ...kernels.compilation import drafting_kernels
from ...store.datastore import Datastore
from ...store.files import DatastoreError
from ..shared.body_limit import BodyLimit
from ..shared.loading import check_sources, load_model, load_tokenizer, name_for_people
from ..shared.prompts import (
    EDIT,
    FROM_THE_TEXT,
    NEWS,
    NOTICE,
    QUERIES,
    TEMPERATURE,
    Scene,
    check_chat_template,
)
from .conversation import Conversation, Host
from .views import conversation_html, pass_html

logger = logging.getLogger("hf_refspec")

_LARGEST_BODY = 1 << 20  # bytes
_WARMUP = "Repeat: one two three one two three one two three"
_SECONDS_BETWEEN_PICTURES = 0.15
_SHOWN = ("chat", "document", "message", "stop", "looking", "number", "tree")
_INTRO = """\
<div class="rs"><h1>hf_refspec</h1>
<p>A language model writes one token at a time. Here {model} answers twice, plainly and drafted:
likely next tokens are looked up, and the model checks many of them at once and keeps those that it
would have written. {promise} Coloured words were drafted.
<a href="{link}" target="_blank">Documentation</a></p>
<p class="quiet">Examples, each of which starts a race:</p></div>"""
_MEASURING = """<div class="rs"><p class="quiet">How the race is measured: two real calls of
<code>generate()</code>, greedy, in {dtype}, on {device}, take turns; each has a clock that runs
only while it computes, and the call that has computed less goes next.</p></div>"""
# On a phone, scrolls to each race once, where both columns are in view.
_FOLLOW = """() => {
  const running = document.querySelector("#rs-chat .running");
  if (running && !window.rsFollowed && innerWidth <= 640) running.scrollIntoView();
  window.rsFollowed = !!running;
}"""
_HOURS = "When is the library open on Saturdays?"
_ACCOUNT = "Write a Python class for a bank account with deposit, withdraw and balance."
_TRANSFER = "Write it again, with a method that transfers an amount to another account."
# After an answer, the next message of its example is offered.
EXAMPLES = (
    Scene("RAG", (f"{FROM_THE_TEXT} {NEWS}", _HOURS), NOTICE, "a question about a document"),
    Scene("Edit", (EDIT,), TEMPERATURE, "docstrings for two functions"),
    Scene("Chat", QUERIES, title="SQL, and a change of it"),
    Scene("Code", (_ACCOUNT, _TRANSFER), title="a Python class, and a new method"),
)


def serve(server_name: str | None = None, server_port: int | None = None, **options: Any) -> None:
    """Serves until Ctrl-C; `options` go to [`load_host`]. On the Hub gradio finds the address."""
    blocks = page(load_host(**options))
    address = start(blocks, server_name=server_name, server_port=server_port)
    print(f"{address} (Ctrl-C ends it)", flush=True)
    blocks.block_thread()


def load_host(
    model: str | None = None,
    dtype: str | None = None,
    datastore: str | None = None,
    device_map: str | None = None,
) -> Host:
    """Loads a model and its sources, and decodes a few tokens, to probe and time the model."""
    tokenizer = load_tokenizer(model)
    check_chat_template(tokenizer, model, "choose a model with one")
    store = None
    if datastore is not None:
        store = Datastore.from_pretrained(datastore, tokenizer=tokenizer)
        check_sources([DatastoreDrafts(store)], model)
    loaded = load_model(model, device_map, dtype)
    drafting_kernels.compile()
    kind = type(loaded).__name__.removesuffix("ForCausalLM")
    name = f"{name_for_people(model)} ({kind}, {loaded.num_parameters() / 1e6:,.0f}M parameters)"
    host = Host(loaded, tokenizer, store, name)
    for _ in Conversation().ask(host, _WARMUP, max_new_tokens=12).run():
        pass
    return host


def start(blocks: gr.Blocks, **options: Any) -> str:
    """Serves a page until it is closed; returns its address. `options` go to `Blocks.launch`."""
    font = ["system-ui", "sans-serif"]
    font_mono = ["ui-monospace", "monospace"]
    blocks.launch(
        theme=gr.themes.Default(primary_hue="blue", font=font, font_mono=font_mono),
        css_paths=Path(__file__).with_name("style.css"),
        footer_links=[],
        ssr_mode=False,
        quiet=True,
        prevent_thread_lock=True,
        max_file_size=0,  # no uploads
        app_kwargs={"middleware": [Middleware(BodyLimit, most_bytes=_LARGEST_BODY)]},
        **options,
    )
    return str(blocks.local_url)


def following(message: str) -> str:
    """The next message of the example that has this one, or an empty text."""
    later = dict(pair for example in EXAMPLES for pair in pairwise(example.questions))
    return later.get(message.strip(), "")


def page(host: Host) -> gr.Blocks:
    """The page on which a host answers."""
    intro, measuring = _texts(host)
    with gr.Blocks(title="hf_refspec", analytics_enabled=False) as blocks:
        gr.HTML(intro)
        state = gr.State(None, time_to_live=3600)
        with gr.Row(elem_id="rs-presets"):
            labels = [f"▶ {example.name}: {example.title}" for example in EXAMPLES]
            buttons = [gr.Button(label, size="sm", min_width=150) for label in labels]
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                document = gr.Textbox(
                    label="Document",
                    info="Optional; precedes the first message.",
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
            "concurrency_limit": 1,  # others wait in gradio's queue
            "concurrency_id": "race",
            "show_progress": "minimal",
            "show_progress_on": chat,
            "trigger_mode": "once",
            **private,
        }
        fields = [state, document, message, new_tokens]
        gr.on([send.click, message.submit], partial(_race, host), fields, **racing)
        for button, example in zip(buttons, EXAMPLES, strict=True):
            # Outside of the queue: it ends the visitor's own race, which the next would wait for.
            begin = partial(_start_over, example=example)
            begun = button.click(begin, state, [state, *shown], queue=False, **private)
            begun.then(partial(_race, host), fields, **{**racing, "trigger_mode": "multiple"})
        chat.change(None, js=_FOLLOW, **private)
        new.click(_start_over, state, [state, *shown], **private)
        stop.click(_stop, state, None, queue=False, **private)
        look = partial(_look, host)
        number.change(look, [state, number], tree, show_progress="hidden", **private)
    return blocks


def _texts(host: Host) -> tuple[str, str]:
    """The first and the last text of the page."""
    dtype = str(host.model.dtype).removeprefix("torch.")
    promise = "The words are those of plain decoding."
    if host.model.dtype != torch.float32:
        promise += f" Where two are within the rounding of {dtype}, either of them may come out."
    links = dict(entry.split(", ") for entry in metadata("hf_refspec").get_all("Project-URL", []))
    device = "the CPU" if host.model.device.type == "cpu" else "a GPU"
    intro = _INTRO.format(model=escape(host.name), promise=promise, link=links["Documentation"])
    return intro, _MEASURING.format(dtype=dtype, device=device)


def _race(host: Host, conversation: Conversation | None, *fields: Any) -> Iterator[tuple[Any, ...]]:
    """Shows the race, and then the tree of its best forward pass, or an error."""
    conversation = conversation or Conversation()
    if conversation.busy.locked():  # by an example's race
        return
    with conversation.busy:
        try:
            yield from _answer(host, conversation, *fields)
            return
        except DatastoreError:  # its message names a path of this machine
            logger.exception("the datastore cannot be read")
            why = "The datastore cannot be read."
        except (RuntimeError, ValueError) as error:  # torch's are RuntimeErrors
            why = str(error)
        stop = gr.Button(interactive=False)
        yield _shown(conversation, chat=conversation_html(conversation, why), stop=stop)


def _answer(
    host: Host,
    conversation: Conversation,
    document: str,
    message: str,
    new_tokens: float,
) -> Iterator[tuple[Any, ...]]:
    race = conversation.ask(host, message, int(new_tokens), document)
    yield _shown(
        conversation,
        document=gr.Textbox(interactive=False),
        message="",
        stop=gr.Button(interactive=True),
        looking=gr.Column(visible=False),
    )
    drawn = perf_counter()
    for _ in race.run():
        if race.stopped or conversation.left:  # the last picture says so
            continue
        if perf_counter() - drawn > _SECONDS_BETWEEN_PICTURES:
            yield _shown(conversation)
            drawn = perf_counter()
    if conversation.left:
        return
    best = 1 + max(range(len(race.passes)), key=lambda i: len(race.passes[i].tokens), default=0)
    yield _shown(
        conversation,
        message=following(message),
        stop=gr.Button(interactive=False),
        looking=gr.Column(visible=bool(race.passes)),
        number=gr.Slider(maximum=max(2, len(race.passes)), value=best),
        tree=_look(host, conversation, best),
    )


def _shown(conversation: Conversation, **changes: Any) -> tuple[Any, ...]:
    """The state, the chat and whatever else changes."""
    changes.setdefault("chat", conversation_html(conversation))
    return conversation, *(changes.get(name, gr.skip()) for name in _SHOWN)


def _look(host: Host, conversation: Conversation | None, number: int) -> str:
    """The tree of a forward pass of the last answer."""
    race = conversation.turns[-1][1] if conversation and conversation.turns else None
    if race is None or not 1 <= number <= len(race.passes):
        return ""
    return pass_html(int(number), race.passes, race.sources, host.tokenizer)


def _stop(conversation: Conversation | None) -> None:
    if conversation is not None:
        conversation.stop()


def _start_over(conversation: Conversation | None, example: Scene | None = None) -> tuple[Any, ...]:
    """A new conversation, with an example's texts if there is one.

    An example's document goes with it; a visitor's own stays."""
    document = gr.Textbox(interactive=True)
    message = ""
    if conversation is not None:
        conversation.leave()
        if any(conversation.document == example.document for example in EXAMPLES):
            document = gr.Textbox("", interactive=True)
    if example is not None:
        document = gr.Textbox(example.document, interactive=True)
        message = example.questions[0]
    hidden = gr.Column(visible=False)
    stop = gr.Button(interactive=False)
    return _shown(Conversation(), document=document, message=message, stop=stop, looking=hidden)
