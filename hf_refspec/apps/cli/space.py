"""`hf-refspec space`: the page that compares plain with drafted decoding, here or on the Hub."""

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

from huggingface_hub.utils import validate_repo_id

from ...messages import require
from ..publish.repositories import PACKAGE_HELP, package, space_repository
from .arguments import WRITTEN_TO, add_listening, add_model, listen
from .publish import write_or_push


def add_space(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser)
    add("--datastore", metavar="STORE", help="a folder or a Hub id; drafts are looked up in it")
    add_listening(parser, 7860)
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--push", metavar="USER/NAME", help="push the page to the Hub as a Space")
    place.add_argument("--out", type=Path, metavar="FOLDER", help=WRITTEN_TO)
    add("--private", action="store_true", help="with --push: a new Space is private")
    add("--package", metavar="PACKAGE", help=f"with --push or --out: {PACKAGE_HELP}")


def space(args: Namespace) -> None:
    require("gradio", "hf-refspec space", "space")
    options = {name: getattr(args, name) for name in ("model", "dtype", "datastore")}
    if args.push is not None or args.out is not None:
        if args.push is not None:
            validate_repo_id(args.push)
        with package(args.package) as installing:
            contents = partial(space_repository, **options, package=installing)
            write_or_push(args, args.push or args.out.name, "space", contents)
        if args.out is not None:
            print(f"try it: python {args.out / 'app.py'}")
        return
    listen(args.host, args.port).close()  # before a model is loaded
    from ..space.page import serve

    serve(**options, device_map=args.device_map, server_name=args.host, server_port=args.port)
