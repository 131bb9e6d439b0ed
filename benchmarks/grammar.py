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
import random
import sys
from typing import Any

import torch
from suites import table

import hf_refspec as rs
from hf_refspec.apps.cli.arguments import positive
from hf_refspec.apps.shared.comparison import PLAIN, Comparison, Methods
from hf_refspec.apps.shared.loading import load_model, load_tokenizer

TEXTS = 40  # of each schema
LOOKUP, DEFAULT, GRAMMAR = "prompt look-up", "default", "default, grammar"

NAMES = ["Maria Lopez", "John Carter", "Aiko Tanaka", "Peter Novak", "Fatima Haddad", "Liam Byrne"]
CITIES = ["Lisbon", "Bergen", "Osaka", "Prague", "Tunis", "Galway", "Quito", "Ghent"]
STREETS = ["Harbour Road", "Mill Lane", "Station Square", "Orchard Street", "Castle Hill"]
JOBS = ["nurse", "carpenter", "teacher", "pilot", "beekeeper", "translator"]
GOODS = ["desk lamp", "oak shelf", "tea kettle", "wool blanket", "garden chair", "wall clock"]
FOODS = ["flour", "butter", "two eggs", "brown sugar", "lemon zest", "salt", "milk", "cinnamon"]
FAULTS = [
    ("the app crashes whenever I open my invoices", "billing"),
    ("I cannot sign in since the last update", "login"),
    ("the parcel has not arrived after three weeks", "delivery"),
    ("the left speaker makes no sound at all", "hardware"),
]


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with all of these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


_TEXT, _NUMBER = {"type": "string", "maxLength": 40}, {"type": "integer", "maximum": 9999}
_LIST = {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4}
SCHEMAS: dict[str, dict[str, Any]] = {
    "small": _object({"name": _TEXT, "age": _NUMBER, "profession": _TEXT}),
    "nested": _object(
        {
            "customer": _object(
                {
                    "name": _TEXT,
                    "address": _object({"street": _TEXT, "number": _NUMBER, "city": _TEXT}),
                }
            ),
            "order": _object({"item": _TEXT, "quantity": _NUMBER, "price": {"type": "number"}}),
        }
    ),
    "enums": _object(
        {
            "category": {"enum": ["billing", "login", "delivery", "hardware", "other"]},
            "priority": {"enum": ["low", "medium", "high", "urgent"]},
            "sentiment": {"enum": ["positive", "neutral", "negative"]},
            "channel": {"enum": ["email", "phone", "chat"]},
            "refund_requested": {"type": "boolean"},
        }
    ),
    "arrays": _object({"title": _TEXT, "ingredients": _LIST, "steps": _LIST, "minutes": _NUMBER}),
}

_PARAMETERS = {
    "get_weather": ["city", "date"],
    "get_forecast": ["city", "days"],
    "search_flights": ["origin", "destination", "date"],
    "book_hotel": ["city", "guests", "date"],
    "book_table": ["restaurant", "guests", "time"],
    "send_email": ["recipient", "subject", "body"],
    "send_message": ["recipient", "body"],
    "create_event": ["title", "date", "time"],
    "list_events": ["date"],
    "set_alarm": ["time"],
    "set_timer": ["minutes"],
    "play_song": ["title", "artist"],
    "translate_text": ["text", "language"],
    "convert_currency": ["amount", "source", "target"],
    "get_stock_price": ["symbol"],
    "find_recipe": ["dish"],
    "find_route": ["origin", "destination"],
    "call_taxi": ["address", "time"],
    "track_parcel": ["number"],
    "create_note": ["title", "body"],
}
_COUNTS = ("days", "guests", "minutes", "amount")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": name.replace("_", " ").capitalize() + ".",
            "parameters": _object({key: _NUMBER if key in _COUNTS else _TEXT for key in keys}),
        },
    }
    for name, keys in _PARAMETERS.items()
]


