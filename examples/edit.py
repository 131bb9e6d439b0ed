"""Edits a file: the model writes most of it again, and drafts are copied from it.

python examples/edit.py [FILE] [INSTRUCTION]
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import hf_refspec as rs

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
CODE = """def compute(items, tax):
    amount = 0
    for item in items:
        amount += item.price * item.count
    return amount * (1 + tax)
"""


def main(arguments: list[str]) -> None:
    code = Path(arguments[0]).read_text(encoding="utf-8") if arguments else CODE
    instruction = arguments[1] if len(arguments) > 1 else "Add a docstring to this function."
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    tok = AutoTokenizer.from_pretrained(MODEL)
    inputs = tok.apply_chat_template(
        [{"role": "user", "content": f"{instruction} Answer with the code only.\n\n{code}"}],
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
    main(sys.argv[1:])
