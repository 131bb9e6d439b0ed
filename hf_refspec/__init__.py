"""Lossless speculative decoding by look-up for transformers' `generate`.

Importing this package makes every model's `generate` take `candidate_generator=`:

    model.generate(**inputs, candidate_generator=hf_refspec.ReferenceCopy())

Everything else is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .attachment import attach, detach
from .hook import GenerateOptions, install, is_installed, uninstall
from .version import __version__

if TYPE_CHECKING:
    from .drafting.blend import Blend as Blend
    from .drafting.contract import Drafter as Drafter
    from .drafting.contract import LookUp as LookUp
    from .drafting.contract import Observation as Observation
    from .drafting.contract import PathDrafter as PathDrafter
    from .drafting.datastore_drafts import DatastoreDrafts as DatastoreDrafts
    from .drafting.draft_model import DraftModel as DraftModel
    from .drafting.grammar.grammar_drafts import GrammarDrafts as GrammarDrafts
    from .drafting.reference_copy import ReferenceCopy as ReferenceCopy
    from .drafting.session_drafts import SessionDrafts as SessionDrafts
    from .drafting.sibling_copy import SiblingCopy as SiblingCopy
    from .drafting.stats import DraftStats as DraftStats
    from .drafting.token_recycling import TokenRecycling as TokenRecycling
    from .drafting.tree import DraftTree as DraftTree
    from .generation.running_batch import RunningBatch as RunningBatch
    from .generation.speculate import speculate as speculate
    from .model_check import ModelCheck as ModelCheck
    from .model_check import check as check
    from .ralm.checked_search import RalmError as RalmError
    from .ralm.iterative import iterative_ralm as iterative_ralm
    from .ralm.knn_datastore import KnnDatastore as KnnDatastore
    from .ralm.knn_lm import knn_lm as knn_lm
    from .ralm.options import RalmSpeculation as RalmSpeculation
    from .ralm.stats import RalmStats as RalmStats
    from .retrieval.bm25 import SparseRetriever as SparseRetriever
    from .retrieval.dense import DenseRetriever as DenseRetriever
    from .retrieval.knowledge_base import KnowledgeBase as KnowledgeBase
    from .retrieval.retriever import Retrieved as Retrieved
    from .retrieval.retriever import Retriever as Retriever
    from .smollm2 import default_model as default_model
    from .store.datastore import Datastore as Datastore
    from .store.files import DatastoreError as DatastoreError
    from .warm_up import warmup as warmup

# The public names of each module.
_MODULES = {
    "drafting.datastore_drafts": ["DatastoreDrafts"],
    "drafting.draft_model": ["DraftModel"],
    "drafting.blend": ["Blend"],
    "drafting.contract": ["Drafter", "LookUp", "Observation", "PathDrafter"],
    "drafting.grammar.grammar_drafts": ["GrammarDrafts"],
    "drafting.reference_copy": ["ReferenceCopy"],
    "drafting.session_drafts": ["SessionDrafts"],
    "drafting.sibling_copy": ["SiblingCopy"],
    "drafting.stats": ["DraftStats"],
    "drafting.token_recycling": ["TokenRecycling"],
    "drafting.tree": ["DraftTree"],
    "generation.running_batch": ["RunningBatch"],
    "generation.speculate": ["speculate"],
    "model_check": ["ModelCheck", "check"],  # no module has the name of a function
    "ralm.checked_search": ["RalmError"],
    "ralm.options": ["RalmSpeculation"],
    "ralm.iterative": ["iterative_ralm"],
    "ralm.knn_lm": ["knn_lm"],
    "ralm.stats": ["RalmStats"],
    "retrieval.bm25": ["SparseRetriever"],
    "retrieval.dense": ["DenseRetriever"],
    "retrieval.retriever": ["Retrieved", "Retriever"],
    "smollm2": ["default_model"],
    "store.datastore": ["Datastore"],
    "store.files": ["DatastoreError"],
    "warm_up": ["warmup"],
    "ralm.knn_datastore": ["KnnDatastore"],
    "retrieval.knowledge_base": ["KnowledgeBase"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "GenerateOptions",
    "__version__",
    "attach",
    "detach",
    "install",
    "is_installed",
    "uninstall",
    *(name for name in _MODULE_OF if name != "Blend"),  # `|` makes them
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


install()
