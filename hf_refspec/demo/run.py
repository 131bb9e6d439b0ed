"""The demo: a model completes and edits Python files, plainly and with drafts, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafting.blend import Blend
from ..drafting.datastore_drafts import DatastoreDrafts
from ..drafting.drafter import Drafter
from ..drafting.reference_copy import ReferenceCopy
from ..drafting.tree import DraftTree
from ..generation.speculate import speculate
from ..index.kernels import warmup
from ..store.datastore import Datastore
from . import corpus
from .terminal import DIM, GREEN, styled, verdict

PIECE_TOKENS = (200, 450)  # of a piece that is edited
CONTEXT_TOKENS = 600  # of a file that is completed
ROUNDS = 2


@dataclass(frozen=True)
class Task:
    """A title, the prompt that the model continues, and whether it samples."""

    title: str
    prompt: str
    sampled: bool = False


def heldout_tasks(tokenizer: PreTrainedTokenizerBase) -> list[Task]:
    """Three edits and a completion of standard library files that the model was not trained on."""
    edits: list[Task] = []
    for path in corpus.heldout_files():
        tasks = file_tasks(path, tokenizer)
        if len(tasks) == 2:  # long enough for both
            if len(edits) == 3:
                return [*edits, tasks[1]]
            edits.append(tasks[0])
    return edits


def file_tasks(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Task]:
    """An edit of a piece of a file, if one fits, and its completion.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it holds no text.
    """
    source = corpus.read_source(path)
    if not source.strip():
        raise ValueError(f"{path} is empty")
    tasks = []
    piece = _piece(source, tokenizer)
    if piece is not None:
        old = max(corpus.renamable_identifiers(piece), key=piece.count)
        title = f"{path.name}: rename {old} to new_{old}"
        tasks.append(Task(title, corpus.rename_prompt(piece, old, f"new_{old}")))
    ids = tokenizer(source, add_special_tokens=False)["input_ids"]
    context = tokenizer.decode(ids[: min(len(ids) // 2 + 1, CONTEXT_TOKENS)])
    tasks.append(Task(f"{path.name}: complete it, sampled", context, sampled=True))
    return tasks


def _piece(source: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The first neighbouring top-level blocks of suitable size with something to rename."""
    low, high = PIECE_TOKENS
    piece, size = "", 0
    for block in corpus.top_level_blocks(source):
        block_size = len(tokenizer(block)["input_ids"])
        if size + block_size > high:
            piece, size = "", 0
        if block_size <= high:
            piece, size = piece + block, size + block_size
        if size >= low and corpus.renamable_identifiers(piece):
            return piece.strip("\n\f")
    return None


class RecordedDrafts(Blend):
    """A [`Blend`] that records how many tokens each step returned."""

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        super().begin(prompt_ids, vocab_size)
        self.steps: list[int] = []

    def observe(
        self,
        tokens: np.ndarray,
        verified: DraftTree | None = None,
        logits: torch.Tensor | None = None,
    ) -> None:
        super().observe(tokens, verified, logits)
        self.steps.append(len(tokens))

    def runs(self) -> Iterator[tuple[int, bool]]:
        """The output as runs of tokens: their number, and whether they were drafted."""
        for step in self.steps:
            yield step - 1, True
            yield 1, False  # the bonus token


@dataclass
class Comparison:
    """A task, decoded plainly and with drafts."""

    task: Task
    prompt_length: int
    drafter: RecordedDrafts
    plain_ids: list[int]
    drafted_ids: list[int]
    plain_seconds: float = 0.0
    drafted_seconds: float = 0.0

    @property
    def new_tokens(self) -> int:
        return len(self.plain_ids) - self.prompt_length

    @property
    def identical(self) -> bool:
        return self.plain_ids == self.drafted_ids


