"""`hf-refspec demo`: a model answers with drafts and plainly, and both are compared."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
from rich.console import Console
from rich.rule import Rule
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ...drafting.auto import default_sources
from ..shared import prompts
from ..shared.comparison import UNDRAFTED, Comparison, Methods, first_difference
from ..shared.loading import load_model, load_tokenizer, name_for_people
from ..shared.prompts import SCENES, Scene
from ..shared.streams import AnswerStream, LiveDrafts, Terminal, legend, without_controls
from .arguments import add_assistants, add_model, assistants, positive

DRAFTED = "drafted"
EPILOG = "The model is loaded in float32, so that all ids are equal."


def add_demo(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser, dtype=False)
    add_assistants(parser)
    add("--max-new-tokens", type=positive, default=160, metavar="N", help="of each answer")
    add("--svg", type=Path, metavar="FILE", help="also write a picture of the output")


def demo(args: Namespace) -> int:
    """Returns 1 if ids differed."""
    if args.svg is not None and not args.svg.parent.is_dir():
        raise ValueError(f"--svg {args.svg} cannot be written: {args.svg.parent} is not a folder")
    tokenizer = load_tokenizer(args.model)
    prompts.check_chat_template(tokenizer, args.model, "choose a --model with one")
    of_model = assistants(args)
    model = load_model(args.model, args.device_map, torch.float32)

    def methods() -> Methods:
        drafter = LiveDrafts([*default_sources(), *of_model(model)])
        return {UNDRAFTED: {}, DRAFTED: {"candidate_generator": drafter}}

    comparison = Comparison(model, methods, max_new_tokens=args.max_new_tokens, do_sample=False)
    console = Terminal() if args.svg is None else Terminal(record=True, width=100)
    with Console(stderr=True).status("warming up …", refresh_per_second=1):
        comparison.warm_up()
    dtype = str(model.dtype).removeprefix("torch.")
    about = f"{model.num_parameters() / 1e6:,.0f} million parameters, {dtype}"
    console.print(
        f"{name_for_people(args.model)}, {about}, on {model.device}. A small model knows little "
        "and makes mistakes. Drafts change none of its words, only the speed: coloured words were "
        "drafted, and accepted by the model.",
        end="\n\n",
        markup=False,
    )
    for scene in SCENES:
        show(scene, comparison, tokenizer, console)
    console.print(comparison.table())
    if args.svg is not None:
        console.save_svg(str(args.svg), title="hf-refspec demo")
    return int(comparison.equal(DRAFTED) < len(comparison.calls[DRAFTED]))


def show(
    scene: Scene, comparison: Comparison, tokenizer: PreTrainedTokenizerBase, console: Terminal
) -> None:
    """Streams each turn's drafted answer, and then decodes it without drafts."""
    drafter: LiveDrafts = comparison.methods[DRAFTED]["candidate_generator"]
    console.print(Rule(Text(scene.title, "bold"), align="left", style="dim"))
    if scene.document:
        console.print(Text(without_controls(scene.document.strip()).expandtabs(4), "dim"))
    answers: list[str] = []
    for number, question in enumerate(scene.questions, 1):
        asked = scene.questions[:number]
        messages = prompts.chat_messages(asked, answers, scene.system, scene.document)
        inputs = prompts.chat_inputs(tokenizer, messages).to(comparison.model.device)
        console.print(Text(f"> {without_controls(question)}", "bold"))
        stream = AnswerStream(console, tokenizer)
        with drafter.heard_by(stream.put):
            drafted = comparison.call(DRAFTED, inputs)
        stream.end()
        # More redrawing would slow the decoding that is being measured.
        with Console(stderr=True).status("the same without drafts …", refresh_per_second=1):
            plain = comparison.call(UNDRAFTED, inputs)
        comparison.record({UNDRAFTED: plain, DRAFTED: drafted})
        console.print(legend(drafter.stats))
        place = first_difference(plain.ids, drafted.ids)
        verdict = "ids identical" if place is None else f"IDS DIFFER from position {place}"
        name = scene.name if len(scene.questions) == 1 else f"{scene.name} {number}"
        summary = (
            f"{name}: plain {plain.rate:.1f} tokens/s, drafted {drafted.rate:.1f} tokens/s: "
            f"{drafted.rate / plain.rate:.2f}x; MAT {drafter.stats.mat:.2f}; {verdict}"
        )
        console.print(Text(summary, "bold"), end="\n\n")
        answers.append(tokenizer.decode(drafted.ids, skip_special_tokens=True))
