"""What a model expects next at every position of a corpus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..store.build.windows import Window, windows
from ..text_config import context_length, text_config
from .top_tokens import top_tokens

_LONGEST = 1024
# So many logits at once: a bound on the memory, whatever the vocabulary.
_LOGITS = 1 << 26


@torch.no_grad()
def read_next_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[str | np.ndarray],
    top_k: int,
    max_tokens: int | None,
    progress: bool,
) -> Iterator[tuple[Window, np.ndarray, np.ndarray]]:
    """Runs a model over documents, window by window.

    Args:
        model (`PreTrainedModel`): A decoder.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        documents (iterable of `str` or `np.ndarray`): Texts, or ids.
        top_k (`int`): How many next tokens.
        max_tokens (`int`, *optional*): How many tokens to read, about.
        progress (`bool`): Whether to show a progress bar.

    Yields:
        A window, and the best next tokens after each token of it with their probabilities, int32
        and float32 of shape `(len(window.ids), top_k)`.
    """
    most = min(context_length(model) or _LONGEST, _LONGEST)
    length = max(min(most, _LOGITS // text_config(model).vocab_size), 2)
    read = 0
    with tqdm(
        total=max_tokens, unit=" tokens", unit_scale=True, disable=not progress or None
    ) as bar:
        for window in windows(_ids(tokenizer, documents), length):
            logits = model(torch.from_numpy(window.ids)[None].to(model.device), use_cache=False)
            top = top_tokens(logits.logits, top_k)
            yield window, top.tokens[0], top.probs[0]
            new = len(window.targets)
            read += new
            bar.update(new)
            if max_tokens is not None and read >= max_tokens:
                break


def _ids(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[str | np.ndarray]
) -> Iterator[np.ndarray]:
    for document in documents:
        if isinstance(document, str):
            document = tokenizer(document, verbose=False)["input_ids"]
        yield np.asarray(document, dtype=np.int64)
