"""Folders as hf_refspec 0.1.0 wrote them, key by key, can still be opened."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_refspec.index.suffix_array import build_suffix_array
from hf_refspec.store.build.hidden_states import probe
from hf_refspec.store.compact import ARRAYS
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.fingerprint import tokenizer_fingerprint
from hf_refspec.store.knn_datastore import KnnDatastore
from hf_refspec.store.knowledge_base import KnowledgeBase

SEPARATOR = 2**16 - 1
TOKENS = np.array([5, 6, 7, SEPARATOR, 5, 6, 8, SEPARATOR], dtype=np.uint16)


def written(path: Path, **arrays: np.ndarray) -> dict:
    """Writes a file of arrays, and returns what config.json says about it."""
    save_file(arrays, path)
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return {"name": path.name, "size": len(content), "sha256": digest}


def write_config(folder: Path, **content) -> None:
    (folder / "config.json").write_text(json.dumps(content, indent=1) + "\n")


def test_a_datastore(tmp_path, tokenizer):
    suffixes = build_suffix_array(TOKENS)
    # One n-gram, 5, with a tree of one node, 6.
    table = {
        "keys": np.array([5], np.uint16),
        "slots": np.ones(2, np.uint32),
        "starts": np.array([0, 1], np.uint32),
        "node_tokens": np.array([6], np.uint16),
        "node_parents": np.array([255], np.uint8),
        "node_probs": np.array([0], np.uint8),
    }
    assert set(table) == set(ARRAYS)
    write_config(
        tmp_path,
        format_version=1,
        fingerprint=tokenizer_fingerprint(tokenizer),
        tokenizer="org/bytes",
        vocab_size=259,
        source={"corpus": "c", "license": None, "shard_tokens": 500, "hf_refspec": "0.1.0"},
        shards=[
            {
                "tokens": 8,
                "documents": 2,
                "tokens_file": written(tmp_path / "tokens-00001.safetensors", tokens=TOKENS),
                "suffixes_file": written(
                    tmp_path / "suffixes-00001.safetensors", suffixes=suffixes
                ),
            }
        ],
        ngrams={
            "ngrams": [1],
            "nodes": 1,
            "corpus_tokens": 8,
            "file": written(tmp_path / "ngrams-0123456789ab.safetensors", **table),
        },
    )
    store = Datastore(tmp_path, tokenizer=tokenizer)
    store.verify()
    assert [document.tolist() for document in store.iter_documents()] == [[5, 6, 7], [5, 6, 8]]
    table = Datastore(tmp_path, "compact").ngrams
    tokens, parents, _ = table.tree(np.array([5], np.int32), 1, 4)
    assert (tokens.tolist(), parents.tolist()) == ([6], [-1])


def test_a_knowledge_base(tmp_path, tokenizer):
    texts = ["one", "three"]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    tokens = np.array([*ids[0], *ids[1]], np.uint16)
    bounds = np.array([0, len(ids[0]), len(tokens)])
    write_config(
        tmp_path,
        kind="knowledge base",
        format_version=1,
        fingerprint=tokenizer_fingerprint(tokenizer),
        tokenizer="org/bytes",
        vocab_size=259,
        chunk_length=256,
        passages=2,
        tokens=len(tokens),
        dimension=3,
        passages_file=written(
            tmp_path / "passages.safetensors", tokens=tokens, bounds=bounds.astype(np.int64)
        ),
        embeddings_file=written(
            tmp_path / "embeddings.safetensors", embeddings=np.arange(6, dtype=np.float32)
        ),
        source={"corpus": "c", "license": None, "encoder": "e", "hf_refspec": "0.1.0"},
    )
    base = KnowledgeBase(tmp_path, tokenizer)
    base.verify()
    assert [base.text(i) for i in range(2)] == texts
    assert base.embeddings.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert base.source(0) is None  # they did not say


@pytest.mark.parametrize("sketch", ["written", "none", "before there were any"])
def test_a_knn_datastore_whose_pq_index_was_called_a_sketch(tmp_path, tokenizer, sketch):
    torch.manual_seed(0)
    size = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 259}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **size))
    built = KnnDatastore.build(
        model, tokenizer, ["some text " * 9], tmp_path / "new", progress=False
    )
    keys = np.array(built.keys)
    old = tmp_path / "old"
    old.mkdir()
    content = {
        "format": "knn-1",
        "model": "org/model",
        "layer": "last_mlp",
        "fingerprint": tokenizer_fingerprint(tokenizer),
        "vocab_size": 259,
        "entries": len(keys),
        "dimension": 8,
        "key_dtype": "float32",
        "file": written(
            old / "entries.safetensors",
            keys=keys.reshape(-1),
            norms=(keys**2).sum(axis=1),
            values=np.array(built.values),
            probe=probe(model, "last_mlp"),
        ),
    }
    if sketch == "written":
        pytest.importorskip("faiss")
        built.add_pq_index()
        index = built.pq_index
        arrays = {
            name: getattr(index, name).ravel() for name in ("mean", "axes", "levels", "codes")
        }
        content["sketch"] = written(old / "sketch.safetensors", **arrays)
    elif sketch == "none":
        content["sketch"] = None
    write_config(old, **content)
    store = KnnDatastore(old)
    store.verify()
    store.check_model(model)
    store.check_tokenizer(tokenizer)
    [found] = store.search([keys[3]], 1)
    assert (store.keys[found.ids[0]] == keys[3]).all()
    if sketch == "written":
        assert sorted(store.pq_index.candidates(keys[3], 1)) == list(range(len(keys)))
        store.add_pq_index()
        assert KnnDatastore(old).config.pq_index.name == "pq_index.safetensors"
    else:
        assert store.pq_index is None
