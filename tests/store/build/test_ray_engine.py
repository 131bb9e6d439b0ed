"""The same bytes come out of a real Ray."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import datasets
import pytest

from hf_refspec.store.build.corpus import build_store, extend_store

QUIET = {"progress": False, "num_proc": 1, "shard_tokens": 500}
_WORDS = random.Random(0)
TEXTS = [" ".join(_WORDS.choices(["a", "bc", "", "é\n"], k=i % 50)) for i in range(90)]


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install hf_refspec[ray]")
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    yield ray
    ray.shutdown()


def content_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_same_bytes_as_from_the_local_engine(ray, tmp_path, tokenizer):
    dataset = datasets.Dataset.from_dict({"text": TEXTS})
    stream = dataset.to_iterable_dataset(num_shards=5)
    local = build_store(TEXTS, tokenizer, tmp_path / "local", **QUIET)
    extend_store(local, TEXTS[:40], tokenizer, **QUIET)
    options = {**QUIET, "engine": "ray", "num_proc": None}
    for name, source in (("texts", TEXTS), ("stream", stream)):
        path = build_store(source, tokenizer, tmp_path / name, **options)
        extend_store(path, TEXTS[:40], tokenizer, **options)
        assert content_of(path) == content_of(local)
    assert ray.is_initialized()  # It was not started by the build.


def test_without_ray_it_is_told_what_to_install(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'pip install "hf_refspec\[ray\]"'):
        build_store(["a"], tokenizer, tmp_path / "store", **{**QUIET, "engine": "ray"})
    assert not list(tmp_path.iterdir())
