"""The demo: a model answers plainly and with drafts, and prints how the drafts came out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

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
from ..shared.comparison import Decoded, decode, rate, speedup, verdict
from ..shared.live_drafts import AnswerStream, LiveDrafts, legend, without_controls
from ..shared.prompts import Message, assistant, chat_inputs, system, user
from ..shared.scenes import Scene

EXCERPT_LINES = 8
_WARMUP_TOKENS = 12
_SMALL = 1e9  # parameters
_OF_A_SMALL_MODEL = "A model of this size knows little and often errs. "
_DRAFTS = "Drafts change none of its words, only how soon they come. "
_COLORS = "Coloured words were drafted by look-up, and accepted by the model. "
_COLUMNS = ("tokens", "plain tokens/s", "drafted tokens/s", "speed-up", "MAT", "ids")


@dataclass(frozen=True)
class Answer:
    """One answer of a scene, decoded plainly and with drafts."""

    scene: str
    plain: Decoded
    drafted: Decoded
    stats: SpeculationStats

    @property
    def identical(self) -> bool:
        return self.plain.ids == self.drafted.ids


@dataclass
class Demo:
    """Shows scenes with one model."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    console: Console
    answers: list[Answer] = field(default_factory=list)
    _drafter: LiveDrafts = field(default_factory=lambda: LiveDrafts(default_sources()))

    def run(self, scenes: Iterable[Scene]) -> bool:
        """Shows all scenes and a table; returns whether all ids were identical."""
        with self._waiting("warming up"):  # loads the kernels, probes and measures the model
            warmup()
            inputs = self._inputs([user("Repeat: one two three one two three one two three")])
            for drafted in (False, True):
                self._decode(inputs, drafted, _WARMUP_TOKENS)
        self._print_model()
        for scene in scenes:
            self._show(scene)
        self.console.print(self._table())
        return all(answer.identical for answer in self.answers)

    def _show(self, scene: Scene) -> None:
        """Streams the drafted answer of each turn, and then decodes the same without drafts."""
        self.console.print(Rule(Text(scene.title, "bold"), align="left", style="dim"))
        self._print_document(scene)
        messages = [] if scene.system is None else [system(scene.system)]
        for name, question, message in scene.turns():
            messages.append(message)
            self.console.print(Text(f"> {without_controls(question)}", "bold"))
            inputs = self._inputs(messages)
            stream = AnswerStream(self.console, self.tokenizer)
            self._drafter.listener = stream.put
            drafted = self._decode(inputs, True, self.max_new_tokens)
            self._drafter.listener = None
            stream.end()
            with self._waiting("the same without drafts"):
                plain = self._decode(inputs, False, self.max_new_tokens)
            answer = Answer(name, plain, drafted, self._drafter.stats)
            self.answers.append(answer)
            self.console.print(legend(answer.stats))
            _, slow, fast, faster, mat = _figures([answer], answer.stats)
            figures = f"plain {slow} tokens/s, drafted {fast} tokens/s: {faster}; MAT {mat}"
            summary = f"{figures}; {verdict(plain.ids, drafted.ids)}"
            self.console.print(Text(summary, "bold"), end="\n\n")
            text = self.tokenizer.decode(drafted.ids, skip_special_tokens=True)
            messages.append(assistant(text))

    def _decode(self, inputs: BatchEncoding, drafted: bool, max_new_tokens: int) -> Decoded:
        drafting = {"custom_generate": speculate, "candidate_generator": self._drafter}
        options = {"max_new_tokens": max_new_tokens, "do_sample": False}
        return decode(self.model, inputs, **options, **(drafting if drafted else {}))

    def _inputs(self, messages: list[Message]) -> BatchEncoding:
        return chat_inputs(self.tokenizer, messages).to(self.model.device)

    def _waiting(self, message: str) -> AbstractContextManager[object]:
        """Shows on a terminal what is going on; a pipe and a picture get none of it."""
        if not self.console.is_terminal or self.console.record:
            return nullcontext()
        # Seldom redrawn: redrawing takes time from the decoding that is measured.
        return self.console.status(Text(f"{message} …", "dim"), refresh_per_second=1)

    def _print_model(self) -> None:
        """Which model answers, and what to expect of one of its size."""
        model = self.model
        name = Path(model.config.name_or_path).name
        threads, parameters = torch.get_num_threads(), model.num_parameters()
        on_cpu = f"the CPU ({threads} thread{'s' if threads > 1 else ''})"
        colors = self.console.color_system is not None and not self.console.no_color
        self.console.print(
            f"[bold]{escape(name)}[/], {parameters / 1e6:,.0f} million parameters, "
            f"{str(model.dtype).removeprefix('torch.')}, on "
            f"{on_cpu if model.device.type == 'cpu' else 'a GPU'}. "
            f"{_OF_A_SMALL_MODEL if parameters < _SMALL else ''}{_DRAFTS}"
            f"{_COLORS if colors or self.console.record else ''}\n"
        )

    def _print_document(self, scene: Scene) -> None:
        """The first lines of the text in the prompt, and how long it is."""
        if scene.document is None:
            return
        tokens = len(self.tokenizer(scene.document, add_special_tokens=False)["input_ids"])
        text = Text(without_controls(scene.document.strip()).expandtabs(4), "dim")
        lines = text.wrap(self.console, self.console.width)
        for line in lines[:EXCERPT_LINES]:
            self.console.print(line)
        more = "… " if len(lines) > EXCERPT_LINES else ""
        self.console.print(Text(f"{more}({tokens} tokens in the prompt)", "dim"))

    def _table(self) -> Table:
        """A row for each answer, and one for all together."""
        together = SpeculationStats()
        for answer in self.answers:
            together += answer.stats
        same = f"{sum(answer.identical for answer in self.answers)} of {len(self.answers)}"
        footers = [*_figures(self.answers, together), same]
        table = Table(box=SIMPLE_HEAD, show_footer=True)
        table.add_column("scene", "together", vertical="bottom")
        for column, footer in zip(_COLUMNS, footers, strict=True):
            table.add_column(column, footer, justify="right", vertical="bottom")
        for answer in self.answers:
            ids = "identical" if answer.identical else "DIFFER"
            table.add_row(answer.scene, *_figures([answer], answer.stats), ids)
        return table


def _figures(answers: Sequence[Answer], stats: SpeculationStats) -> list[str]:
    """Tokens, tokens per second plainly and drafted, speed-up and MAT of answers together."""
    plain, drafted = [each.plain for each in answers], [each.drafted for each in answers]
    rates = [f"{rate(calls):.1f}" for calls in (plain, drafted)]
    return [str(stats.tokens), *rates, f"{speedup(plain, drafted):.2f}x", f"{stats.mat:.2f}"]
