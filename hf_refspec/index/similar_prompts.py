"""The documents whose prompts have most tokens in common with a prompt.

For sessions as references (LLMA, arXiv 2304.04487, section 2.3). The set of tokens finds the same
sessions as the mean of the model's input embeddings or a sentence encoder, and needs neither, nor
any memory but the documents.
"""

from __future__ import annotations

import numpy as np

from ..kernels.kernel import kernel


@kernel("int64[::1](int32[::1], int32[::1], int32[::1], int64, int64[::1], int64, int64)")
def similar_prompts(tokens, ends, prompt_lengths, skipped, prompt, count, vocab_size):
    """Finds up to `count` documents with the prompts most similar to `prompt` (m,), the best last.

    The similarity is the cosine of the sets of tokens; of equal documents the newer is later.
    `tokens` (n,) are the documents, below `vocab_size`, each followed by a boundary at one of
    `ends` (d,). The first `prompt_lengths` (d,) tokens of each are its prompt. The first `skipped`
    documents are left out."""
    asked = np.zeros(vocab_size, dtype=np.bool_)
    for token in prompt:
        if token < vocab_size:
            asked[token] = True
    seen = np.full(vocab_size, -1, dtype=np.int32)  # the last document with each token
    best, scores = np.full(count, -1), np.full(count, -1.0)  # the best one last
    begin = ends[skipped - 1] + 1 if skipped else 0
    for i in range(skipped, len(ends)):
        common = distinct = 0
        # Without branches, which natural text makes unpredictable.
        for token in tokens[begin : begin + prompt_lengths[i]]:
            is_new = seen[token] != i
            seen[token] = i
            distinct += is_new
            common += is_new & asked[token]
        begin = ends[i] + 1
        score = common / np.sqrt(max(distinct, 1))
        # It moves past all that are not better; the worst is dropped.
        place = -1
        while place + 1 < len(best) and scores[place + 1] <= score:
            place += 1
            if place > 0:
                best[place - 1], scores[place - 1] = best[place], scores[place]
        if place >= 0:
            best[place], scores[place] = i, score
    return best[best >= 0]
