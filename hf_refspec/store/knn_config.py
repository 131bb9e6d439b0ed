"""What the config.json of a kNN datastore says.

entries.safetensors     keys    float32 or float16, the hidden state after a context
                        norms   float32, the squared length of each key
                        values  int32, the token that followed
                        probe   float32, the model's hidden state after a text that is known
pq_index.safetensors    of larger datastores, see [`store.pq_index`]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from .build.hidden_states import Layer
from .card import readable_size
from .files import FileEntry
from .folder import FolderConfig
from .schema import Named, Range

ENTRIES = Named("a file of entries", r"entries\.safetensors")
# Folders of earlier versions call it a sketch, in config.json too.
PQ_INDEX = Named("a file of a PQ index", r"(pq_index|sketch)\.safetensors")
_COUNT = Range(1, 2**31 - 1)
KeyDtype = Literal["float32", "float16"]


@dataclass(frozen=True)
class KnnConfig(FolderConfig):
    """What the config.json of a kNN datastore says.

    Attributes:
        model (`str`): The model's name, for people.
        layer (`str`): Which hidden state a key is.
        vocab_size (`int`): All values are below it.
        entries, dimension (`int`): The shape of the keys.
        key_dtype (`str`): `"float32"` or `"float16"`.
        file (`FileEntry`): Where the entries are.
        pq_index (`FileEntry`, *optional*): Where their PQ index is, if there is one.
    """

    NOUN = "kNN datastore"
    HEADER: ClassVar[dict[str, Any]] = {"format": "knn-1"}
    FILES = (ENTRIES, PQ_INDEX)
    TEMPLATE = "knn_datastore.md"

    model: str
    layer: Layer
    vocab_size: Annotated[int, _COUNT]
    entries: Annotated[int, _COUNT]
    dimension: Annotated[int, _COUNT]
    key_dtype: KeyDtype
    file: Annotated[FileEntry, ENTRIES]
    pq_index: Annotated[FileEntry, PQ_INDEX] | None = None

    @classmethod
    def _newest(cls, content: dict[str, Any]) -> dict[str, Any]:
        content = super()._newest(content)
        content.setdefault("pq_index", content.pop("sketch", None))
        if "model" in content:
            content.setdefault("tokenizer", content["model"])
        return content

    def card_texts(self) -> dict[str, str]:
        return {"pq_size": readable_size(self.pq_index.size) if self.pq_index else "none"}
