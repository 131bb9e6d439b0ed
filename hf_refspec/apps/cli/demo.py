"""`hf-refspec demo`: a model answers with drafts and plainly, and says how the drafts came out."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...generation.default_drafter import default_sources
from ...generation.warmup import warmup
from ..shared.comparison import PLAIN, Comparison, Methods, first_difference, rate, speedup
from ..shared.live_drafts import AnswerStream, LiveDrafts, Terminal, legend, without_controls
from ..shared.loading import load_model, load_tokenizer
from ..shared.prompts import (
    assistant,
    chat_inputs,
    check_chat_template,
    system,
    user,
    with_document,
)
from ..shared.scenes import Scene, built_in_scenes, scenes_of_file
from .arguments import add_model, positive, quieten_transformers, read_text

DRAFTED = "drafted"
EXCERPT_LINES = 8
_SMALL = 1e9  # parameters


def add_demo(parser: ArgumentParser) -> None:
    parser.epilog = "The model decodes in float32, so that all ids are equal."
    add = parser.add_argument
    add("--file", type=Path, help="your own text or code for the first two scenes")
    add_model(parser, dtype=False)
    add("--max-new-tokens", type=positive, default=160, metavar="N")
    add("--svg", type=Path, metavar="FILE", help="write a picture of the output as well")


def demo(args: Namespace) -> int:
    """Returns 1 if ids differed."""
    quieten_transformers()
    if args.svg is not None and not args.svg.parent.is_dir():
        raise ValueError(
            f"--svg {args.svg} cannot be written: there is no folder {args.svg.parent}"
        )
    tokenizer = load_tokenizer(args.model)
    check_chat_template(tokenizer, args.model, "choose a --model with one")
    if args.file is None:
        scenes = built_in_scenes()
    else:
        scenes = scenes_of_file(read_text(args.file, "--file"), args.file.name, tokenizer)
    model = load_model(args.model, args.device_map, torch.float32)
    console = Terminal() if args.svg is None else Terminal(record=True, width=100)
    demo = Demo(model, tokenizer, args.max_new_tokens, console)
    with demo.waiting("warming up"):  # loads the kernels, probes and measures the model
        warmup()
        demo.comparison.warm_up()
    demo.print_model()
    for scene in scenes:
        demo.show(scene)
    console.print(demo.comparison.table())
    if args.svg is not None:
        console.save_svg(str(args.svg), title="hf-refspec demo")
    return int(demo.comparison.equal(DRAFTED) < len(demo.comparison.calls[DRAFTED]))


class Demo:
    """Shows scenes with one model."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        console: Console,
    ) -> None:
        self.tokenizer, self.console = tokenizer, console

        def methods() -> Methods:
            return {PLAIN: {}, DRAFTED: {"candidate_generator": LiveDrafts(default_sources())}}

        options = {"max_new_tokens": max_new_tokens, "do_sample": False}
        self.comparison = Comparison(model, methods, **options)
        self.drafter: LiveDrafts = self.comparison.methods[DRAFTED]["candidate_generator"]

    def show(self, scene: Scene) -> None:
        """Streams the drafted answer of each turn, and then decodes the same without drafts."""
        self.console.print(Rule(Text(scene.title, "bold"), align="left", style="dim"))
        if scene.document is not None:
            self._print_document(scene.document)
        messages = [] if scene.system is None else [system(scene.system)]
        for number, question in enumerate(scene.questions, 1):
            name = scene.name if len(scene.questions) == 1 else f"{scene.name} {number}"
            document = scene.document if number == 1 else None
            messages.append(user(with_document(document, question)))
            inputs = chat_inputs(self.tokenizer, messages).to(self.comparison.model.device)
            self.console.print(Text(f"> {without_controls(question)}", "bold"))
            stream = AnswerStream(self.console, self.tokenizer)
            self.drafter.listener = stream.put
            drafted = self.comparison.call(DRAFTED, inputs)
            self.drafter.listener = None
            stream.end()
            with self.waiting("the same without drafts"):
                plain = self.comparison.call(PLAIN, inputs)
            self.comparison.record({PLAIN: plain, DRAFTED: drafted})
            self.console.print(legend(self.drafter.stats))
            place = first_difference(plain.ids, drafted.ids)
            verdict = "ids identical" if place is None else f"IDS DIFFER from position {place}"
            summary = (
                f"{name}: plain {rate([plain]):.1f} tokens/s, drafted {rate([drafted]):.1f} "
                f"tokens/s: {speedup([plain], [drafted]):.2f}x; MAT {self.drafter.stats.mat:.2f}; "
                f"{verdict}"
            )
            self.console.print(Text(summary, "bold"), end="\n\n")
            text = self.tokenizer.decode(drafted.ids, skip_special_tokens=True)
            messages.append(assistant(text))

    def waiting(self, message: str) -> AbstractContextManager[object]:
        """Shows on a terminal what is going on; a pipe and a picture get none of it."""
        if not self.console.is_terminal or self.console.record:
            return nullcontext()
        # Seldom redrawn: redrawing takes time from the decoding that is measured.
        return self.console.status(Text(f"{message} …", "dim"), refresh_per_second=1)

    def print_model(self) -> None:
        """Which model answers, and what to expect of one of its size."""
        model = self.comparison.model
        name = Path(model.config.name_or_path).name
        threads, parameters = torch.get_num_threads(), model.num_parameters()
        on_cpu = f"the CPU ({threads} thread{'s' if threads > 1 else ''})"
        colors = self.console.color_system is not None and not self.console.no_color
        parts = [
            f"[bold]{escape(name)}[/], {parameters / 1e6:,.0f} million parameters, float32, on "
            f"{on_cpu if model.device.type == 'cpu' else 'a GPU'}."
        ]
        if parameters < _SMALL:
            parts.append("A model of this size knows little and often errs.")
        parts.append("Drafts change none of its words, only how soon they come.")
        if colors or self.console.record:
            parts.append("Coloured words were drafted by look-up, and accepted by the model.")
        self.console.print(" ".join(parts), end="\n\n")

    def _print_document(self, document: str) -> None:
        """The first lines of the text in the prompt, and how long it is."""
        tokens = len(self.tokenizer(document, add_special_tokens=False)["input_ids"])
        text = Text(without_controls(document.strip()).expandtabs(4), "dim")
        lines = text.wrap(self.console, self.console.width)
        for line in lines[:EXCERPT_LINES]:
            self.console.print(line)
        more = "… " if len(lines) > EXCERPT_LINES else ""
        self.console.print(Text(f"{more}({tokens} tokens in the prompt)", "dim"))
