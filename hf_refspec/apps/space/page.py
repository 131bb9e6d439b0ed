"""The page: its parts, and what happens when they are used."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from html import escape
from pathlib import Path
from time import perf_counter
from typing import Any

import gradio as gr
import torch

from ...smollm2 import HUB_ID
from .conversation import Conversation, Host
from .presets import PRESETS, Preset, following
from .race_view import conversation_html
from .style import css
from .tree_view import step_html

_SECONDS_BETWEEN_PICTURES = 0.15
_SHOWN = ("chat", "document", "message", "looking", "number", "tree")
_INTRO = """\
<div class="rs"><h1>hf_refspec</h1>
<p>Drafts are looked up, in the text so far and in the model's own earlier logits, and {model}
verifies a whole tree of them in one forward pass. {promise} Coloured words were drafted.</p>
<p class="quiet">How the race is measured: two real calls of <code>generate()</code>, greedy, in
{dtype}, on {device}, take turns; each has a clock that runs only while it computes, and the call
whose clock is behind goes next.</p></div>"""


def page(host: Host) -> gr.Blocks:
    """The page on which a host answers."""
    with gr.Blocks(title="hf_refspec", analytics_enabled=False) as blocks:
        gr.HTML(_intro(host))
        state = gr.State(None, time_to_live=3600)
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                with gr.Row(elem_id="rs-presets"):
                    presets = [gr.Button(p.label, size="sm", min_width=60) for p in PRESETS]
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
            with gr.Column(scale=5, min_width=300):
                chat = gr.HTML(conversation_html(Conversation()), elem_id="rs-chat")
                message = gr.Textbox(label="Message", lines=1, max_lines=6, elem_id="rs-message")
                with gr.Row():
                    send = gr.Button("Send", variant="primary", elem_id="rs-send", min_width=80)
                    stop = gr.Button("Stop", elem_id="rs-stop", min_width=80)
                    new = gr.Button("New chat", elem_id="rs-new", min_width=80)
        with gr.Column(visible=False, elem_id="rs-steps") as looking:
            number = gr.Slider(
                1, 2, 1, step=1, label="Look into a forward pass", elem_id="rs-number", buttons=[]
            )
            tree = gr.HTML(elem_id="rs-tree")

        private: dict[str, Any] = {"api_visibility": "private"}
        shown = [chat, document, message, looking, number, tree]
        gr.on(
            [send.click, message.submit],
            partial(_race, host),
            [state, document, message, new_tokens],
            [state, *shown],
            concurrency_limit=1,  # two races at once would slow each other down
            show_progress="full",  # which tells a visitor that another one is served first
            show_progress_on=chat,
            trigger_mode="once",
            **private,
        )
        stop.click(_stop, state, None, queue=False, **private)
        looked = partial(_look, host)
        number.change(looked, [state, number], tree, show_progress="hidden", **private)
        for button, preset in [(new, None), *zip(presets, PRESETS, strict=True)]:
            button.click(partial(_begin_anew, preset), state, [state, *shown], **private)
    return blocks


def start(blocks: gr.Blocks, **options: Any) -> str:
    """Serves a page until it is closed, without waiting for that; returns its address. `options` go
    to `gradio.Blocks.launch`."""
    fonts: dict[str, Any] = {
        "font": ["system-ui", "sans-serif"],
        "font_mono": ["ui-monospace", "monospace"],
    }
    _, address, _ = blocks.launch(
        theme=gr.themes.Default(primary_hue="blue", **fonts),
        css=css(),
        footer_links=[],
        ssr_mode=False,
        quiet=True,
        prevent_thread_lock=True,
        **options,
    )
    return address


def _intro(host: Host) -> str:
    model = host.model
    dtype = str(model.dtype).removeprefix("torch.")
    promise = "The words are those of plain decoding."
    if model.dtype != torch.float32:
        promise += f" Where two are within the rounding of {dtype}, either of them may come out."
    return _INTRO.format(
        model=escape(Path(model.config.name_or_path).name or HUB_ID),
        promise=promise,
        dtype=dtype,
        device="the CPU" if model.device.type == "cpu" else "a GPU",
    )


def _race(host: Host, conversation: Conversation | None, *fields: Any) -> Iterator[tuple[Any, ...]]:
    """Shows the race, and at its end the tree of its best step; or what went wrong."""
    conversation = conversation or Conversation()
    with conversation.busy:
        try:
            yield from _answer(host, conversation, *fields)
        except (RuntimeError, ValueError) as error:  # torch's are RuntimeErrors
            yield _shown(conversation, chat=conversation_html(conversation, str(error)))


def _answer(
    host: Host,
    conversation: Conversation,
    document: str,
    message: str,
    new_tokens: float,
) -> Iterator[tuple[Any, ...]]:
    if not conversation.turns:
        conversation.document = document
    race = conversation.ask(host, message, int(new_tokens))
    fixed = gr.Textbox(interactive=False)
    yield _shown(conversation, document=fixed, message="", looking=gr.Column(visible=False))
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
        looking=gr.Column(visible=bool(race.steps)),
        number=gr.Slider(maximum=max(2, len(race.steps)), value=best),
        tree=_look(host, conversation, best),
    )


def _shown(conversation: Conversation, **changes: Any) -> tuple[Any, ...]:
    """The state, the chat and whatever else changes."""
    changes.setdefault("chat", conversation_html(conversation))
    return conversation, *(changes.get(name, gr.skip()) for name in _SHOWN)


def _look(host: Host, conversation: Conversation | None, number: int) -> str:
    """The tree of a forward pass of the last answer."""
    race = conversation.turns[-1][1] if conversation and conversation.turns else None
    if race is None or not 1 <= number <= len(race.steps):
        return ""
    return step_html(int(number), race.steps, race.sources, host.tokenizer)


def _stop(conversation: Conversation | None) -> None:
    if conversation is not None:
        conversation.stop()


def _begin_anew(preset: Preset | None, conversation: Conversation | None) -> tuple[Any, ...]:
    """A new conversation; a preset fills in its texts."""
    if conversation is not None:
        conversation.leave()
    document, message = gr.Textbox(interactive=True), ""
    if preset is not None:
        document, message = gr.Textbox(preset.document, interactive=True), preset.messages[0]
    hidden = gr.Column(visible=False)
    return _shown(Conversation(), document=document, message=message, looking=hidden)
