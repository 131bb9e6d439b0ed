"""`hf-refspec store evaluate` and `recycle`, which load a model: whether a datastore pays, and what
a model expects next in texts."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
from tqdm import tqdm
from transformers import BatchEncoding, PreTrainedTokenizerBase

from ...drafting.blend import Blend
from ...drafting.datastore_drafts import DatastoreDrafts
from ...drafting.token_recycling import TokenRecycling
from ...generation.default_drafter import default_sources
from ...generation.warmup import warmup
from ...store.build.source import files_of
from ...store.datastore import Datastore
from ...store.printable import printable
from ...store.recycling_table import RecyclingTable
from ...store.stored_tokenizer import public_name
from ..bench.measure import prompt_inputs
from ..bench.prompts import read_chats
from ..shared.comparison import PLAIN, Comparison, Methods
from ..shared.console import Terminal
from ..shared.loading import load, load_config, load_model, load_tokenizer
from ..shared.prompts import text_inputs, tokens_left
from .answering import quieten_transformers
from .arguments import add_model, add_source, check_source, load_corpus, positive

_BEGINNING, _LEAST = 64, 8  # tokens of a text that are a prompt
_DEFAULT, _WITH_STORE = "default drafter", "with the datastore"


def add_evaluate(parser: ArgumentParser) -> None:
    """Adds the arguments of `hf-refspec store evaluate`."""
    parser.set_defaults(run=_evaluate)
    add = parser.add_argument
    add("store", help="a folder or a Hub id")
    add(
        "texts",
        nargs="*",
        type=Path,
        help="files and folders of texts that are not in the datastore; the model continues their "
        f"first {_BEGINNING} tokens",
    )
    add("--prompts", type=Path, metavar="FILE", help="prompts instead, as hf-refspec bench has")
    add("--pattern", default="*", help='which files of a folder, for example "*.md"')
    add_model(parser)
    add("--limit", type=positive, default=12, metavar="N", help="prompts; 12 by default")
    add("--max-new-tokens", type=positive, default=96, metavar="N", help="96 by default")


def _evaluate(args: Namespace) -> int:
    """Returns 1 if ids differ in float32."""
    quieten_transformers()
    if bool(args.texts) == (args.prompts is not None):
        raise ValueError("give one of: texts that are not in the datastore, --prompts FILE")
    config = load_config(args.model)  # refuses anything but a language model
    tokenizer = load_tokenizer(args.model)
    store = Datastore.from_pretrained(args.store, tokenizer=tokenizer)
    prompts = _prompts(args, tokenizer)
    console = Terminal()
    console.print(
        f"loading {args.model or 'the default model'}, to answer {len(prompts)} prompts plainly, "
        f"with the default drafter, and with the {store.form} form of {args.store} too",
        soft_wrap=True,
    )
    model = load_model(args.model, args.device_map, args.dtype)
    warmup()

    def methods() -> Methods:
        with_store = Blend([*default_sources(), DatastoreDrafts(store)])
        return {
            PLAIN: {},
            _DEFAULT: {"candidate_generator": Blend(default_sources())},
            _WITH_STORE: {"candidate_generator": with_store},
        }

    comparison = Comparison(model, methods, do_sample=False)
    comparison.warm_up()
    for inputs in tqdm(prompts, "prompts", leave=False, disable=None):
        hint = "leave it out"
        left = tokens_left(inputs, config, "a prompt", hint, args.max_new_tokens)
        comparison.ask(inputs.to(model.device), max_new_tokens=left)
    console.print(f"{public_name(model)} in {str(model.dtype).removeprefix('torch.')}")
    status = comparison.report(console, {_WITH_STORE: _DEFAULT})
    if held := sum(_is_held(inputs, store, tokenizer) for inputs in prompts):
        print(f"{held} prompts are in the datastore itself: on other text it gains less")
    return status


def _prompts(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> list[BatchEncoding]:
    """The prompts of a file, or the beginnings of texts."""
    if args.prompts is not None:
        chats = read_chats(args.prompts)[: args.limit]
        return [prompt_inputs(tokenizer, chat.until(0, [])) for chat in chats]
    files = [file for path in args.texts for file in files_of(path, args.pattern)]
    chosen = files[:: max(len(files) // args.limit, 1)][: args.limit]
    texts = [file.read_text(encoding="utf-8", errors="replace")[: 1 << 12] for file in chosen]
    beginnings = [
        BatchEncoding(
            {name: ids[:, :_BEGINNING] for name, ids in text_inputs(tokenizer, text).items()}
        )
        for text in texts
    ]
    prompts = [each for each in beginnings if each["input_ids"].shape[1] >= _LEAST]
    if not prompts:
        raise ValueError(f"no text has the {_LEAST} tokens that a prompt needs; give others")
    return prompts


def _is_held(inputs: BatchEncoding, store: Datastore, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the full form of a datastore contains a prompt."""
    special = set(tokenizer.all_special_ids)
    ids = [token for token in inputs["input_ids"][0].tolist() if token not in special]
    return any(shard.holds(np.array(ids, dtype=np.int32)) for shard in store.shards)


def add_recycle(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_recycle)
    add_source(parser)
    add = parser.add_argument
    add_model(parser)
    add("--out", type=Path, required=True, help="the new folder")
    add("--max-tokens", type=positive, metavar="N", help="read about so many tokens")
    add("--license", help="of the corpus, for the card")


def _recycle(args: Namespace) -> int:
    check_source(args)
    if args.out.exists():
        raise FileExistsError(f"{args.out} exists; choose another path, or delete it")
    for path in args.source:  # before the model is loaded
        if not path.exists():
            raise FileNotFoundError(f"{path} is neither a file nor a folder")
    documents, corpus, license = load_corpus(args, streaming=True)
    quieten_transformers()
    model, tokenizer = load(args.model, args.device_map, args.dtype)
    options = {name: getattr(args, name) for name in ("max_tokens", "column", "pattern")}
    table = TokenRecycling.build(
        model, tokenizer, documents, corpus=corpus, license=args.license or license, **options
    )
    table.save_pretrained(args.out)
    config = RecyclingTable(args.out, tokenizer).config
    print(args.out)
    print(f"  model       {printable(config.model)}, vocabulary {config.vocab_size:,}")
    print(f"  corpus      {printable(config.source.get('corpus'))}")
    print(
        f"  contexts    {config.contexts:,} of up to {config.context} tokens, with "
        f"{config.top_k} next tokens each, {config.table_file.size / 1e6:.1f} MB"
    )
    return 0
