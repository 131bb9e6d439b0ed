"""Edits a file: the model writes most of it again, and drafts are copied from it.

python examples/edit.py [FILE] [INSTRUCTION]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import hf_refspec as rs

CODE = """def compute(items, tax):
    amount = 0
    for item in items:
        amount += item.price * item.count
    return amount * (1 + tax)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("instruction", nargs="?", default="Add a docstring to this function.")
    parser.add_argument("--model", help="a folder or a Hub id; SmolLM2-135M-Instruct by default")
    args = parser.parse_args()
    name = args.model or rs.default_model()
    code = args.file.read_text(encoding="utf-8") if args.file else CODE
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
    tok = AutoTokenizer.from_pretrained(name)
    inputs = tok.apply_chat_template(
        [{"role": "user", "content": f"{args.instruction} Answer with the code only.\n\n{code}"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    drafter = rs.ReferenceCopy()
    model.generate(
        **inputs,
        max_new_tokens=len(tok(code).input_ids) + 40,
        do_sample=False,
        streamer=TextStreamer(tok, skip_prompt=True, skip_special_tokens=True),
        candidate_generator=drafter,
    )
    print(drafter.stats, file=sys.stderr)


if __name__ == "__main__":
    main()
