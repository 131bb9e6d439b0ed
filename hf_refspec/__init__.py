"""Lossless speculative decoding by look-up for transformers' `generate`.

Importing this package makes every model's `generate` take `candidate_generator=`:

    model.generate(**inputs, candidate_generator=hf_refspec.ReferenceCopy())
"""

from .drafting.blend import Blend
from .drafting.datastore_drafts import DatastoreDrafts
from .drafting.drafter import Drafter
from .drafting.reference_copy import ReferenceCopy
from .drafting.sessions.retrieval_cache import RetrievalCache
from .drafting.sessions.similar_calls import mean_embedding
from .drafting.stats import SpeculationStats
from .drafting.tree import DraftTree
from .generation.loop import speculate
from .hook import install, is_installed, uninstall
from .index.kernels import warmup
from .index.retrieved import Retrieved
from .ralm.checked_search import RetrievalError
from .ralm.iterative import iterative_ralm
from .ralm.knn_lm import knn_lm, perplexity
from .ralm.options import Speculation
from .ralm.stats import RetrievalStats
from .retrieval.bm25 import SparseRetriever
from .retrieval.dense import DenseRetriever
from .retrieval.langchain import from_langchain
from .retrieval.milvus import MilvusRetriever
from .retrieval.retriever import Retriever
from .store.datastore import Datastore
from .store.folder import DatastoreError
from .store.knn_datastore import KnnDatastore
from .store.knowledge_base import KnowledgeBase
from .version import __version__

__all__ = [
    "Blend",
    "Datastore",
    "DatastoreDrafts",
    "DatastoreError",
    "DenseRetriever",
    "DraftTree",
    "Drafter",
    "KnnDatastore",
    "KnowledgeBase",
    "MilvusRetriever",
    "ReferenceCopy",
    "RetrievalCache",
    "RetrievalError",
    "RetrievalStats",
    "Retrieved",
    "Retriever",
    "SparseRetriever",
    "Speculation",
    "SpeculationStats",
    "__version__",
    "from_langchain",
    "install",
    "is_installed",
    "iterative_ralm",
    "knn_lm",
    "mean_embedding",
    "perplexity",
    "speculate",
    "uninstall",
    "warmup",
]

install()
