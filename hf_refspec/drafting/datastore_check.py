"""Whether the datastores of a call were made with the model's tokenizer."""

from __future__ import annotations

import logging
from typing import Any

from transformers import PreTrainedModel

from .drafter import Drafter

logger = logging.getLogger("hf_refspec")


def check_datastores(
    generator: Any, model: PreTrainedModel, tokenizer: Any, memo: dict[Any, Any]
) -> None:
    """Warns, once for each, of datastores in a `candidate_generator` that were made with another
    tokenizer than the call's; if the call has none, than the one that is stored with the model on
    this machine, unless that has the same name. The model's `memo` keeps what was compared. No
    datastore is refused: the text is the same, and the user may have extended the tokenizer."""
    sources = generator.sources if isinstance(generator, Drafter) else [generator]
    stores = [getattr(source, "store", source) for source in sources]
    if all(store is None or isinstance(store, (Drafter, str)) for store in stores):
        return
    from ..store.datastore import Datastore  # loaded only where a store is given
    from ..store.files import DatastoreError
    from ..store.names import local_tokenizer
    from ..store.stored_tokenizer import public_name

    known = tokenizer if getattr(tokenizer, "is_fast", False) else None
    for store in stores:
        if not isinstance(store, Datastore):
            continue
        key = ("datastore", store.config.fingerprint, known is None)
        if key in memo:
            continue
        memo[key] = True
        compared = known
        if known is None and store.config.tokenizer != public_name(model):
            compared = local_tokenizer(getattr(model, "name_or_path", ""))
        try:
            if compared is not None:
                store.check_tokenizer(compared)
        except DatastoreError as error:
            logger.warning("hardly any draft of this datastore will be accepted: %s", error)
