"""`hf-refspec demo`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch

from ..demo.run import Demo
from ..shared.console import Terminal
from ..shared.loading import load_model, load_tokenizer
from ..shared.prompts import check_chat_template
from ..shared.scenes import built_in_scenes, scenes_of_file
from .answering import quieten_transformers, read_text
from .arguments import add_device_map, positive


def add_demo(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_demo)
    add = parser.add_argument
    add("--file", type=Path, help="your own text or code for the first two scenes")
    add("--model", help="a folder or a Hub id, in float32; SmolLM2-135M-Instruct by default")
    add_device_map(parser)
    add("--max-new-tokens", type=positive, default=160, metavar="N")
    add("--svg", type=Path, metavar="FILE", help="write a picture of the output as well")


def _demo(args: Namespace) -> int:
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
    same = Demo(model, tokenizer, args.max_new_tokens, console).run(scenes)
    if args.svg is not None:
        console.save_svg(str(args.svg), title="hf-refspec demo")
    return 0 if same else 1
