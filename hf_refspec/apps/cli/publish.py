"""`hf-refspec publish`: the Hub repository for `generate(custom_generate="user/name")`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ...store.hub import push_files
from ..publish.generate_repository import repository, save
from ..publish.package import PACKAGE, package


def add_publish(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_publish)
    add = parser.add_argument
    add("repo", help='the name of the repository on the Hub, "user/name"')
    add("--private", action="store_true", default=None, help="make a new repository private")
    add("--out", type=Path, metavar="FOLDER", help="write it into a new folder; nothing is pushed")
    add("--package", metavar="PACKAGE", help=PACKAGE)


def _publish(args: Namespace) -> int:
    """Prints where the repository is, and the call that uses it."""
    contents = repository(args.repo, package(args.package))
    if args.out is None:
        print(push_files(args.repo, "model", contents, args.private).repo_url)
        name = args.repo
    else:
        save(contents, args.out)
        name = str(args.out)
    print(f"model.generate(**inputs, custom_generate={name!r}, trust_remote_code=True)")
    return 0
