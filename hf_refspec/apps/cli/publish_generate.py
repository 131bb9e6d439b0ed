"""`hf-refspec publish-generate`: the Hub repository for `generate(custom_generate="user/name")`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ...store.hub_repo import push_files
from ..publish.generate_repository import repository, save


def add_publish_generate(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_publish_generate)
    add = parser.add_argument
    add("repo", help='the name of the repository on the Hub, "user/name"')
    add("--private", action="store_true", default=None, help="make a new repository private")
    add("--out", type=Path, metavar="FOLDER", help="write it into a new folder; nothing is pushed")


def _publish_generate(args: Namespace) -> int:
    """Prints where the repository is, and the call that uses it."""
    if args.out is None:
        print(push_files(args.repo, "model", repository(args.repo), args.private).repo_url)
        name = args.repo
    else:
        save(args.repo, args.out)
        name = str(args.out)
    print(f"model.generate(**inputs, custom_generate={name!r}, trust_remote_code=True)")
    return 0
