"""JSON that a model extracts from short texts, constrained by a schema: drafts against none.

    python benchmarks/grammar.py [--limit N] [--dtype float32 bfloat16] [--sampled] [--nodes N]

There are five schemas (small, nested, enums, arrays, a call of one of 20 tools) with 40 texts each.
All methods decode each text by turns, with the same logits processor: plainly, by transformers'
prompt look-up, by the default drafter, and by the default drafter with the grammar. In float32 the
ids of the last two must be those of the first, or the run stops. It prints MAT, the speed-up over
the constrained plain call (of whole calls, the masks' cost included), and how many texts are equal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from suites import json_lines, table

import hf_refspec as rs
from hf_refspec.apps.cli.arguments import positive
from hf_refspec.apps.shared.comparison import UNDRAFTED, Comparison, Methods
from hf_refspec.apps.shared.loading import load_model, load_tokenizer
from hf_refspec.apps.shared.prompts import chat_inputs, user

# By the name of a schema: the argument of `GrammarDrafts`, and the texts.
SCHEMAS = {row["name"]: row for row in json_lines(Path(__file__).with_suffix(".jsonl"))}
LOOKUP, DEFAULT, GRAMMAR = "prompt look-up", "default", "default, grammar"


def prompt_of(schema: dict[str, Any], text: str, tokenizer: Any) -> Any:
    """The inputs of a call."""
    if "tools" in schema:
        functions = [tool["function"] for tool in schema["tools"]]
        names = [f"{f['name']}({', '.join(f['parameters']['properties'])})" for f in functions]
        asked = "Functions:\n" + "\n".join(names)
        asked += f"\n\nCall the right one, as JSON, for this request:\n{text}"
    else:
        keys = ", ".join(schema["json_schema"]["properties"])
        asked = f"Extract {keys} from this text, as JSON:\n{text}"
    return chat_inputs(tokenizer, [user(asked)])


def measure(model: Any, tokenizer: Any, name: str, args: argparse.Namespace) -> list[list[Any]]:
    """The rows of the table of a schema."""
    schema = SCHEMAS[name]
    given = {key: schema[key] for key in ("json_schema", "tools") if key in schema}
    grammar = rs.GrammarDrafts(tokenizer, **given)

    def methods() -> Methods:
        blends = {
            DEFAULT: rs.ReferenceCopy() | rs.TokenRecycling(),
            GRAMMAR: grammar | rs.ReferenceCopy() | rs.TokenRecycling(),
        }
        drafted = {
            name: {"candidate_generator": blend, "max_draft_tokens": args.nodes}
            for name, blend in blends.items()
        }
        return {UNDRAFTED: {}, LOOKUP: {"prompt_lookup_num_tokens": 10}, **drafted}

    comparison = Comparison(
        model,
        methods,
        max_new_tokens=args.max_new_tokens,
        do_sample=args.sampled,
        logits_processor=[grammar.processor()],
    )
    comparison.warm_up()
    for text in schema["texts"][: args.limit]:
        comparison.ask(prompt_of(schema, text, tokenizer).to(model.device))
    if model.dtype == torch.float32:
        for method in (DEFAULT, GRAMMAR):
            if comparison.equal(method) < len(comparison.calls[UNDRAFTED]):
                raise SystemExit(f"{name}: {method} gave other ids")
    return [
        [
            name,
            method,
            f"{comparison.total(method).mat:.2f}",
            f"{comparison.gain(method).ratio:.2f}x",
            f"{comparison.equal(method)} of {len(calls)}",
        ]
        for method, calls in comparison.calls.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    """Prints a table for each type of the model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", help="a folder or a Hub id; default: SmolLM2-135M-Instruct")
    add("--device", default="cpu")
    add("--dtype", nargs="+", default=["float32", "bfloat16"], metavar="DTYPE")
    add("--schemas", nargs="+", default=[*SCHEMAS], choices=SCHEMAS)
    add("--limit", type=positive, metavar="N", help="how many texts of each schema; default: all")
    add("--max-new-tokens", type=positive, default=128, metavar="N")
    add("--sampled", action="store_true", help="sample, with a seed for each text")
    add("--nodes", type=positive, metavar="N", help="draft nodes; default: those that pay")
    args = parser.parse_args(arguments)
    args.nodes = args.nodes or "auto"
    name = args.model or rs.default_model()
    tokenizer = load_tokenizer(name)
    rs.warmup()
    for dtype in args.dtype:
        model = load_model(name, args.device, getattr(torch, dtype))
        rows = [row for schema in args.schemas for row in measure(model, tokenizer, schema, args)]
        print(f"\n{dtype}\n" + table(["schema", "method", "MAT", "speed-up", "equal ids"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
