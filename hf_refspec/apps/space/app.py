"""Loads a model, and serves the page with it."""

from __future__ import annotations

from typing import Any

from ...drafting.compilation import drafting_kernels
from ...store.datastore import Datastore
from ..shared.loading import load_model, load_tokenizer, name_for_people
from ..shared.prompts import check_chat_template
from .conversation import Conversation, Host
from .page import page, start
from .python_datastore import python_datastores

_WARMUP = "Repeat: one two three one two three one two three"


def serve(
    model: str | None = None,
    dtype: str | None = None,
    datastore: str | None = None,
    device_map: str | None = None,
    **options: Any,
) -> None:
    """Serves the page until Ctrl-C, and prints its address. The model and the datastore are folders
    or Hub ids; `options` go to `gradio.Blocks.launch`. On the Hub the environment says where to
    serve."""
    blocks = page(load_host(model, dtype, datastore, device_map))
    print(f"{start(blocks, **options)} (Ctrl-C ends it)", flush=True)
    blocks.block_thread()


def load_host(
    model: str | None = None,
    dtype: str | None = None,
    datastore: str | None = None,
    device_map: str | None = None,
) -> Host:
    """Loads what answers, and decodes a few tokens with it: kernels are loaded, the model is probed
    and timed."""
    tokenizer = load_tokenizer(model)
    check_chat_template(tokenizer, model, "choose a model with one")
    store = None if datastore is None else Datastore.from_pretrained(datastore)
    if store is not None:
        store.check_tokenizer(tokenizer)  # before a model is loaded
    choices = python_datastores(tokenizer) if store is None else [store]
    loaded = load_model(model, device_map, dtype)
    drafting_kernels.compile()
    host = Host(loaded, tokenizer, store, choices, name_for_people(model))
    for _ in Conversation().ask(host, _WARMUP, max_new_tokens=12).run():
        pass
    return host