def texts(schema: str) -> list[str]:
    """The texts of a schema, the same in every run."""
    numbers = random.Random(schema)
    pick = numbers.choice

    def small() -> str:
        return (
            f"{pick(NAMES)} turned {numbers.randint(19, 80)} last week. After school in "
            f"{pick(CITIES)} came years of training, and since then a life as a {pick(JOBS)}."
        )

    def nested() -> str:
        return (
            f"{pick(NAMES)}, of {numbers.randint(2, 90)} {pick(STREETS)} in {pick(CITIES)}, "
            f"ordered {numbers.randint(1, 9)} pieces of our {pick(GOODS)} at "
            f"{numbers.randint(5, 90)}.50 euros each, to be sent home."
        )

    def enums() -> str:
        fault, kind = pick(FAULTS)
        return (
            f"By {pick(['email', 'phone', 'chat'])}: hello, {fault}. This is a question for "
            f"{kind}. {pick(['Please hurry.', 'There is no rush.', 'I want my money back.'])}"
        )

    def arrays() -> str:
        first, second, third = numbers.sample(FOODS, 3)
        return (
            f"For {pick(CITIES)} cake mix {first} and {second}, add {third}, and bake it for "
            f"{numbers.randint(20, 60)} minutes. Let it cool before you cut it."
        )

    def tools() -> str:
        start, goal = numbers.sample(CITIES, 2)
        return pick(
            [
                f"What will the weather be in {goal} on 12 May?",
                f"Find me a flight from {start} to {goal} on 3 June.",
                f"Write to {pick(NAMES)} that the meeting in {goal} begins at nine.",
                f"A hotel in {goal} for {numbers.randint(1, 5)} people on 7 July, please.",
                f"How do I get from {start} to {goal}?",
            ]
        )

    makers = {"small": small, "nested": nested, "enums": enums, "arrays": arrays, "tools": tools}
    return [makers[schema]() for _ in range(TEXTS)]


def prompt_of(schema: str, text: str, tokenizer: Any) -> Any:
    """The inputs of a call."""
    if schema == "tools":
        names = "\n".join(f"{name}({', '.join(keys)})" for name, keys in _PARAMETERS.items())
        asked = f"Functions:\n{names}\n\nCall the right one, as JSON, for this request:\n{text}"
    else:
        keys = ", ".join(SCHEMAS[schema]["properties"])
        asked = f"Extract {keys} from this text, as JSON:\n{text}"
    chat = [{"role": "user", "content": asked}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return tokenizer.apply_chat_template(chat, **options)


def measure(model: Any, tokenizer: Any, schema: str, args: argparse.Namespace) -> list[list[Any]]:
    """The rows of the table of a schema."""
    given = {"tools": TOOLS} if schema == "tools" else {"json_schema": SCHEMAS[schema]}
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
        return {PLAIN: {}, LOOKUP: {"prompt_lookup_num_tokens": 10}, **drafted}

    comparison = Comparison(
        model,
        methods,
        max_new_tokens=args.max_new_tokens,
        do_sample=args.sampled,
        logits_processor=[grammar.processor()],
    )
    comparison.warm_up()
    for text in texts(schema)[: args.limit]:
        comparison.ask(prompt_of(schema, text, tokenizer).to(model.device))
    if model.dtype == torch.float32:
        for name in (DEFAULT, GRAMMAR):
            if comparison.equal(name) < len(comparison.calls[PLAIN]):
                raise SystemExit(f"{schema}: {name} gave other ids")
    return [
        [
            schema,
            name,
            f"{comparison.mat(name):.2f}",
            f"{comparison.gain(name).ratio:.2f}x",
            f"{comparison.equal(name)} of {len(calls)}",
        ]
        for name, calls in comparison.calls.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    """Prints a table for each type of the model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", help="a folder or a Hub id; default: SmolLM2-135M-Instruct")
    add("--device", default="cpu")
    add("--dtype", nargs="+", default=["float32", "bfloat16"], metavar="DTYPE")
    add("--schemas", nargs="+", default=[*SCHEMAS, "tools"], choices=[*SCHEMAS, "tools"])
    add("--limit", type=positive, default=TEXTS, metavar="N", help="how many texts of each schema")
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
