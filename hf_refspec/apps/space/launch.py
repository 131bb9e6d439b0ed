"""Loads a model, and serves the page with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from ...drafting.datastore_drafts import DatastoreDrafts
from ...kernels.compilation import drafting_kernels
from ...store.datastore import Datastore
from ...text_config import text_config
from ..shared.body_limit import BodyLimit
from ..shared.loading import load_config, load_model, load_tokenizer, name_for_people
from ..shared.prompts import check_chat_template
from .conversation import Conversation, Host
from .page import page

_LARGEST_BODY = 1 << 20  # bytes
_WARMUP = "Repeat: one two three one two three one two three"


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
        DatastoreDrafts(store).check(text_config(load_config(model)).vocab_size)
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
