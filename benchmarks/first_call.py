"""Seconds to the first and the last token of a first call, plainly and drafted.

    python benchmarks/first_call.py [--model NAME] [--repeats N]

Each call runs in a process of its own. The first processes find no compiled kernels, since numba's
cache is a new folder; the second ones find all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from suites import table

QUESTION = "Write a Python class for a stack with push, pop and peek."
NEW_TOKENS = 160


def call(model_name: str, drafted: bool) -> dict[str, float]:
    """Makes one call; returns the seconds from its begin to its first and its last token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.generation import BaseStreamer

    import hf_refspec as rs

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: object) -> None:
            self.times.append(time.time())

        def end(self) -> None:
            pass

    model = AutoModelForCausalLM.from_pretrained(model_name, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    options = {"candidate_generator": rs.ReferenceCopy() | rs.TokenRecycling()} if drafted else {}
    clock, called = Clock(), time.time()
    model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, streamer=clock, **options)
    return {"first": clock.times[1] - called, "last": clock.times[-1] - called}  # prompt first


def in_a_process(cache: str, *arguments: str) -> str:
    """Runs Python with numba's cache in a folder; returns what it prints."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--call", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.call is not None:
        print(json.dumps(call(args.model, bool(args.call))))
        return
    import hf_refspec as rs

    name = args.model or rs.default_model()
    results: dict[tuple[str, bool], list[dict[str, float]]] = {}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as cache:
            for process in ("first", "second"):
                for drafted in (False, True):
                    given = "--model", name, "--call", str(int(drafted))
                    line = in_a_process(cache, __file__, *given).splitlines()[-1]
                    results.setdefault((process, drafted), []).append(json.loads(line))
                # Compiles what the first processes have left.
                in_a_process(cache, "-c", "import hf_refspec; hf_refspec.warmup()")
    rows = [
        [process, "drafted" if drafted else "plain"]
        + [f"{statistics.median(each[token] for each in found):.2f}" for token in found[0]]
        for (process, drafted), found in results.items()
    ]
    print(table(["process", "call", "first token", "last token"], rows))


if __name__ == "__main__":
    main()
