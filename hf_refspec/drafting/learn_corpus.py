"""Builds a recycling table: runs a model over a corpus and learns what it expects next."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..check_count import check_count
from ..index.next_tokens import NextTokens
from ..store.build.source import Source, open_source
from ..store.build.windows import windows
from ..store.stored_tokenizer import vocabulary_size
from ..text_config import context_length, text_config
from .top_tokens import top_tokens

_LONGEST = 1024
# So many logits at once: a bound on the memory, whatever the vocabulary.
_LOGITS = 1 << 26


@torch.no_grad()
def learn_corpus(
    table: NextTokens,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Any,
    max_tokens: int | None,
    column: str | None,
    pattern: str,
    progress: bool,
) -> Source:
    """Enters what a model expects after each token of some documents, see
    [`~drafting.token_recycling.TokenRecycling.build`]; returns where they are from."""
    if max_tokens is not None:
        check_count("max_tokens", max_tokens)
    source = open_source(documents, tokenizer, vocabulary_size(tokenizer), column, pattern)
    vocab_size = text_config(model).vocab_size
    most = min(context_length(model) or _LONGEST, _LONGEST)
    length, read = max(min(most, _LOGITS // vocab_size), 2), 0
    shown = tqdm(total=max_tokens, unit=" tokens", unit_scale=True, disable=not progress or None)
    with shown as bar:
        texts = (
            tokenizer(each, verbose=False)["input_ids"] if isinstance(each, str) else each
            for each in source.documents
        )
        for window in windows((np.asarray(ids, dtype=np.int64) for ids in texts), length):
            ids = torch.from_numpy(window.ids)[None].to(model.device)
            top = top_tokens(model(ids, use_cache=False).logits, table.top_k)
            tokens, probs = (each[0, window.known - 1 :] for each in (top.tokens, top.probs))
            table.learn_text(window.ids, window.known, tokens, probs)
            table.count(tokens[:, 0].astype(np.int64))
            read += len(window.targets)
            bar.update(len(window.targets))
            if max_tokens is not None and read >= max_tokens:
                break
    if len(table) == 0:
        raise ValueError("documents has no text of two tokens or more: nothing is learned")
    return source
