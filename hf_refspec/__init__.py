"""Lossless speculative decoding by look-up for transformers' `generate`.

Importing this package makes every model's `generate` take `candidate_generator=`:

    model.generate(**inputs, candidate_generator=hf_refspec.ReferenceCopy())
"""

from .datastore.format import DatastoreError
from .datastore.store import Datastore
from .decoding import speculate
from .drafting.blend import Blend
from .drafting.datastore_drafts import DatastoreDrafts
from .drafting.drafter import Drafter
from .drafting.reference_copy import ReferenceCopy
from .drafting.retrieval_cache import RetrievalCache
from .drafting.similar_calls import mean_embedding
from .drafting.stats import SpeculationStats
from .drafting.tree import DraftTree
from .hook import install, is_installed, uninstall
from .index.kernels import warmup
from .ralm.checked_search import RetrievalError
from .ralm.dense import DenseRetriever
from .ralm.iterative import iterative_ralm
from .ralm.knn_datastore import KnnDatastore
from .ralm.knn_lm import knn_lm, perplexity
from .ralm.knowledge_base import KnowledgeBase
from .ralm.langchain import from_langchain
from .ralm.milvus import MilvusRetriever
from .ralm.retrieval_stats import RetrievalStats
from .ralm.retriever import Retrieved, Retriever
from .ralm.sparse import SparseRetriever
from .ralm.speculation import Speculation
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
