"""Drafts from the target's own logits: Token Recycling, and contexts of several tokens."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from huggingface_hub import CommitInfo
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..index.recycling import MOST_CONTEXT, NextTokens, Pooling
from ..messages import check_count
from ..notebooks import is_hidden
from ..text_config import context_length, text_config, text_tokenizer
from .contract import Call, LookUp, Observation, Sampling
from .top_tokens import top_tokens
from .tree import ROOT, DraftTree

if TYPE_CHECKING:
    from typing_extensions import Self

# A row for each length of the longest known context, 0 to 3: the exponents of contexts of 1, 2 and
# 3 tokens, of frequencies and of the last position, see `index.recycling`. Fitted to 1,900
# positions of greedy texts of SmolLM2-135M-Instruct. Fits to samples there, at temperature 0.7 or
# 1, differ from it by at most 0.12: one set serves all.
_EXPONENTS = [
    [0.00, 0.00, 0.00, 0.60, 0.20],
    [0.90, 0.00, 0.00, 0.35, 0.30],
    [0.60, 0.85, 0.00, 0.20, 0.30],
    [0.45, 0.35, 0.80, 0.25, 0.35],
]
_GREEDY = Pooling(np.array(_EXPONENTS), misses=np.exp([4.2, 4.3, 4.3, 3.9]))
# Sampled tokens are less sure than the greedy choice: this much at temperature 1. Fitted to MAT at
# temperatures 0.7 and 1, and 0.8 with top-p 0.8.
_UNSURE = 0.5
# The tokens that `build` reads at once, and the logits: they bound its memory.
_LONGEST = 1024
_LOGITS = 1 << 26
_NOTHING = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)


@lru_cache(maxsize=16)
def _pooling(sampling: Sampling | None) -> Pooling:
    """The pooling of contexts for a call that samples so, or is greedy."""
    if sampling is None or sampling.top_k == 1:
        return _GREEDY
    # The less of the distribution top-k and top-p leave, the more a sample is like the greedy
    # choice.
    left = min(sampling.top_p, 1.0) ** 2
    return _GREEDY.flattened(1 / (1 + _UNSURE * sampling.temperature * left))


@dataclass(frozen=True)
class _Origin:
    """The origin of a table that was built or loaded."""

    model: Any = None  # its public name
    tokenizer: Any = None
    source: dict[str, Any] = field(default_factory=dict)  # the corpus and its license
    path: Path | None = None  # the folder


class TokenRecycling(LookUp):
    """Drafts from the target's own expectations after the same last tokens, earlier on.

    Each forward pass yields the k best next tokens after every verified node, accepted or not. They
    are kept for the last 1 to n tokens, from call to call, and drafts grow out of them, so that no
    text need repeat. See [`~index.recycling.recycling_tree`].

    Threads share it by `fork()`: all forks learn into one table. A copy has a table of its own, a
    pickle what was built, loaded or saved, and nothing that calls have added.

    Args:
        top_k (`int`, *optional*, defaults to 8): k, the next tokens that are kept of a context, 256
            at most.
        context (`int`, *optional*, defaults to 3): n, the longest contexts, from 1 to 3 tokens.
        max_contexts (`int`, *optional*, defaults to 262,144): The most contexts that are kept,
            16,777,216 at most. A full table gives up the eighth that was not verified for longest.
            A context takes 8 k + 28 to 8 k + 36 bytes: 24 MB at most by default.

    Raises:
        ValueError: If a number is less than 1 or too large. `begin` raises it if `top_k` is larger
            than the target's vocabulary, or if the drafter has learned from a model with another.
    """

    longest_match = MOST_CONTEXT
    kept_at_model = False  # true if calls give it the table that "auto" has of their model
    _runners_up = _NOTHING  # the tokens that the target expected instead of the last one
    _of_a_call = (*LookUp._of_a_call, "_runners_up")

    def __init__(self, top_k: int = 8, context: int = 3, max_contexts: int = 1 << 18) -> None:
        self._use(NextTokens(top_k, context, max_contexts))

    def _use(self, table: NextTokens, origin: _Origin = _Origin()) -> None:
        self._table = table
        self._origin = origin
        self.top_k = self.observed_top_k = table.top_k
        self.context, self.max_contexts = table.context, table.max_contexts

    def learns_into(self, other: TokenRecycling) -> None:
        """Shares another's table from now on, as a fork of it does."""
        self._use(other._table, other._origin)

    def __len__(self) -> int:
        """The number of contexts that are kept now."""
        return len(self._table)

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._take_vocabulary(vocab_size)
        super().begin(prompt_ids, vocab_size)
        self._runners_up = _NOTHING

    def _take_vocabulary(self, vocab_size: int) -> None:
        """Learns tokens below `vocab_size` from now on. Raises a ValueError (a DatastoreError if
        the table was loaded) if that is less than k, or the table has another vocabulary."""
        table = self._table
        if table.top_k > vocab_size:
            raise ValueError(
                f"top_k is {table.top_k}, but the target model's vocabulary has only {vocab_size} "
                "tokens"
            )
        if len(table) and table.vocab_size not in (None, vocab_size):
            message = (
                f"is from a model with a vocabulary of {table.vocab_size} tokens, but the target "
                f"model's has {vocab_size}; make another one for it"
            )
            if self._origin.path is None:
                raise ValueError(f"this TokenRecycling's table {message}")
            from ..store.files import DatastoreError

            raise DatastoreError(f"{self._origin.path} {message}")
        table.vocab_size = vocab_size

    def look_up(self, context: np.ndarray, budget: int, behind_path: bool, call: Call) -> DraftTree:
        last_tokens, last_probs = _NOTHING if behind_path else self._runners_up
        chain = call.chain and not behind_path
        pooling = _pooling(call.sampling)
        tree = self._table.tree(context, last_tokens, last_probs, pooling, budget, chain)
        return DraftTree(*tree)

    def observe(self, observation: Observation) -> None:
        tokens = observation.tokens
        verified = observation.verified
        best_tokens = observation.top_tokens
        best_probs = observation.top_probs
        self._runners_up = _NOTHING
        if best_tokens is not None and best_probs is not None:
            self._table.learn(
                self._context, verified.tokens, verified.parents, best_tokens, best_probs
            )
            # The node after which the target chose the last token.
            last = [ROOT, *verified.along(tokens[:-1].tolist())][-1]
            self._runners_up = best_tokens[1 + last], best_probs[1 + last]
        super().observe(observation)
        self._table.count(tokens)

    def fork(self) -> TokenRecycling:
        return copy.copy(self)

    @classmethod
    def build(
        cls,
        documents: Any,
        tokenizer: PreTrainedTokenizerBase,
        model: PreTrainedModel,
        *,
        top_k: int = 8,
        context: int = 3,
        max_contexts: int = 1 << 18,
        max_tokens: int | None = None,
        column: str | None = None,
        pattern: str = "*",
        license: str | None = None,
        corpus_name: str | None = None,
        progress: bool = True,
    ) -> Self:
        """Learns a model's best next tokens in texts, by running it over them once.

        Args:
            documents: As of [`Datastore.build`].
            tokenizer (`PreTrainedTokenizerBase`): The target model's.
            model (`PreTrainedModel`): The target model.
            top_k: As of the class.
            context: As of the class.
            max_contexts: As of the class.
            max_tokens (`int`, *optional*): Stop after about this number of tokens.
            column: As of [`Datastore.build`].
            pattern: As of [`Datastore.build`].
            license: As of [`Datastore.build`].
            corpus_name: As of [`Datastore.build`].
            progress (`bool`, *optional*, defaults to `True`): Show a progress bar.

        Raises:
            ValueError: If the documents have no token, or one of them cannot be read as a document.
        """
        # Loaded only where a table is built.
        from ..corpus.documents import open_source
        from ..corpus.tokenise import windows
        from ..store.stored_tokenizer import public_name

        tokenizer = text_tokenizer(tokenizer)
        if max_tokens is not None:
            check_count("max_tokens", max_tokens)
        drafter = cls(top_k, context, max_contexts)
        table = drafter._table
        vocab_size = text_config(model).vocab_size
        drafter._take_vocabulary(vocab_size)
        source = open_source(documents, tokenizer, column, pattern)

        def texts() -> Iterator[np.ndarray]:
            for document in source.documents:
                if isinstance(document, str):
                    document = tokenizer(document, verbose=False)["input_ids"]
                yield np.asarray(document, np.int64)

        longest = min(context_length(model) or _LONGEST, _LONGEST, _LOGITS // vocab_size)
        shown = {"unit": " tokens", "unit_scale": True, "disable": is_hidden(progress)}
        with torch.no_grad(), tqdm(total=max_tokens, **shown) as bar:
            read = 0
            for window in windows(texts(), max(longest, 2), vocab_size):
                ids = torch.from_numpy(window.ids)[None].to(model.device)
                top = top_tokens(model(ids, use_cache=False).logits, top_k)
                tokens = top.tokens[0, window.known - 1 :]
                table.learn_text(window.ids, window.known, tokens, top.probs[0, window.known - 1 :])
                table.count(tokens[:, 0].astype(np.int64))
                bar.update(len(window.targets))
                read += len(window.targets)
                if max_tokens is not None and read >= max_tokens:
                    break
        if len(drafter) == 0:
            raise ValueError("documents has no text of two tokens or more: nothing is learned")
        table.keep_for_pickles()
        about = source.about(corpus_name, license)
        drafter._use(table, _Origin(public_name(model), tokenizer, about))
        return drafter

    @classmethod
    def from_pretrained(
        cls,
        repo_or_path: str | os.PathLike,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_contexts: int = 1 << 18,
        **options: Any,
    ) -> Self:
        """A drafter with the table of a folder, or of a dataset repo on the Hub.

        Args:
            repo_or_path (`str` or `Path`): A folder, or a repo id such as `"org/table"`.
            tokenizer (`PreTrainedTokenizerBase`): The target model's.
            max_contexts (`int`, *optional*, defaults to 262,144): As of the class; a larger table
                is cut to its newest contexts.
            options: `revision`, `token`, `cache_dir` and `local_files_only`, see
                [`~store.stored_folder.StoredFolder.from_pretrained`].

        Raises:
            OSError: If the folder or repo does not exist, or cannot be reached.
            DatastoreError: If it is not a recycling table, is damaged, or was made for another
                tokenizer.
        """
        from ..store.recycling_table import RecyclingTable

        check_count("max_contexts", max_contexts)
        stored = RecyclingTable.from_pretrained(repo_or_path, tokenizer, **options)
        origin = _Origin(stored.config.model, tokenizer, stored.config.source, stored.path)
        drafter = cls(1, 1, 1)
        drafter._use(stored.table(max_contexts), origin)
        return drafter

    def save_pretrained(
        self,
        path: str | os.PathLike,
        tokenizer: PreTrainedTokenizerBase | None = None,
        model: PreTrainedModel | None = None,
    ) -> None:
        """Writes its table into a new folder, in whole or not at all.

        Args:
            path (`str` or `Path`): The folder to make.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): The target model's; needed if the
                table was neither built nor loaded.
            model (`PreTrainedModel`, *optional*): The target model, for the card; likewise.

        Raises:
            FileExistsError: If there is something at `path`.
            ValueError: If nothing is learned yet, or the tokenizer or model is needed.
            OSError: If it cannot be written.
        """
        from ..store.recycling_table import RecyclingTable
        from ..store.stored_tokenizer import public_name

        if model is not None:
            self._take_vocabulary(text_config(model).vocab_size)
        made_for = tokenizer or self._origin.tokenizer
        made_by = self._origin.model if model is None else public_name(model)
        for name, value in (("tokenizer", made_for), ("model", made_by)):
            if value is None:
                raise ValueError(
                    f"{name} is not known, as this TokenRecycling was neither built nor loaded; "
                    f"give the target model's {name}="
                )
        if len(self) == 0:
            raise ValueError("nothing is learned yet: generate with it, or build() it")
        self._table.keep_for_pickles()
        RecyclingTable.write(path, self._table, made_for, made_by, self._origin.source)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        model: PreTrainedModel | None = None,
        **options: Any,
    ) -> CommitInfo:
        """Publishes its table as a dataset repo, with a card that names the model.

        Args:
            repo_id (`str`): Such as `"org/table"`; the repo is created if there is none.
            tokenizer: As of [`~TokenRecycling.save_pretrained`].
            model: As of [`~TokenRecycling.save_pretrained`].
            **options: `private`, `token`, `commit_message`, `revision` and `create_pr`, see
                [`~store.stored_folder.StoredFolder.push_to_hub`].

        Raises:
            ValueError: As [`~TokenRecycling.save_pretrained`] does.
            OSError: If the repo cannot be written.
        """
        from ..store.recycling_table import RecyclingTable

        with TemporaryDirectory() as folder:
            path = Path(folder, "table")
            self.save_pretrained(path, tokenizer, model)
            stored = RecyclingTable(path, tokenizer or self._origin.tokenizer)
            return stored.push_to_hub(repo_id, **options)
