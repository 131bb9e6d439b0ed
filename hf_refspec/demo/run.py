"""The demo: a model completes and edits Python files, plainly and with drafts, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
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
from .default_model import load_model, load_tokenizer
from .terminal import DIM, GREEN, styled, takes_color, verdict

PIECE_TOKENS = (200, 450)  # what an edit is about
CONTEXT_TOKENS = 600  # what a completion reads
ROUNDS = 2


@dataclass(frozen=True)
class Task:
    """A title, the prompt that the model goes on from, and whether it samples."""

    title: str
    prompt: str
    sampled: bool = False


def heldout_tasks(tokenizer: PreTrainedTokenizerBase) -> list[Task]:
    """Three edits and a completion of standard library files that the model was not trained on."""
    edits, completions = [], []
    for path in corpus.heldout_files():
        tasks = file_tasks(path, tokenizer)
        if len(tasks) == 2:  # long enough for both
            edits.append(tasks[0])
            completions.append(tasks[1])
        if len(edits) == 4:
            break
    return [*edits[:3], *completions[3:]]


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
    for piece in islice(_pieces(source, tokenizer), 1):
        names = corpus.renamable_identifiers(piece)
        old = max(names, key=piece.count)
        title = f"{path.name}: rename {old} to new_{old}"
        tasks.append(Task(title, corpus.rename_prompt(piece, old, f"new_{old}")))
    ids = tokenizer(source, add_special_tokens=False)["input_ids"]
    context = tokenizer.decode(ids[: min(len(ids) // 2 + 1, CONTEXT_TOKENS)])
    tasks.append(Task(f"{path.name}: complete it, sampled", context, sampled=True))
    return tasks


def _pieces(source: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Whole neighbouring top-level blocks of a fit size that have something to rename."""
    low, high = PIECE_TOKENS
    piece, size = "", 0
    for block in corpus.top_level_blocks(source):
        block_size = len(tokenizer(block)["input_ids"])
        if size + block_size > high:
            piece, size = "", 0
        if block_size <= high:
            piece, size = piece + block, size + block_size
        if size >= low and corpus.renamable_identifiers(piece):
            yield piece.strip("\n\f")
            piece, size = "", 0


class RecordedDrafts(Blend):
    """A [`Blend`] that remembers which tokens of the output were its own drafts."""

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
        """The output as runs of tokens: how many, and whether they were copied."""
        for step in self.steps:
            yield step - 1, True
            yield 1, False


@dataclass
class Comparison:
    """One task, plainly and with drafts."""

    task: Task
    prompt_length: int
    plain_ids: list[int]
    drafted_ids: list[int]
    drafter: RecordedDrafts
    plain_seconds: float = 0.0
    drafted_seconds: float = 0.0

    @property
    def new_tokens(self) -> int:
        return len(self.plain_ids) - self.prompt_length

    @property
    def identical(self) -> bool:
        return self.plain_ids == self.drafted_ids

    @property
    def verdict(self) -> str:
        return verdict(self.plain_ids, self.drafted_ids)


