"""An answer from documents, plainly and drafted: the same words, fewer forward passes.

python examples/rag.py
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_refspec as rs

PASSAGES = """\
The Harbour Museum stands at the end of the old pier. It was built in 1894 as a customs house
and has been a museum since 1962. From April to October it is open every day from ten in the morning
to six in the evening. Tickets cost 9 euros for adults and 4 euros for children under fourteen."""
QUESTION = "Quote the sentences about tickets and opening hours."


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder or a Hub id; SmolLM2-135M-Instruct by default")
    name = parser.parse_args().model or rs.default_model()
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
    tok = AutoTokenizer.from_pretrained(name)
    inputs = tok.apply_chat_template(
        [{"role": "user", "content": f"{PASSAGES}\n\n{QUESTION}"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    drafter = rs.ReferenceCopy() | rs.TokenRecycling()
    answers = []
    for candidate_generator in (None, drafter):
        start = time.perf_counter()
        ids = model.generate(
            **inputs, max_new_tokens=40, do_sample=False, candidate_generator=candidate_generator
        )
        answers.append(ids[:, inputs["input_ids"].shape[1] :])
        print(f"{time.perf_counter() - start:.1f} s: {tok.decode(answers[-1][0])!r}")
    print("the same:", torch.equal(*answers))
    print(drafter.stats)


if __name__ == "__main__":
    main()
