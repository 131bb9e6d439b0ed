"""Texts for a kNN-LM, and a call of it."""

import torch

from hf_refspec.ralm.knn_lm import knn_lm

CORPUS = [
    "for i in range(10):\n    print(i)\nfor j in range(20):\n    print(j)\n",
    "def f(x):\n    return x + 1\n\ndef g(x):\n    return f(x) + 1\n",
]


def generate(model, inputs, store, **options):
    options = {"k": 8, "lambda_": 0.6, "temperature": 4.0, "max_new_tokens": 40, **options}
    torch.manual_seed(0)
    options = {"knn_datastore": store, **options}
    return model.generate(**inputs, custom_generate=knn_lm, **options)
