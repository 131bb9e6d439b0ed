"""The demo: a model answers plainly and with drafts, and prints how the drafts came out."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from ...drafting.stats import SpeculationStats
from ...generation.default_drafter import default_sources
from ...generation.speculate import speculate
from ...generation.warmup import warmup
from ..shared.console import verdict
from ..shared.live_drafts import AnswerStream, LiveDrafts, legend, without_controls
from ..shared.prompts import Message, assistant, chat_inputs, system, user
from ..shared.scenes import Scene

EXCERPT_LINES = 8
_WARMUP_TOKENS = 12
_SMALL = 1e9  # parameters
_OF_A_SMALL_MODEL = "A model of this size knows little and often errs. "
_DRAFTS = "Drafts change none of its words, only how soon they come. "
_COLORS = "Coloured words were drafted by look-up, and accepted by the model. "
_COLUMNS = ("scene", "tokens", "plain tokens/s", "drafted tokens/s", "speed-up", "MAT", "ids")


@dataclass(frozen=True)
class Answer:
    """One answer, decoded plainly and with drafts.

    Attributes:
        scene (`str`): The name of its scene, numbered if it has several.
        plain_ids, drafted_ids (`list[int]`): The new tokens.
        plain_seconds, drafted_seconds (`float`): What they took.
        stats ([`SpeculationStats`]): Of the drafted call.
    """

    scene: str
    plain_ids: list[int]
    drafted_ids: list[int]
    plain_seconds: float
    drafted_seconds: float
    stats: SpeculationStats

    @property
    def identical(self) -> bool:
        return self.plain_ids == self.drafted_ids


class Demo:
    """Shows scenes with one model.

    Args:
        model (`PreTrainedModel`): The target model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        max_new_tokens (`int`): The most tokens of an answer.
        console (`Console`): Where to print.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        console: Console,
    ) -> None:
        self.answers: list[Answer] = []
        self._model = model
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._console = console
        self._drafter = LiveDrafts(default_sources())

    def run(self, scenes: Iterable[Scene]) -> bool:
        """Shows all scenes and a table; returns whether all ids were identical."""
        self._warm_up()
        self._print_model()
        for scene in scenes:
            self._show(scene)
        self._console.print(self._table())
        return all(answer.identical for answer in self.answers)

    def _warm_up(self) -> None:
        """Whatever happens once in a process: kernels are loaded, the model is probed and timed."""
        with self._waiting("warming up"):
            warmup()
            inputs = self._inputs([user("Repeat: one two three one two three one two three")])
            self._decode(inputs, drafted=False, max_new_tokens=_WARMUP_TOKENS)
            self._decode(inputs, drafted=True, max_new_tokens=_WARMUP_TOKENS)

    def _show(self, scene: Scene) -> None:
        self._console.print(Rule(Text(scene.title, "bold"), align="left", style="dim"))
        self._print_document(scene)
        messages = [] if scene.system is None else [system(scene.system)]
        for name, question, message in scene.turns():
            messages.append(message)
            self._console.print(Text(f"> {without_controls(question)}", "bold"))
            inputs = self._inputs(messages)
            answer = self._answer(name, inputs)
            self.answers.append(answer)
            self._console.print(legend(answer.stats))
            self._console.print(Text(_summary(answer), "bold"))
            self._console.print()
            text = self._tokenizer.decode(answer.drafted_ids, skip_special_tokens=True)
            messages.append(assistant(text))

    def _answer(self, scene: str, inputs: BatchEncoding) -> Answer:
        """Streams the drafted answer, and then decodes the same without drafts."""
        stream = AnswerStream(self._console, self._tokenizer)
        self._drafter.listener = stream.put
        drafted_ids, drafted_seconds = self._decode(inputs, drafted=True)
        self._drafter.listener = None
        stream.end()
        with self._waiting("the same without drafts"):
            plain_ids, plain_seconds = self._decode(inputs, drafted=False)
        return Answer(
            scene, plain_ids, drafted_ids, plain_seconds, drafted_seconds, self._drafter.stats
        )

    def _decode(
        self, inputs: BatchEncoding, drafted: bool, max_new_tokens: int | None = None
    ) -> tuple[list[int], float]:
        """The new ids of an answer, greedily, and the seconds that they took."""
        drafting = {"custom_generate": speculate, "candidate_generator": self._drafter}
        began = perf_counter()
        output = self._model.generate(
            **inputs,
            max_new_tokens=max_new_tokens or self._max_new_tokens,
            do_sample=False,
            **(drafting if drafted else {}),
        )
        new_ids = output[0, inputs["input_ids"].shape[1] :].tolist()
        return new_ids, perf_counter() - began

    def _inputs(self, messages: list[Message]) -> BatchEncoding:
        return chat_inputs(self._tokenizer, messages).to(self._model.device)

    def _waiting(self, message: str) -> AbstractContextManager[object]:
        """Says what is going on; a pipe and a picture get none of it."""
        if not self._console.is_terminal or self._console.record:
            return nullcontext()
        # Seldom redrawn: that takes time from what it waits for, which is measured.
        return self._console.status(Text(f"{message} …", "dim"), refresh_per_second=1)

    def _print_model(self) -> None:
        """Which model answers, and what to expect of one of its size."""
        model = self._model
        name = Path(model.config.name_or_path).name
        threads, parameters = torch.get_num_threads(), model.num_parameters()
        on_cpu = f"the CPU ({threads} thread{'s' if threads > 1 else ''})"
        colors = self._console.color_system is not None and not self._console.no_color
        self._console.print(
            f"[bold]{escape(name)}[/], {parameters / 1e6:,.0f} million parameters, "
            f"{str(model.dtype).removeprefix('torch.')}, on "
            f"{on_cpu if model.device.type == 'cpu' else 'a GPU'}. "
            f"{_OF_A_SMALL_MODEL if parameters < _SMALL else ''}{_DRAFTS}"
            f"{_COLORS if colors or self._console.record else ''}\n"
        )

    def _print_document(self, scene: Scene) -> None:
        """The first lines of the text that stands in the prompt, and how long it is."""
        if scene.document is None:
            return
        tokens = len(self._tokenizer(scene.document, add_special_tokens=False)["input_ids"])
        text = Text(without_controls(scene.document.strip()).expandtabs(4), "dim")
        lines = text.wrap(self._console, self._console.width)
        for line in lines[:EXCERPT_LINES]:
            self._console.print(line)
        more = "… " if len(lines) > EXCERPT_LINES else ""
        self._console.print(Text(f"{more}({tokens} tokens in the prompt)", "dim"))

    def _table(self) -> Table:
        table = Table(box=SIMPLE_HEAD, show_footer=True)
        for column, footer in zip(_COLUMNS, self._totals(), strict=True):
            justify: Any = "left" if column == "scene" else "right"
            table.add_column(column, footer=footer, justify=justify, vertical="bottom")
        for answer in self.answers:
            tokens = len(answer.drafted_ids)
            rates = _rates(tokens, answer.plain_seconds, answer.drafted_seconds)
            ids = "identical" if answer.identical else "DIFFER"
            table.add_row(answer.scene, str(tokens), *rates, f"{answer.stats.mat:.2f}", ids)
        return table

    def _totals(self) -> list[str]:
        stats = SpeculationStats()
        for answer in self.answers:
            stats += answer.stats
        plain = sum(answer.plain_seconds for answer in self.answers)
        drafted = sum(answer.drafted_seconds for answer in self.answers)
        same = sum(answer.identical for answer in self.answers)
        rates = _rates(stats.tokens, plain, drafted)
        ids = f"{same} of {len(self.answers)}"
        return ["together", str(stats.tokens), *rates, f"{stats.mat:.2f}", ids]


def _summary(answer: Answer) -> str:
    plain, drafted, speedup = _rates(
        len(answer.drafted_ids), answer.plain_seconds, answer.drafted_seconds
    )
    return (
        f"plain {plain} tokens/s, drafted {drafted} tokens/s: {speedup}; "
        f"MAT {answer.stats.mat:.2f}; {verdict(answer.plain_ids, answer.drafted_ids)}"
    )


def _rates(tokens: int, plain: float, drafted: float) -> tuple[str, str, str]:
    """Tokens per second plainly and drafted, and the speed-up."""
    return f"{tokens / plain:.1f}", f"{tokens / drafted:.1f}", f"{plain / drafted:.2f}x"
