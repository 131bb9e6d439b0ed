"""Speeds up code that calls generate() internally, here a pipeline.

python examples/pipeline_attach.py
"""

from __future__ import annotations

import argparse

from transformers import pipeline

import hf_refspec as rs

TEXTS = [
    "The ferry to the island leaves at nine from the old pier. Tickets are sold on board.",
    "The lighthouse can be climbed with a guide at noon. Groups must book a week ahead.",
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder or a Hub id; SmolLM2-135M-Instruct by default")
    name = parser.parse_args().model or rs.default_model()
    summarize = pipeline("text-generation", model=name, dtype="float32")
    with rs.attach(summarize.model) as attachment:
        for text in TEXTS:
            messages = [{"role": "user", "content": f"{text}\n\nSay this as a list."}]
            answer = summarize(messages, max_new_tokens=32, do_sample=False)
            print(answer[0]["generated_text"][-1]["content"], end="\n\n")
    print(attachment.stats)  # of all calls


if __name__ == "__main__":
    main()
