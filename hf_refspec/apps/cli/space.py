"""`hf-refspec space`: the page in the browser, here or as a Space on the Hub."""

from __future__ import annotations

import importlib.util
import socket
from argparse import ArgumentParser, Namespace

from .arguments import DTYPES, positive


def add_space(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_space)
    add = parser.add_argument
    add("--model", help="a folder or a Hub id; SmolLM2-135M-Instruct by default")
    add("--dtype", choices=DTYPES, help="of the model; float32 by default for the default model")
    add("--datastore", metavar="STORE", help="a folder or a Hub id; drafts are looked up in it")
    add("--host", default="127.0.0.1", help="the address to serve at")
    add("--port", type=positive, default=7860, metavar="N")
    add("--push", metavar="USER/NAME", help="write the page as a Space on the Hub instead")
    add("--private", action="store_true", help="with --push: a new Space is private")


def _space(args: Namespace) -> int:
    if importlib.util.find_spec("gradio") is None:
        raise ImportError('the page needs gradio: pip install "hf_refspec[space]"')
    given = {name: getattr(args, name) for name in ("model", "dtype", "datastore")}
    if args.push is not None:
        from ..publish.space_repository import files, push

        print(push(args.push, files(args.push, **given), args.private))
        return 0
    if args.private:
        raise ValueError("--private has no effect without --push; add it")
    _check_address(args.host, args.port)
    from ..space.app import serve
    from .answering import quieten_transformers

    quieten_transformers()
    serve(**given, server_name=args.host, server_port=args.port)
    return 0


def _check_address(host: str, port: int) -> None:
    """Refuses an address that cannot be had, before a model is loaded."""
    try:
        with socket.create_server((host, port)):
            pass
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise OSError(
            f"cannot serve at {host}:{port} ({reason}); choose another --port, or another --host"
        ) from error
