"""Repos on the Hugging Face Hub: files committed, and the cards of stored folders."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields
from importlib.resources import files
from string import Template
from typing import Any, Literal, TypeAlias

from huggingface_hub import CommitInfo, DatasetCardData, HfApi
from huggingface_hub.errors import HfHubHTTPError
from tqdm import tqdm

from ..corpus.untrusted import one_line, printable
from ..version import __version__
from .folder_config import FolderConfig

RepoType: TypeAlias = Literal["dataset", "model", "space"]

LIBRARY: dict[str, Any] = {"library_name": "hf_refspec", "library_version": __version__}
CARD = "README.md"
TAGS = ["hf-refspec", "speculative-decoding"]
# Common licences that the Hub knows. It refuses a card with an unknown one: the card of any other
# says "other" and the name.
_HUB_LICENCE = re.compile(
    r"apache-2\.0|mit|isc|bsd(-[23]-clause)?|mpl-2\.0|unlicense|a?gpl-3\.0|gpl-2\.0|lgpl-(2\.1|3\.0)"
    r"|cc0-1\.0|cc-by(-sa)?-3\.0|cc-by(-nc)?(-sa|-nd)?-4\.0|odc-by|odbl|other"
)


def commit(
    what: str,
    repo_id: str,
    repo_type: RepoType,
    operations: Callable[[str, list[str]], list[Any]],
    token: str | bool | None = None,
    private: bool | None = None,
    commit_message: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """Makes one commit to a repo, which is created (and the branch) if it is missing."""
    api = HfApi(token=token, **LIBRARY)
    try:
        sdk = "gradio" if repo_type == "space" else None
        repo_id = api.create_repo(
            repo_id, private=private, exist_ok=True, space_sdk=sdk, repo_type=repo_type
        ).repo_id
        if revision and not create_pr and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True, repo_type=repo_type)
        repo = api.repo_info(repo_id, revision=revision, repo_type=repo_type)
        if private is not None and repo.private != private:
            # create_repo leaves an existing repo as it is: private files would become public.
            raise ValueError(
                f"the repo is {'private' if repo.private else 'public'} already; change that in "
                f"its settings, or leave private={private} out"
            )
        present = [file.rfilename for file in getattr(repo, "siblings", None) or ()]
        return api.create_commit(
            repo_id,
            operations(repo_id, present),
            commit_message=commit_message or f"Written by hf_refspec {__version__}",
            revision=revision,
            create_pr=create_pr,
            parent_commit=repo.sha,  # refused if somebody has pushed meanwhile
            repo_type=repo_type,
        )
    except Exception as error:  # of several libraries
        hint = "a push is one commit, so the repo is unchanged: push again"
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            hint = "the Hub does not let you write there: use another token, or run `hf auth login`"
        place = f"{repo_id!r} at revision {revision or 'main'!r}"
        raise OSError(f"{what} was not pushed to {place} ({one_line(error)}); {hint}") from error


def card(config: FolderConfig, repo_id: str) -> str:
    """The card of a stored folder in the repo `repo_id`: Markdown below a block of metadata."""
    source = getattr(config, "source", {})
    licence = source.get("license")
    title = repo_id.split("/")[-1]
    metadata: dict[str, Any] = {"pretty_name": title}
    if licence:
        identifier = re.sub(r"[^a-z0-9.]+", "-", str(licence).lower()).strip("-")
        if _HUB_LICENCE.fullmatch(identifier):
            metadata["license"] = identifier
        else:
            metadata.update(license="other", license_name=identifier)
    metadata |= {"library_name": "hf_refspec", "task_categories": ["text-generation"]}
    if "/" in (model := getattr(config, "model", "")):
        metadata["base_model"] = model
    about = {field.name: getattr(config, field.name) for field in fields(config)}
    texts: dict[str, str] = defaultdict(lambda: "not stated")
    texts.update({name: cell(value) for name, value in (source | about).items() if value})
    texts.update(
        config.card_texts(),
        # The Hub's viewer would show config.json as rows of data.
        metadata=DatasetCardData(**metadata, tags=TAGS, viewer=False).to_yaml(),
        title=title,
        repo=json.dumps(repo_id),
        files="\n".join(f"| `{f.name}` | {readable_size(f.size)} |" for f in config.files()),
        licence_note="" if licence else " Which one it is has not been stated: find out first.",
    )
    template = files(__package__) / f"{config.NOUN.lower().replace(' ', '_')}.md"
    return Template(template.read_text(encoding="utf-8")).substitute(texts)


def cell(value: Any) -> str:
    """A value as text that cannot break out of the cell of a table."""
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return printable(" ".join(text.split())).replace("|", "\\|")


def readable_size(size: float) -> str:
    """A number of bytes with its unit."""
    return tqdm.format_sizeof(size, "B")
