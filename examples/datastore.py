"""Builds a datastore of code, drafts from it, and makes a compact form for the Hub.

python examples/datastore.py [FOLDER]      # of .py files; by default Python's json package
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_refspec as rs

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PROMPT = "class JSONDecodeError(ValueError):\n    def __init__(self, msg, doc, pos):\n"


def main(arguments: list[str]) -> None:
    folder = arguments[0] if arguments else str(Path(json.__file__).parent)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    tok = AutoTokenizer.from_pretrained(MODEL)

    store = rs.Datastore.build(folder, tok, "code-store", pattern="*.py", deduplicate=True)
    print(f"{store.documents} files, {store.tokens:,} tokens")

    drafter = rs.ReferenceCopy() | rs.DatastoreDrafts(store)
    inputs = tok(PROMPT, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=40, do_sample=False, candidate_generator=drafter)
    print(tok.decode(ids[0]))
    for source in drafter.stats.sources:
        print(f"{source.name}: {source.accepted} of {source.drafted} nodes accepted")

    small = store.compact(max_bytes=200_000)
    print(f"the {small.form} form is there as well; store.push_to_hub('user/code-store') publishes")


if __name__ == "__main__":
    main(sys.argv[1:])
