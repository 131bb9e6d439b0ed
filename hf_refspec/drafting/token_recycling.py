"""Drafts from the target's own logits: Token Recycling, and contexts of several tokens."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from huggingface_hub import CommitInfo
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..check_count import check_count
from ..index.next_tokens import NextTokens
from ..index.recycling import MOST_CONTEXT
from ..index.recycling_tree import Pooling
from ..store.build.source import open_source
from ..store.files import DatastoreError
from ..store.fingerprint import public_name, vocabulary_size
from ..store.recycling_table import RecyclingTable
from ..text_config import text_config
from .corpus_tokens import read_next_tokens
from .drafter import _ANY_VOCABULARY, Drafter
from .observation import Observation
from .sampling import Sampling
from .stats import SpeculationStats
from .token_ids import last_tokens
from .tree import ROOT, DraftTree

if TYPE_CHECKING:
    from typing_extensions import Self

Mode: TypeAlias = Literal["contexts", "published"]

# A row for each length of the longest known context, 0 to 3: the exponents of contexts of 1, 2 and
# 3 tokens, of frequencies and of the last position, see `index.recycling_tree`. Fitted to 1,900
# positions of greedy texts of SmolLM2-135M-Instruct. A fit to what it would sample there, at
# temperature 0.7 or 1, differs from one to its greedy choice by at most 0.12: one set serves all.
_EXPONENTS = np.array(
    [
        [0.00, 0.00, 0.00, 0.60, 0.20],
        [0.90, 0.00, 0.00, 0.35, 0.30],
        [0.60, 0.85, 0.00, 0.20, 0.30],
        [0.45, 0.35, 0.80, 0.25, 0.35],
    ]
)
_MISSES = np.exp([4.2, 4.3, 4.3, 3.9])
_GREEDY = Pooling(_EXPONENTS, _MISSES)
# What is sampled is less sure than the greedy choice, by so much at temperature 1. Fitted to MAT at
# temperatures 0.7 and 1, and 0.8 with top-p 0.8.
_UNSURE = 0.5
# What the prompt's logits may cost, beside the prefill.
_PROMPT_FRACTION = 0.05
# What the paper has: k, and contexts of one token.
_PUBLISHED = {"top_k": 8, "context": 1}


# Tokens (int32) and their probabilities (float32).
Expected: TypeAlias = tuple[np.ndarray, np.ndarray]
_NOTHING: Expected = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)


@dataclass
class _About:
    """Whose expectations a table holds; what is not known is asked for where it is stored."""

    vocab_size: int | None = None
    model: str | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    source: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None  # of the folder that it was read from

    def told(
        self, tokenizer: PreTrainedTokenizerBase | None, model: PreTrainedModel | None
    ) -> _About:
        """The same with what is given, and nothing missing."""
        tokenizer = tokenizer if tokenizer is not None else self.tokenizer
        name = self.model if model is None else public_name(model)
        if tokenizer is None or name is None:
            missing = "tokenizer" if tokenizer is None else "model"
            raise ValueError(
                f"{missing} is not known, as this TokenRecycling was neither built nor loaded; "
                f"give the target model's {missing}="
            )
        return _About(self.vocab_size, name, tokenizer, self.source)


class TokenRecycling(Drafter):
    """Drafts what the target itself expected after the same last tokens, earlier on.

    Each forward pass tells the k best next tokens after every verified node, accepted or not. They
    are kept for the last 1 to n tokens, from call to call, and drafts grow out of them: it needs no
    text that repeats. See [`~index.recycling_tree.recycling_tree`].

    It can be shared by threads through `fork()`, which learns into the same table. A copy (or
    pickle) has a table of its own.

    Args:
        top_k (`int`, *optional*, defaults to 8): k, the next tokens that are kept of a context.
        context (`int`, *optional*, defaults to 3): n, the longest contexts, from 1 to 3 tokens.
        max_contexts (`int`, *optional*, defaults to 262,144): The most contexts that are kept; then
            those that were not verified for longest are given up. Each takes 8 k + 28 to 8 k + 36
            bytes once it is there: 24 MB at most by default.
        mode (`"contexts"` or `"published"`, *optional*, defaults to `"contexts"`): `"published"` is
            the algorithm of "Turning Trash into Treasure: Accelerating Inference of Large Language
            Models with Token Recycling" (arXiv 2408.08696, section 3): one matrix of the 8 best
            next tokens of each token, and breadth first the static tree of 80 nodes that the
            authors published (the first of them, where the budget is smaller). Where a token has
            not been seen yet nothing is drafted; the paper's matrix begins with zeros. `top_k`
            and `context` are then 8 and 1.

    Raises:
        TypeError: if a number is no int.
        ValueError: if a number is less than 1, `context` more than 3, or there is no such `mode`.
            `begin` raises it if `top_k` is larger than the target's vocabulary, or what it has
            learned is from a model with another one.
    """

    def __init__(
        self,
        top_k: int = 8,
        context: int = 3,
        max_contexts: int = 1 << 18,
        mode: Mode = "contexts",
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {get_args(Mode)}, but is {mode!r}")
        check_count("top_k", top_k)
        check_count("context", context)
        check_count("max_contexts", max_contexts)
        if context > MOST_CONTEXT:
            raise ValueError(f"context must be at most {MOST_CONTEXT} tokens, but is {context}")
        if mode == "published":
            top_k, context = _PUBLISHED["top_k"], _PUBLISHED["context"]
        self.mode = mode
        self.top_k = self.observed_top_k = top_k
        self.prompt_fraction = 0.0 if mode == "published" else _PROMPT_FRACTION
        self._table = NextTokens(top_k, context, max_contexts)
        self._about = _About()
        # Of this call: the last tokens, and what the target expected in place of the very last.
        self._text = np.empty(0, dtype=np.int32)
        self._runners_up = _NOTHING
        self._pooling = _GREEDY

    @property
    def context(self) -> int:
        """The longest contexts."""
        return self._table.context

    @property
    def max_contexts(self) -> int:
        """The most contexts that are kept."""
        return self._table.max_contexts

    def __len__(self) -> int:
        """How many contexts there are now."""
        return len(self._table)

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        if self.top_k > vocab_size:
            raise ValueError(
                f"top_k is {self.top_k}, but the target model's vocabulary has only {vocab_size} "
                "tokens"
            )
        if vocab_size != _ANY_VOCABULARY:
            if len(self) and self._about.vocab_size not in (None, vocab_size):
                message = (
                    f"is from a model with a vocabulary of {self._about.vocab_size} tokens, but "
                    f"the target model's has {vocab_size}; make another one for it"
                )
                if self._about.path is not None:
                    raise DatastoreError(f"{self._about.path} {message}")
                raise ValueError(f"what this TokenRecycling has learned {message}")
            self._about.vocab_size = vocab_size
        self._forget_call()
        self._text = last_tokens(self._text, prompt_ids, MOST_CONTEXT)
        self._pooling = _pooling(self.sampling)

    def draft(self, budget: int) -> DraftTree:
        return self._draft(budget, chain=False)

    def draft_chain(self, budget: int) -> DraftTree:
        return self._draft(budget, chain=True)

    def observe(self, observation: Observation) -> None:
        tokens, verified = observation.tokens, observation.verified
        top_tokens, top_probs = observation.top_tokens, observation.top_probs
        self._runners_up = _NOTHING
        if top_tokens is not None and top_probs is not None:
            if observation.of_prompt:
                self._learn_text(tokens[:-1], len(tokens) - len(top_tokens), top_tokens, top_probs)
                return
            nodes = verified.tokens, verified.parents
            self._table.learn(self._text, *nodes, top_tokens, top_probs, self._vocab_size)
            last = _last_node(verified, tokens)
            self._runners_up = top_tokens[1 + last], top_probs[1 + last]
        self._text = last_tokens(self._text, tokens, MOST_CONTEXT)
        self._table.count(tokens)

    def fork(self) -> TokenRecycling:
        fork = copy.copy(self)
        fork.stats, fork.calibration = SpeculationStats(), copy.deepcopy(self.calibration)
        fork._forget_call()
        return fork

    @classmethod
    def build(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        documents: Any,
        *,
        top_k: int = 8,
        context: int = 3,
        max_contexts: int = 1 << 18,
        max_tokens: int | None = None,
        column: str | None = None,
        pattern: str = "*",
        license: str | None = None,
        corpus: str | None = None,
        progress: bool = True,
    ) -> Self:
        """Learns what a model expects next in texts, by running it over them once.

        Args:
            model (`PreTrainedModel`): The target model.
            tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
            documents: A `datasets` dataset (map-style or streaming) with a column of texts; a text
                file, a folder, or a list of both; or an iterable of texts or lists of ids.
            top_k, context, max_contexts (`int`, *optional*): As of the class.
            max_tokens (`int`, *optional*): Stop after so many tokens, about.
            column (`str`, *optional*): The dataset's column; by default `"text"` or the only one of
                strings.
            pattern (`str`, *optional*, defaults to `"*"`): Which files below a folder, as `"*.md"`.
            license (`str`, *optional*): Of the documents. By default what the dataset says.
            corpus (`str`, *optional*): What they are called. By default the dataset or the folder.
            progress (`bool`, *optional*, defaults to `True`): Show a progress bar.

        Raises:
            ValueError: If there is no token in all documents, or one of them is no document.
        """
        drafter = cls(top_k, context, max_contexts)
        if max_tokens is not None:
            check_count("max_tokens", max_tokens)
        source = open_source(documents, tokenizer, vocabulary_size(tokenizer), column, pattern)
        drafter.begin(np.empty(0, dtype=np.int64), text_config(model).vocab_size)
        options = drafter.top_k, max_tokens, progress
        for window, tokens, probs in read_next_tokens(model, tokenizer, source.documents, *options):
            first = window.known
            drafter._learn_text(window.ids, first, tokens[first - 1 :], probs[first - 1 :])
            drafter._table.count(tokens[first - 1 :, 0].astype(np.int64))
        if len(drafter) == 0:
            raise ValueError("documents has no text of two tokens or more: nothing is learned")
        drafter._about = _About(
            text_config(model).vocab_size,
            public_name(model),
            tokenizer,
            {"corpus": corpus or source.name, "license": license or source.license},
        )
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
        """Begins with a table from a folder, or from a dataset repo on the Hub.

        Args:
            repo_or_path (`str` or `Path`): A folder, or a repo id such as `"org/table"`.
            tokenizer (`PreTrainedTokenizerBase`): The target model's.
            max_contexts (`int`, *optional*, defaults to 262,144): As of the class; of a larger
                table the newest are taken.
            options: `revision`, `token`, `cache_dir` and `local_files_only`, see
                [`~store.stored_folder.StoredFolder.from_pretrained`].

        Raises:
            OSError: If there is no such folder or repo, or it cannot be reached.
            DatastoreError: If it is no recycling table, damaged, or made for another tokenizer.
        """
        stored = RecyclingTable.from_pretrained(repo_or_path, tokenizer, **options)
        check_count("max_contexts", max_contexts)
        config = stored.config
        entries = stored.entries(max_contexts)  # checked before there is room for them
        drafter = cls(config.top_k, config.context, max_contexts)
        drafter._table.enter(entries)
        drafter._about = _About(
            config.vocab_size, config.model, tokenizer, config.source, stored.path
        )
        return drafter

    def save_pretrained(
        self,
        path: str | os.PathLike,
        tokenizer: PreTrainedTokenizerBase | None = None,
        model: PreTrainedModel | None = None,
    ) -> None:
        """Writes all it has learned into a new folder, all of it or nothing.

        Args:
            path (`str` or `Path`): The folder to make.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): The target model's; needed where it
                was neither built nor loaded.
            model (`PreTrainedModel`, *optional*): The target model, for the card; likewise.

        Raises:
            FileExistsError: If there is something at `path`.
            ValueError: If nothing is learned yet, or the tokenizer or model is needed.
            OSError: If it cannot be written.
        """
        about = self._about.told(tokenizer, model)
        vocab_size = about.vocab_size if model is None else text_config(model).vocab_size
        if about.vocab_size not in (None, vocab_size):
            raise ValueError(
                f"model has a vocabulary of {vocab_size} tokens, but what is learned is "
                f"from one with {about.vocab_size}; give the target model"
            )
        if len(self) == 0 or about.vocab_size is None or about.model is None:
            raise ValueError("nothing is learned yet: generate with it, or build() it")
        RecyclingTable.write(
            path,
            self._table.entries(),
            about.tokenizer,
            model=about.model,
            vocab_size=about.vocab_size,
            context=self.context,
            source=about.source,
        )

    def push_to_hub(
        self,
        repo_id: str,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        model: PreTrainedModel | None = None,
        **options: Any,
    ) -> CommitInfo:
        """Publishes all it has learned as a dataset repo, with a card that names the model.

        Args:
            repo_id (`str`): Such as `"org/table"`; the repo is created if there is none.
            tokenizer, model: As of [`~TokenRecycling.save_pretrained`].
            options: `private`, `token`, `commit_message`, `revision` and `create_pr`, see
                [`~store.stored_folder.StoredFolder.push_to_hub`].

        Raises:
            ValueError: As [`~TokenRecycling.save_pretrained`].
            OSError: If the repo cannot be written.
        """
        with TemporaryDirectory() as folder:
            path = Path(folder, "table")
            self.save_pretrained(path, tokenizer, model)
            return RecyclingTable(path, self._about.told(tokenizer, model).tokenizer).push_to_hub(
                repo_id, **options
            )

    @property
    def _vocab_size(self) -> int:
        return self._about.vocab_size or _ANY_VOCABULARY

    def _learn_text(
        self, ids: np.ndarray, known: int, token_ids: np.ndarray, probs: np.ndarray
    ) -> None:
        """Learns what was expected after the first `known` tokens of a text and after each later
        one."""
        before = last_tokens(self._text[:0], ids[:known], MOST_CONTEXT)
        chain = DraftTree.chain(ids[known:])
        nodes = chain.tokens, chain.parents
        expected = np.ascontiguousarray(token_ids), np.ascontiguousarray(probs)
        self._table.learn(before, *nodes, *expected, self._vocab_size)

    def _draft(self, budget: int, chain: bool) -> DraftTree:
        if budget == 0 or len(self._text) == 0:
            return DraftTree.empty()
        if self.mode == "published":
            tree = DraftTree(*self._table.static_tree(int(self._text[-1]), budget))
            return tree.best_chain() if chain else tree
        return DraftTree(
            *self._table.tree(self._text, *self._runners_up, self._pooling, budget, chain)
        )

    def _forget_call(self) -> None:
        self._text = self._text[:0]
        self._runners_up = _NOTHING


def _last_node(verified: DraftTree, tokens: np.ndarray) -> int:
    """The node at which the target chose the last of these tokens."""
    node, children = ROOT, verified.children()
    for token in tokens[:-1].tolist():
        node = children[node, token]
    return node


def _pooling(sampling: Sampling | None) -> Pooling:
    """Probabilities of the greedy choice, or of what is sampled: the less of the distribution
    top-k and top-p leave to choose from, the more it is like the greedy one."""
    if sampling is None or sampling.top_k == 1:
        return _GREEDY
    left = min(sampling.top_p, 1.0) ** 2
    return _GREEDY.flattened(1 / (1 + _UNSURE * sampling.temperature * left))
