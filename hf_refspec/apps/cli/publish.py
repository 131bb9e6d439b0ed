"""`hf-refspec space`, the page here or on the Hub, and `publish`, the Hub's repository."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ...extras import require
from ...store.folder import new_folder
from ...store.hub import push_files
from ..publish.repositories import PACKAGE, generate_repository, package, space_repository
from .arguments import add_model, listen, port, quieten_transformers


def add_space(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser)
    add("--datastore", metavar="STORE", help="a folder or a Hub id; drafts are looked up in it")
    add("--host", default="127.0.0.1", help="the address to serve at")
    add("--port", type=port, default=7860, metavar="N")
    add("--push", metavar="USER/NAME", help="write the page as a Space on the Hub instead")
    add("--private", action="store_true", help="with --push: a new Space is private")
    add("--package", metavar="PACKAGE", help=f"with --push: {PACKAGE}")


def space(args: Namespace) -> int:
    require("gradio", "hf-refspec space", "space")
    given = {name: getattr(args, name) for name in ("model", "dtype", "datastore")}
    if args.push is not None:
        contents = space_repository(args.push, **given, package=package(args.package))
        print(push_files(args.push, "space", contents, args.private or None).repo_url.url)
        return 0
    for option in ("private", "package"):
        if getattr(args, option):
            raise ValueError(f"--{option} has no effect without --push; add it")
    listen(args.host, args.port).close()  # before a model is loaded
    from ..space.app import serve

    quieten_transformers()
    serve(**given, device_map=args.device_map, server_name=args.host, server_port=args.port)
    return 0


def add_publish(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("repo", help='the name of the repository on the Hub, "user/name"')
    add("--private", action="store_true", default=None, help="make a new repository private")
    add("--out", type=Path, metavar="FOLDER", help="write it into a new folder; nothing is pushed")
    add("--package", metavar="PACKAGE", help=PACKAGE)


def publish(args: Namespace) -> int:
    """Prints where the repository is, and the call that uses it."""
    contents = generate_repository(args.repo, package(args.package))
    if args.out is None:
        print(push_files(args.repo, "model", contents, args.private).repo_url)
        name = args.repo
    else:
        with new_folder(args.out) as new:
            for path, content in contents.items():
                (new / path).parent.mkdir(exist_ok=True)
                (new / path).write_bytes(content)
        name = str(args.out)
    print(f"model.generate(**inputs, custom_generate={name!r}, trust_remote_code=True)")
    return 0
