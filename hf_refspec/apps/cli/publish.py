"""`hf-refspec publish`: the repository for `generate(custom_generate="user/name")`."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

from huggingface_hub import CommitOperationAdd
from huggingface_hub.utils import validate_repo_id

from ...store.files import new_folder
from ...store.hub import RepoType, commit
from ..publish.repositories import PACKAGE_HELP, generate_repository, package
from .arguments import WRITTEN_TO


def add_publish(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("repo", help='the name of the repository on the Hub, "user/name"')
    add("--private", action="store_true", help="make a new repository private")
    add("--out", type=Path, metavar="FOLDER", help=WRITTEN_TO)
    add("--package", metavar="PACKAGE", help=PACKAGE_HELP)


def publish(args: Namespace) -> None:
    validate_repo_id(args.repo)
    with package(args.package) as installing:
        contents = partial(generate_repository, package=installing)
        name = write_or_push(args, args.repo, "model", contents)
    print(f"model.generate(**inputs, custom_generate={name!r}, trust_remote_code=True)")


def write_or_push(
    args: Namespace, name: str, kind: RepoType, contents: Callable[[str], dict[str, bytes]]
) -> str:
    """Writes a repository's files into the folder --out, or pushes them; returns where they are."""
    named = name if "/" in name else f"USER/{name}"  # until the Hub names the owner
    written = contents(named)  # refuses what cannot be published before a push
    if args.out is None:

        def operations(repo_id: str, _present: list[str]) -> list[CommitOperationAdd]:
            files = contents(repo_id).items()
            return [CommitOperationAdd(path, content) for path, content in files]

        private = args.private or None
        pushed = commit(f"the {kind}", name, kind, operations, private=private).repo_url
        print(pushed)
        return pushed.repo_id
    with new_folder(args.out) as new:
        for path, content in written.items():
            (new / path).parent.mkdir(exist_ok=True)
            (new / path).write_bytes(content)
    print(f"{args.out}: {', '.join(sorted(written))}")
    print(f"push it: hf upload {named} {args.out} --repo-type {kind}")
    return str(args.out)
