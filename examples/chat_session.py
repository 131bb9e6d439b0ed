"""A conversation that is remembered: answers to repeated questions are drafted nearly whole.

python examples/chat_session.py    # run it twice: the second run drafts the first one's answers
"""

from __future__ import annotations

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_refspec as rs

QUESTIONS = [
    "Name the primary colours.",
    "What can I mix from them?",
    "Name the primary colours, please.",
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder or a Hub id; SmolLM2-135M-Instruct by default")
    name = parser.parse_args().model or rs.default_model()
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
    tok = AutoTokenizer.from_pretrained(name)
    cache = rs.SessionDrafts(tokenizer=tok, path="sessions")
    print(f"{len(cache)} sessions are remembered")
    drafter = rs.ReferenceCopy() | cache
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        inputs = tok.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(
            **inputs, max_new_tokens=24, do_sample=False, candidate_generator=drafter
        )
        answer = tok.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        stats = drafter.stats
        print(f"> {question}\n{answer}\n  (MAT {stats.mat:.2f}, {stats.seconds:.1f} s)")


if __name__ == "__main__":
    main()