@dataclass
class Demo:
    """Runs tasks with one model and prints what comes of them.

    Args:
        model (`PreTrainedModel`): The target model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        max_new_tokens (`int`): The most that a task generates.
        color (`bool`): Whether copied tokens are printed in green.
        store ([`Datastore`], *optional*): A datastore to draft from as well.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    color: bool
    store: Datastore | None = None
    comparisons: list[Comparison] = field(default_factory=list)

    def run(self, tasks: list[Task]) -> bool:
        """Runs and prints them; returns whether all ids were identical."""
        warmup()
        self._compare(tasks[0], max_new_tokens=4, rounds=1)  # the first call pays for the probe
        for task in tasks:
            comparison = self._compare(task, self.max_new_tokens, ROUNDS)
            self.comparisons.append(comparison)
            self._print(comparison)
        self._print_summary()
        return all(comparison.identical for comparison in self.comparisons)

    def _compare(self, task: Task, max_new_tokens: int, rounds: int) -> Comparison:
        """Plain and drafted in turn, so that both meet the same noise of the machine."""
        inputs = self.tokenizer(task.prompt, return_tensors="pt", return_token_type_ids=False)
        inputs = inputs.to(self.model.device)
        options = {**inputs, "max_new_tokens": max_new_tokens, "do_sample": task.sampled}
        if task.sampled:  # left to its best guesses, a small model soon repeats itself
            options |= {"temperature": 0.7, "top_p": 0.9}
        drafter = RecordedDrafts(self._sources())
        comparison = Comparison(task, inputs["input_ids"].shape[1], [], [], drafter)
        for _ in range(rounds):
            torch.manual_seed(0)
            began = perf_counter()
            plain = self.model.generate(**options)[0].tolist()
            torch.manual_seed(0)
            middle = perf_counter()
            drafted = self.model.generate(
                **options, custom_generate=speculate, candidate_generator=drafter
            )[0].tolist()
            comparison.plain_seconds += middle - began
            comparison.drafted_seconds += perf_counter() - middle
            comparison.plain_ids, comparison.drafted_ids = plain, drafted
        return comparison

    def _drafters(self) -> str:
        return "ReferenceCopy() | DatastoreDrafts(store)" if self.store else "ReferenceCopy()"

    def _sources(self) -> list[Drafter]:
        copy = ReferenceCopy()
        return [copy, DatastoreDrafts(self.store)] if self.store else [copy]

    def _print(self, comparison: Comparison) -> None:
        print(styled(f"── {comparison.task.title} ", DIM, self.color))
        print(styled(_last_lines(comparison.task.prompt, 4), DIM, self.color), end="")
        print(self._colored_output(comparison))
        tokens = comparison.new_tokens * ROUNDS
        print(
            f"   {comparison.new_tokens} tokens: plain {tokens / comparison.plain_seconds:.0f} "
            f"tokens/s, with {self._drafters()} "
            f"{tokens / comparison.drafted_seconds:.0f} tokens/s, "
            f"{comparison.plain_seconds / comparison.drafted_seconds:.1f}x, "
            f"MAT {comparison.drafter.stats.mat:.1f}, {comparison.verdict}\n",
            flush=True,
        )

    def _colored_output(self, comparison: Comparison) -> str:
        ids = comparison.drafted_ids[comparison.prompt_length :]
        text, end, pieces = "", 0, []
        for length, copied in comparison.drafter.runs():
            end += length
            so_far = self.tokenizer.decode(ids[:end], skip_special_tokens=True)
            pieces.append(styled(so_far[len(text) :], GREEN if copied else "", self.color))
            text = so_far
        return "".join(pieces)

    def _print_summary(self) -> None:
        plain = sum(comparison.plain_seconds for comparison in self.comparisons)
        drafted = sum(comparison.drafted_seconds for comparison in self.comparisons)
        stats = [comparison.drafter.stats for comparison in self.comparisons]
        mat = sum(each.tokens for each in stats) / sum(each.forward_passes for each in stats)
        same = sum(comparison.identical for comparison in self.comparisons)
        if self.color:
            print(f"Tokens in {styled('green', GREEN, True)} were drafted by look-up and accepted.")
        print(
            f"All together: {plain / drafted:.1f}x plain generate, {mat:.1f} tokens a forward pass "
            f"(MAT), ids identical in {same} of {len(self.comparisons)}."
        )


def _last_lines(text: str, count: int) -> str:
    return "…\n" + "".join(text.splitlines(keepends=True)[-count:])


def run_demo(
    file: Path | None = None,
    model: str | None = None,
    max_new_tokens: int = 160,
    color: bool | None = None,
    datastore: bool = False,
) -> bool:
    """Loads the model, makes the tasks and runs them.

    Args:
        file (`Path`, *optional*): A file to edit and complete; else files of the standard library
            that the bundled model has not been trained on.
        model (`str`, *optional*): A folder or a Hub id; else the bundled model.
        max_new_tokens (`int`, *optional*, defaults to 160): The most that a task generates.
        color (`bool`, *optional*): Whether to colour; else only on a terminal.
        datastore (`bool`, *optional*, defaults to `False`): Whether to draft from a datastore as
            well: those files of the standard library that the bundled model was trained on.

    Returns:
        `bool`: Whether all ids were identical.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is empty, or the model cannot be loaded.
    """
    color = takes_color() if color is None else color
    tokenizer = load_tokenizer(model)
    tasks = file_tasks(file, tokenizer) if file else heldout_tasks(tokenizer)
    target = load_model(model)
    if not datastore:
        return Demo(target, tokenizer, max_new_tokens, color).run(tasks)
    with TemporaryDirectory() as folder:
        files = corpus.training_files()
        store = Datastore.build(files, tokenizer, Path(folder) / "store", progress=False)
        return Demo(target, tokenizer, max_new_tokens, color, store).run(tasks)
