"""Datastores that visitors of the page name: public ones on the Hub, nothing else of the host's."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi

from ...store.datastore import Datastore

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SECONDS = 10.0  # for the Hub to answer


def open_public(repo_id: str) -> Datastore:
    """Opens a dataset repo, "organisation/name", that anybody may read. The page shows drafts, and
    so what is in a datastore: visitors may not see the host's folders, nor what its token may read.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no Hub id, or damaged.
    """
    if _HUB_ID.fullmatch(repo_id) is None or Path(repo_id).exists():
        raise ValueError(
            f"{repo_id!r} does not name a datastore on the Hub; write organisation/name, or leave "
            "the field empty"
        )
    try:
        info = HfApi(token=False).dataset_info(repo_id, timeout=_SECONDS)
    except Exception as error:  # of several libraries
        reason = str(error).strip().partition("\n")[0]
        raise OSError(
            f"there is no public dataset repo {repo_id!r} on the Hub, or the Hub does not answer "
            f"({reason}); check the name"
        ) from error
    if info.private or info.gated:
        raise OSError(f"the dataset repo {repo_id!r} is not public; choose one that is")
    return Datastore.from_pretrained(repo_id, revision=info.sha, token=False)
