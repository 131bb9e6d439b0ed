import pytest

from hf_refspec.ralm.knn_datastore import KnnDatastore
from tests.helpers.knn_texts import CORPUS


@pytest.fixture(scope="session")
def store(byte_llama, tokenizer, tmp_path_factory) -> KnnDatastore:
    path = tmp_path_factory.mktemp("knn") / "store"
    about = {"corpus_name": "tides", "license": "MIT"}
    return KnnDatastore.build(CORPUS, tokenizer, byte_llama, path, **about)


@pytest.fixture(scope="session")
def inputs(tokenizer):
    return tokenizer("for k in ran", return_tensors="pt")