class Demo:
    """Decodes tasks with one model and prints what comes of them.

    Args:
        model (`PreTrainedModel`): The target model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        max_new_tokens (`int`): The maximum number of new tokens of a task.
        color (`bool`): Whether drafted tokens are printed in green.
        store ([`Datastore`], *optional*): A datastore to draft from as well.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        color: bool,
        store: Datastore | None = None,
    ) -> None:
        self.comparisons: list[Comparison] = []
        self._model = model
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._color = color
        self._store = store

    def run(self, tasks: list[Task]) -> bool:
        """Decodes and prints all tasks; returns whether all ids were identical."""
        warmup()
        self._compare(tasks[0], max_new_tokens=4, rounds=1)  # the first call pays for the probe
        for task in tasks:
            comparison = self._compare(task, self._max_new_tokens, ROUNDS)
            self.comparisons.append(comparison)
            self._print(comparison)
        self._print_summary()
        return all(comparison.identical for comparison in self.comparisons)

    def _compare(self, task: Task, max_new_tokens: int, rounds: int) -> Comparison:
        """Plain and drafted in turn, so that other processes disturb both alike."""
        inputs = self._tokenizer(task.prompt, return_tensors="pt", return_token_type_ids=False)
        inputs = inputs.to(self._model.device)
        options = {**inputs, "max_new_tokens": max_new_tokens, "do_sample": task.sampled}
        if task.sampled:  # decoded greedily, a small model soon repeats itself
            options |= {"temperature": 0.7, "top_p": 0.9}
        sources: list[Drafter] = [ReferenceCopy()]
        if self._store is not None:
            sources.append(DatastoreDrafts(self._store))
        drafter = RecordedDrafts(sources)
        comparison = Comparison(task, inputs["input_ids"].shape[1], drafter, [], [])
        for _ in range(rounds):
            torch.manual_seed(0)
            began = perf_counter()
            comparison.plain_ids = self._model.generate(**options)[0].tolist()
            torch.manual_seed(0)
            middle = perf_counter()
            output = self._model.generate(
                **options, custom_generate=speculate, candidate_generator=drafter
            )
            comparison.drafted_ids = output[0].tolist()
            comparison.plain_seconds += middle - began
            comparison.drafted_seconds += perf_counter() - middle
        return comparison

    def _print(self, comparison: Comparison) -> None:
        last_lines = "".join(comparison.task.prompt.splitlines(keepends=True)[-4:])
        print(styled(f"── {comparison.task.title} ", DIM, self._color))
        print(styled(f"…\n{last_lines}", DIM, self._color), end="")
        print(self._colored_output(comparison))
        tokens = comparison.new_tokens * ROUNDS
        drafters = "ReferenceCopy()" + (" | DatastoreDrafts(store)" if self._store else "")
        print(
            f"   {comparison.new_tokens} tokens: plain {tokens / comparison.plain_seconds:.0f} "
            f"tokens/s, with {drafters} {tokens / comparison.drafted_seconds:.0f} tokens/s, "
            f"{comparison.plain_seconds / comparison.drafted_seconds:.1f}x, "
            f"MAT {comparison.drafter.stats.mat:.1f}, "
            f"{verdict(comparison.plain_ids, comparison.drafted_ids)}\n",
            flush=True,
        )

    def _colored_output(self, comparison: Comparison) -> str:
        ids = comparison.drafted_ids[comparison.prompt_length :]
        text, end, pieces = "", 0, []
        for length, drafted in comparison.drafter.runs():
            end += length
            so_far = self._tokenizer.decode(ids[:end], skip_special_tokens=True)
            pieces.append(styled(so_far[len(text) :], GREEN if drafted else "", self._color))
            text = so_far
        return "".join(pieces)

    def _print_summary(self) -> None:
        plain = sum(comparison.plain_seconds for comparison in self.comparisons)
        drafted = sum(comparison.drafted_seconds for comparison in self.comparisons)
        stats = [comparison.drafter.stats for comparison in self.comparisons]
        mat = sum(each.tokens for each in stats) / sum(each.forward_passes for each in stats)
        same = sum(comparison.identical for comparison in self.comparisons)
        if self._color:
            print(f"Tokens in {styled('green', GREEN, True)} were drafted by look-up and accepted.")
        print(
            f"All together: {plain / drafted:.1f}x plain generate, {mat:.1f} tokens a forward pass "
            f"(MAT), ids identical in {same} of {len(self.comparisons)}."
        )
