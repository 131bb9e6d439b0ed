"""What datastores and knowledge bases are built from, as options of a command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ..options import Option


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files and folders, or a dataset."""

    source: Annotated[list[Path], Option("text files and folders", positional=True, nargs="*")]
    dataset: Annotated[
        str | None, Option("a dataset of the Hub or of this machine", metavar="NAME")
    ] = None
    config: Annotated[str | None, Option("the dataset's configuration", metavar="NAME")] = None
    split: Annotated[str, Option()] = "train"
    column: Annotated[str | None, Option("of the dataset, with texts or chats")] = None
    pattern: Annotated[str, Option('files of a folder, as "*.md"')] = "*"

    def load_dataset(self, streaming: bool = False) -> Any:
        """The dataset that was named.

        Raises:
            ImportError: If the library is missing.
        """
        try:
            from datasets import load_dataset
        except ImportError:
            raise ImportError(
                '--dataset needs datasets: pip install "hf_refspec[datastore]"'
            ) from None
        return load_dataset(self.dataset, self.config, split=self.split, streaming=streaming)
