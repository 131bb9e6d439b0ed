"""A small datastore that every machine has the text for: part of Python's standard library."""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import constants
from transformers import PreTrainedTokenizerBase

from ...store.build.presets import PRESETS, python_stdlib
from ...store.datastore import Datastore
from ...store.fingerprint import tokenizer_fingerprint
from ...version import __version__

logger = logging.getLogger("hf_refspec")

_TOKENS = 500_000
_NGRAMS = 2_000  # of each length


def python_datastores(tokenizer: PreTrainedTokenizerBase) -> list[Datastore]:
    """Opens both of its forms, which are built once for each tokenizer (seconds) and kept in
    HF_HOME; empty, with a warning, where they cannot be."""
    about = PRESETS["python-stdlib"]
    try:
        name = f"python-stdlib-{__version__}-{tokenizer_fingerprint(tokenizer)}"
        folder = Path(constants.HF_HOME, "hf_refspec", name)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            logger.info("Building a datastore of the %s, once (seconds) ...", about.corpus)
            Datastore.build(
                python_stdlib(),
                tokenizer,
                folder,
                max_tokens=_TOKENS,
                corpus=about.corpus,
                license=about.license,
                progress=False,
            )
        full = Datastore(folder, form="full")
        if full.config.ngrams is None:
            full.compact(ngrams_per_order=_NGRAMS, progress=False)
        return [full, Datastore(folder, form="compact")]
    except (OSError, ValueError) as error:
        logger.warning("There are no drafts by REST and CREST on the page: %s", error)
        return []
