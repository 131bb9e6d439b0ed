"""Texts of iterative RaLM, and its definition."""

import numpy as np
import torch

from hf_refspec.ralm.iterative import iterative_ralm

BOS = 1
PROMPT = torch.tensor([[BOS, 5, 9, 12, 7, 5, 9, 33, 12, 7]])
GREEDY = {"do_sample": False, "eos_token_id": None}


def generate(model, retriever, prompt=PROMPT, **options):
    options = {"query_length": 8, **options}
    return model.generate(prompt, custom_generate=iterative_ralm, retriever=retriever, **options)


@torch.no_grad()
def by_definition(model, retriever, prompt, new_tokens, stride=4, query_length=8) -> list[int]:
    """Iterative RaLM without a cache of any kind."""
    ids = prompt[0].tolist()
    end = len(ids) + new_tokens
    while len(ids) < end:
        (found,) = retriever.search([retriever.encode(np.array(ids[-query_length:]))], 1)
        passage = retriever.passage(found.ids[0]).tolist()
        for _ in range(min(stride, end - len(ids))):
            context = [BOS, *passage, *ids[1:]] if ids[0] == BOS else passage + ids
            logits = model(input_ids=torch.tensor([context]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids
