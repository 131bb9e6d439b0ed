"""`hf-refspec ralm`: a model answers questions out of texts, and retrieves as it writes."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)

from ..demo.run import BUNDLED_MODEL, DIM, GREEN, RESET
from ..drafting.reference_copy import ReferenceCopy
from ..ralm.checked_search import RetrievalError
from ..ralm.iterative import iterative_ralm
from ..ralm.options import Speculation
from ..ralm.stats import RetrievalStats
from ..retrieval.bm25 import SparseRetriever
from ..retrieval.dense import DenseRetriever
from ..retrieval.retriever import Retriever
from ..store.build.text_encoder import load_encoder
from ..store.knowledge_base import KnowledgeBase

ROUNDS = 2
EXCERPT_LINES = 2
LITTLE_WAITING = 0.1  # of the time
DEFAULT_CHUNK_LENGTH = 256
SEARCHED, RIGHT, WRONG = "s", "+", "x"
RED = "\x1b[31m"
INDENT = " " * 12


def ralm(options: argparse.Namespace) -> int:
    """`hf-refspec ralm`; returns 1 if speculation has changed an answer."""
    _check(options)
    questions = _questions(options)
    tokenizer = AutoTokenizer.from_pretrained(options.model or BUNDLED_MODEL)
    encoder = None if options.encoder is None else load_encoder(options.encoder)
    # In float32 ids are equal to the last; in a shorter type near-ties may fall either way.
    dtype = torch.float32 if options.model is None else "auto"
    model = AutoModelForCausalLM.from_pretrained(options.model or BUNDLED_MODEL, dtype=dtype)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    with TemporaryDirectory() as folder:
        base = _knowledge_base(options, tokenizer, encoder, Path(folder) / "base")
        print(
            f"{len(base):,} passages of at most {base.config.chunk_length} tokens out of "
            f"{base.config.source.get('corpus') or 'texts'}, searched by {options.retriever}",
            flush=True,
        )
        retriever = _retriever(options.retriever, base, encoder)
        answers = Answers(model, base, retriever, options)
        if questions:
            for question in questions:
                answers.ask(question)
        else:
            _converse(answers)
        answers.print_summary()
    return 0 if all(comparison.identical for comparison in answers.comparisons) else 1


# --- what is asked for


def _check(options: argparse.Namespace) -> None:
    """Refuses what does not go together, before anything is loaded."""
    given = [bool(options.source), options.dataset is not None]
    if sum(given) > 1:
        raise ValueError("give files and folders or --dataset NAME, not both")
    if not any(given) and options.knowledge_base is None:
        raise ValueError(
            "give what to build a knowledge base from, files and folders or --dataset NAME, or one "
            "that there is, with --knowledge-base"
        )
    if not any(given) and options.chunk_length is not None:
        raise ValueError(
            f"--chunk-length {options.chunk_length} is for building: the passages of "
            f"--knowledge-base {options.knowledge_base} are cut already; leave it out"
        )
    if any(given) and options.knowledge_base is not None and Path(options.knowledge_base).exists():
        raise ValueError(
            f"--knowledge-base {options.knowledge_base} exists; leave the texts out to open it, or "
            "give a new path to build it at"
        )
    if options.retriever != "bm25" and options.encoder is None:
        raise ValueError(
            f"--retriever {options.retriever} needs --encoder, a sentence-transformers model "
            "(folder or Hub id); --retriever bm25 needs none"
        )
    if options.retriever == "bm25" and options.encoder is not None:
        raise ValueError(
            f"--encoder {options.encoder} is of no use to --retriever bm25; choose dense or hnsw"
        )
    Speculation.parse(options.speculation)


def _questions(options: argparse.Namespace) -> list[str]:
    """Those that were given; none if they are to be typed."""
    questions = list(options.question)
    if any(not question.strip() for question in questions):
        raise ValueError("--question is empty; give the text that the model is to go on from")
    if options.question_file is not None:
        lines = options.question_file.read_text(encoding="utf-8").splitlines()
        questions += [line for line in lines if line.strip()]
        if not questions:
            raise ValueError(f"--question-file {options.question_file} has no question in it")
    if not questions and not sys.stdin.isatty():
        raise ValueError(
            "there is no question and no terminal to type one: give --question or --question-file"
        )
    return questions


def _converse(answers: Answers) -> None:
    """Asks what is typed, until the end of the input."""
    print("Type a question, or Ctrl-D to end.")
    while True:
        try:
            question = input("> ")
        except EOFError:
            print()
            return
        try:
            if question.strip():
                answers.ask(question)
        except ValueError as error:  # one that is too long, say; the next may not be
            print(error, file=sys.stderr)


# --- what answers


def _knowledge_base(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, encoder: Any, temporary: Path
) -> KnowledgeBase:
    """Builds the knowledge base, or opens the one that there is."""
    if not options.source and options.dataset is None:
        try:
            return KnowledgeBase.from_pretrained(options.knowledge_base, tokenizer)
        except (OSError, ValueError) as error:
            raise ValueError(f"--knowledge-base cannot be opened: {error}") from error
    if options.dataset is not None:
        documents, corpus = _dataset(options), None
    else:
        documents = _text_files(options.source, options.pattern)
        corpus = ", ".join(path.resolve().name for path in options.source)
    return KnowledgeBase.build(
        documents,
        tokenizer,
        encoder,
        options.knowledge_base or temporary,
        chunk_length=options.chunk_length or DEFAULT_CHUNK_LENGTH,
        column=options.column,
        corpus=corpus,
    )


def _dataset(options: argparse.Namespace) -> Any:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError('--dataset needs datasets: pip install "hf_refspec[datastore]"') from None
    return load_dataset(options.dataset, options.config, split=options.split)


def _text_files(paths: list[Path], pattern: str) -> list[Path]:
    """The files with text in them, in order; hidden ones do not count.

    Raises:
        FileNotFoundError: If a path does not exist, or there is no such file.
        ValueError: If the pattern is none.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} is neither a file nor a folder")
        found += [path] if path.is_file() else _files_below(path, pattern)
    texts = [path for path in found if _is_text(path)]
    if not texts:
        names = ", ".join(map(str, paths))
        raise FileNotFoundError(
            f"there is no text in {names}: {len(found)} files match --pattern {pattern!r}, and "
            "none of them has text in it"
        )
    if len(texts) < len(found):
        print(f"left out {len(found) - len(texts):,} files that have no text", file=sys.stderr)
    return texts


def _files_below(folder: Path, pattern: str) -> list[Path]:
    try:
        below = [path.relative_to(folder) for path in folder.rglob(pattern) if path.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"--pattern {pattern!r} cannot be used: {error}") from error
    shown = [path for path in below if not any(part.startswith(".") for part in path.parts)]
    return [folder / path for path in sorted(shown, key=Path.as_posix)]


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(1 << 13)
    return bool(head.strip()) and b"\0" not in head


def _retriever(name: str, base: KnowledgeBase, encoder: Any) -> Retriever:
    if name == "bm25":
        return SparseRetriever(base)
    if base.embeddings is None:
        raise ValueError(
            f"--retriever {name} needs embeddings, and --knowledge-base {base.path} was built "
            "without an encoder; build another with --encoder, or take --retriever bm25"
        )
    retriever = DenseRetriever(base, encoder, index="flat" if name == "dense" else "hnsw")
    try:
        retriever.encode(base.passage(0))  # shows whether it is the encoder of these embeddings
    except ValueError as error:
        raise ValueError(f"--encoder does not fit --knowledge-base: {error}") from error
    return retriever


# --- answers, and how they came about


@dataclass(frozen=True)
class Run:
    """One call of `generate`: all ids, how long it took, and what was retrieved."""

    ids: list[int]
    seconds: float
    stats: RetrievalStats


