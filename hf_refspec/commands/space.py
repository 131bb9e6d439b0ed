"""`hf-refspec space`: the page in the browser, here or as a Space on the Hub."""

from __future__ import annotations

import socket
from argparse import ArgumentParser, Namespace

import torch

from ..demo.default_model import load_model, load_tokenizer
from ..demo.prompts import check_chat_template
from .answering import quieten_transformers
from .arguments import DTYPES, positive


def add_space(parser: ArgumentParser) -> None:
    """Adds the arguments of `hf-refspec space`."""
    parser.set_defaults(run=_space)
    add = parser.add_argument
    add("--model", help="a folder or a Hub id; SmolLM2-135M-Instruct by default")
    add("--dtype", choices=DTYPES, help="of the model; float32 by default for the default model")
    add("--datastore", metavar="STORE", help="a folder or a Hub id; drafts are looked up in it")
    add("--host", default="127.0.0.1", help="the address to serve at")
    add("--port", type=positive, default=7860)
    add("--push", metavar="USER/NAME", help="write the page as a Space on the Hub instead")
    add("--private", action="store_true", help="the Space, if it is new")


def _space(args: Namespace) -> int:
    try:
        import gradio  # noqa: F401
    except ImportError:
        raise ImportError('the page needs gradio: pip install "hf_refspec[space]"') from None
    return _push(args) if args.push else _serve(args)


def _serve(args: Namespace) -> int:
    from ..space.conversation import Host
    from ..space.page import launch
    _check_port(args.host, args.port)
    quieten_transformers()
    tokenizer = load_tokenizer(args.model)
    check_chat_template(tokenizer, args.model, "choose a --model with one")
    model = load_model(args.model, dtype=getattr(torch, args.dtype) if args.dtype else None)
    host = Host(model, tokenizer, args.datastore)
    launch(host, server_name=args.host, server_port=args.port)
    return 0

def _check_port(host, port):
    pass
