"""`hf-refspec space`: the page in the browser, here or as a Space on the Hub."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ...extras import require
from ..publish.package import PACKAGE, package
from ..shared.listening import listen, port
from .arguments import add_model


def add_space(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_space)
    add = parser.add_argument
    add_model(parser)
    add("--datastore", metavar="STORE", help="a folder or a Hub id; drafts are looked up in it")
    add("--host", default="127.0.0.1", help="the address to serve at")
    add("--port", type=port, default=7860, metavar="N")
    add("--push", metavar="USER/NAME", help="write the page as a Space on the Hub instead")
    add("--private", action="store_true", help="with --push: a new Space is private")
    add("--package", metavar="PACKAGE", help=f"with --push: {PACKAGE}")


def _space(args: Namespace) -> int:
    require("gradio", "hf-refspec space", "space")
    given = {name: getattr(args, name) for name in ("model", "dtype", "datastore")}
    if args.push is not None:
        from ..publish.space_repository import files, push

        contents = files(args.push, **given, package=package(args.package))
        print(push(args.push, contents, args.private))
        return 0
    for option in ("private", "package"):
        if getattr(args, option):
            raise ValueError(f"--{option} has no effect without --push; add it")
    listen(args.host, args.port).close()  # before a model is loaded
    from ..space.app import serve
    from .answering import quieten_transformers

    quieten_transformers()
    serve(**given, device_map=args.device_map, server_name=args.host, server_port=args.port)
    return 0
