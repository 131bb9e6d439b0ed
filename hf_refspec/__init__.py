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
from .version import __version__

__all__ = [
    "Blend",
    "Datastore",
    "DatastoreDrafts",
    "DatastoreError",
    "DraftTree",
    "Drafter",
    "ReferenceCopy",
    "RetrievalCache",
    "SpeculationStats",
    "__version__",
    "install",
    "is_installed",
    "mean_embedding",
    "speculate",
    "uninstall",
    "warmup",
]

install()
