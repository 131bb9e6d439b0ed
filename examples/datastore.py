"""Builds a datastore of code, drafts from it, and writes its compact form for the Hub.

python examples/datastore.py [FOLDER]      # of .py files; by default Python's json package
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_refspec as rs

PROMPT = "class JSONDecodeError(ValueError):\n    def __init__(self, msg, doc, pos):\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", default=Path(json.__file__).parent)
    parser.add_argument("--model", help="a folder or a Hub id; SmolLM2-135M-Instruct by default")
    args = parser.parse_args()
    name = args.model or rs.default_model()
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
    tok = AutoTokenizer.from_pretrained(name)

    store = rs.Datastore.build(args.folder, tok, "code-store", pattern="*.py", deduplicate=True)
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
    main()
