"""`hf-refspec demo`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from ..demo import corpus
from ..demo.default_model import load_model, load_tokenizer
from ..demo.run import Demo, file_tasks, heldout_tasks
from ..demo.terminal import takes_color
from ..store.datastore import Datastore
from .arguments import positive


def add_demo(parser: ArgumentParser) -> None:
    """Adds the arguments of `hf-refspec demo`."""
    parser.set_defaults(run=_demo)
    add = parser.add_argument
    add("--file", type=Path, help="your own file instead of standard library files")
    add("--model", help="a folder or a Hub id instead of the bundled model")
    add("--max-new-tokens", type=positive, default=160, metavar="N")
    add("--no-color", action="store_true")
    add(
        "--datastore",
        action="store_true",
        help="draft from a datastore of the standard library as well, which is built first",
    )


def _demo(args: Namespace) -> int:
    """Returns 1 if ids differed."""
    color = takes_color() and not args.no_color
    tokenizer = load_tokenizer(args.model)
    tasks = file_tasks(args.file, tokenizer) if args.file else heldout_tasks(tokenizer)
    model = load_model(args.model)
    store = None
    with ExitStack() as stack:
        if args.datastore:
            folder = Path(stack.enter_context(TemporaryDirectory())) / "store"
            store = Datastore.build(corpus.training_files(), tokenizer, folder, progress=False)
        same = Demo(model, tokenizer, args.max_new_tokens, color, store).run(tasks)
    return 0 if same else 1