@dataclass(frozen=True)
class Comparison:
    """The runs of one prompt: the baseline's, which wait for every search, and speculated ones."""

    prompt_length: int
    baseline: list[Run]
    speculated: list[Run]

    @property
    def identical(self) -> bool:
        return not self._others()

    @property
    def verdict(self) -> str:
        if self.identical:
            return "ids identical"
        pairs = zip(self.baseline[0].ids, self._others()[0], strict=False)
        first = next((i for i, (one, other) in enumerate(pairs) if one != other), "the end")
        return f"IDS DIFFER from position {first}"

    def _others(self) -> list[list[int]]:
        """The ids that are not those of the baseline."""
        runs = self.baseline + self.speculated
        return [run.ids for run in runs if run.ids != self.baseline[0].ids]


class Answers:
    """Answers questions and prints how the answers came about.

    Args:
        model (`PreTrainedModel`): The model. It decides by its own settings whether it samples.
        base ([`KnowledgeBase`]): Where the passages are.
        retriever ([`Retriever`]): What finds them.
        options (`argparse.Namespace`): Of the command.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        base: KnowledgeBase,
        retriever: Retriever,
        options: argparse.Namespace,
    ) -> None:
        self.comparisons: list[Comparison] = []
        self._model = model
        self._base = base
        self._tokenizer = base.tokenizer
        self._options = options
        self._drafter = ReferenceCopy() if options.copy else None
        self._common = {
            "custom_generate": iterative_ralm,
            "retriever": retriever,
            "tokenizer": base.tokenizer,
            "generation_stride": options.generation_stride,
            "max_new_tokens": options.max_new_tokens,
        }
        self._color = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def ask(self, question: str) -> None:
        """Prints the answer as it is written, and then what is to be known about it.

        Raises:
            ValueError: If the question does not fit into the model, or the retriever fails.
        """
        inputs = self._prompt(question)
        if self._options.question or self._options.question_file:
            print(self._styled(f"\n── {question}", DIM), flush=True)
        try:
            # What comes first warms up, and is shown while it is written.
            streamer = TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
            self._run(inputs, True, streamer)
            comparison = Comparison(inputs["input_ids"].shape[1], [], [])
            for _ in range(ROUNDS):  # in turn, so that both meet the same noise of the machine
                comparison.baseline.append(self._run(inputs, False))
                comparison.speculated.append(self._run(inputs, True))
        except RetrievalError as error:
            raise ValueError(str(error)) from error
        self.comparisons.append(comparison)
        self._print_passages(comparison.speculated[-1].stats)
        self._print_guesses(comparison.speculated[-1].stats)
        self._print_speed([comparison], comparison.verdict)

    def print_summary(self) -> None:
        """Prints the speed of all answers together, and what is to be said about it."""
        if len(self.comparisons) > 1:
            print(f"\nAll {len(self.comparisons)} answers together:")
            same = sum(comparison.identical for comparison in self.comparisons)
            self._print_speed(self.comparisons, f"ids identical in {same}")
        waiting = [run for comparison in self.comparisons for run in comparison.baseline]
        if waiting and _waiting_share(waiting) < LITTLE_WAITING:
            print(
                "\nSearches are so quick here that there is little to win: speculative retrieval "
                "pays where the\nmodel waits long for them, with many passages for example."
            )

    def _prompt(self, question: str) -> Any:
        """A chat for a model that was made for it; others go on from the question as it is."""
        if self._tokenizer.chat_template is not None:
            inputs = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
                tokenizer_kwargs={"return_token_type_ids": False},
            )
        else:
            inputs = self._tokenizer(question, return_tensors="pt", return_token_type_ids=False)
        return inputs.to(self._model.device)

    def _run(self, inputs: Any, speculating: bool, streamer: TextStreamer | None = None) -> Run:
        stats = RetrievalStats()
        torch.manual_seed(0)
        began = perf_counter()
        output = self._model.generate(
            **inputs,
            **self._common,
            speculation=self._options.speculation if speculating else None,
            drafter=self._drafter if speculating else None,
            retrieval_stats=stats,
            streamer=streamer,
        )
        ids = output[0].tolist()
        return Run(ids, perf_counter() - began, stats)

    def _print_passages(self, stats: RetrievalStats) -> None:
        """Each passage once, in the order in which they were used."""
        width = shutil.get_terminal_size().columns - len(INDENT)
        label = "passages"
        for passage_id in dict.fromkeys(stats.best_ids):
            steps = [i for i, best in enumerate(stats.best_ids, 1) if best == passage_id]
            self._print_row(label, f"{passage_id}, {_step_ranges(steps)} of {stats.steps}")
            for line in _excerpt(self._base.text(passage_id), width):
                print(INDENT + self._styled(line, DIM))
            label = ""

    def _print_guesses(self, stats: RetrievalStats) -> None:
        """A character a step: where the request cache was right."""
        marks = [RIGHT if right else WRONG for right in stats.speculation_was_right]
        marks[:1] = [SEARCHED]  # the first step has no cache to guess from
        tens = ("".join(marks[i : i + 10]) for i in range(0, len(marks), 10))
        line = " ".join(tens)
        for mark, style in ((RIGHT, GREEN), (WRONG, RED)):
            line = line.replace(mark, self._styled(mark, style))
        right, wrong = stats.verified, stats.mismatched
        self._print_row("guesses", f"{line}  {right} right ({RIGHT}), {wrong} wrong ({WRONG})")

    def _print_speed(self, comparisons: list[Comparison], verdict: str) -> None:
        waiting = [run for comparison in comparisons for run in comparison.baseline]
        speculating = [run for comparison in comparisons for run in comparison.speculated]
        tokens = sum(
            len(run.ids) - comparison.prompt_length
            for comparison in comparisons
            for run in comparison.baseline
        )
        slow, fast = (sum(run.seconds for run in runs) for runs in (waiting, speculating))
        self._print_row("speed", f"baseline    {tokens / slow:6.1f} tokens/s: {_shares(waiting)}")
        self._print_row("", f"speculated  {tokens / fast:6.1f} tokens/s: {_shares(speculating)}")
        self._print_row("", f"{slow / fast:.2f}x, {verdict}")

    def _print_row(self, label: str, text: str) -> None:
        print(f"  {label:<{len(INDENT) - 2}}{text}", flush=True)

    def _styled(self, text: str, style: str) -> str:
        return f"{style}{text}{RESET}" if self._color else text


def _shares(runs: list[Run]) -> str:
    """What retrieval cost of the time."""
    searches = sum(run.stats.searches for run in runs) // ROUNDS
    queries = sum(run.stats.query_seconds for run in runs) / sum(run.seconds for run in runs)
    return (
        f"{100 * _waiting_share(runs):.0f} % waiting for {searches} searches, "
        f"{100 * queries:.0f} % making queries"
    )


def _waiting_share(runs: list[Run]) -> float:
    """How much of the time went into waiting for searches."""
    return sum(run.stats.waiting_seconds for run in runs) / sum(run.seconds for run in runs)


def _step_ranges(steps: list[int]) -> str:
    """`[1, 2, 3, 7]` as "steps 1-3, 7"."""
    ranges = []
    for _, group in groupby(enumerate(steps), lambda pair: pair[1] - pair[0]):
        run = [step for _, step in group]
        ranges.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(ranges)


def _excerpt(text: str, width: int) -> list[str]:
    """The first lines of a passage, with nothing in them that a terminal would obey."""
    words = " ".join(text.split())
    printable = "".join(c if c.isprintable() else "�" for c in words)
    return textwrap.wrap(printable, max(width, 20), max_lines=EXCERPT_LINES, placeholder=" …")
