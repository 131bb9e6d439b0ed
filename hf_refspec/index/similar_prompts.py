"""The documents whose prompts have most tokens in common with a prompt.

For sessions as references (LLMA, arXiv 2304.04487, section 2.3). The set of tokens finds the same
sessions as the mean of the model's input embeddings or a sentence encoder, and needs neither, nor
any memory beside the documents.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .kernels import kernel
from .segments import Documents

_SHARED = "int32[::1], int32[::1], int64, int64, boolean[::1], int32[::1], int64[::1], float64[::1]"


def similar_prompts(
    parts: Iterable[Documents],
    prompt: np.ndarray,
    oldest: int,
    count: int,
    vocab_size: int,
) -> list[int]:
    """Finds the documents whose prompts' sets of tokens have the largest cosines with a prompt's.

    Args:
        parts: The documents, in the order of their numbers.
        prompt (`np.ndarray`, integers of shape `(n,)`): What they are compared with.
        oldest (`int`): Documents before this number are skipped.
        count (`int`): How many are found at most.
        vocab_size (`int`): All tokens of the documents are below it.

    Returns:
        `list[int]`: Their numbers, the most similar one last; of equal ones the newer is later.
    """
    asked = np.zeros(vocab_size, dtype=bool)
    asked[prompt[prompt < vocab_size]] = True
    seen = np.full(vocab_size, -1, dtype=np.int32)
    best, scores = np.full(count, -1), np.full(count, -1.0)
    for part in parts:
        skipped = max(oldest - part.first, 0)
        documents = part.tokens, part.ends, part.prompt_lengths, part.first
        search_prompts(*documents, skipped, asked, seen, best, scores)
    return best[best >= 0].tolist()


@kernel(*(f"void({dtype}[::1], {_SHARED})" for dtype in ("uint16", "uint32", "int32")))
def search_prompts(tokens, ends, prompt_lengths, first, skipped, asked, seen, best, scores):
    """Enters the documents with the most similar prompts among the best so far.

    Args:
        tokens, ends, prompt_lengths, first: `Documents`.
        skipped: How many of them are skipped.
        asked: By token, whether the prompt has it.
        seen: By token, the number of the last document that had it in its prompt, written.
        best: The numbers of the best documents, the best one last; -1 for none; written.
        scores: The similarity of each, its cosine times the same factor, written.
    """
    begin = ends[skipped - 1] + 1 if skipped else 0
    for i in range(skipped, len(ends)):
        common = distinct = 0
        # Without branches, which natural text makes unpredictable.
        for token in tokens[begin : begin + prompt_lengths[i]]:
            is_new = seen[token] != first + i
            seen[token] = first + i
            distinct += is_new
            common += is_new & asked[token]
        begin = ends[i] + 1
        score = common / np.sqrt(max(distinct, 1))
        # It moves past those that are no better; the worst is dropped.
        place = -1
        while place + 1 < len(best) and scores[place + 1] <= score:
            place += 1
            if place > 0:
                best[place - 1], scores[place - 1] = best[place], scores[place]
        if place >= 0:
            best[place], scores[place] = first + i, score
