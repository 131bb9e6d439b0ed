"""Tokens per second and seconds to the first token of servers that have several clients.

    python benchmarks/serving.py --data DATA [--clients 1 4 8 16 50] [--servers rows one ...]

Each client is OpenAI's own and streams an answer of 16 to 96 tokens to one of Spec-Bench's
questions; every third client leaves after 8 pieces. `rows` is `hf-refspec serve`, and `one` is that
with `--max-rows 1`; `transformers` is `transformers serve`, and `continuous` is that with
`--continuous-batching`. Servers run one after another, each in a process of its own.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import openai
import requests
from suites import spec_bench, table

from hf_refspec import default_model

LENGTHS = (16, 32, 64, 96)  # tokens of the answers, by turns
LEAVES_AFTER = 8  # pieces
LONGEST_QUESTION = 800  # characters: decoding is to be measured more than reading

_OURS = ("-m", "hf_refspec", "serve", "--dtype", "float32")
_THEIRS = ("-m", "transformers.cli.transformers", "serve", "--dtype", "float32", "--device", "cpu")
SERVERS = {
    "rows": _OURS,
    "one": (*_OURS, "--max-rows", "1"),
    "transformers": _THEIRS,
    "continuous": (*_THEIRS, "--continuous-batching"),
}


def ask(url: str, model: str, question: str, number: int) -> tuple[float, int]:
    """Asks as one client. Returns the seconds to the first piece of the answer, and the number of
    pieces, which is about that of tokens."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=1200)
    began, first, pieces = time.perf_counter(), float("nan"), 0
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=LENGTHS[number % len(LENGTHS)],
        temperature=0,
        stream=True,
    )
    for chunk in chunks:
        if not (chunk.choices and chunk.choices[0].delta.content):
            continue
        if pieces == 0:
            first = time.perf_counter() - began
        pieces += 1
        if number % 3 == 2 and pieces == LEAVES_AFTER:
            chunks.close()
            break
    return first, pieces


@contextmanager
def serving(arguments: tuple[str, ...], model: str) -> Iterator[str]:
    """Runs a server in a process of its own; yields its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = ["--model", model, "--served-model-name", model]
    named = ours if arguments[:3] == _OURS[:3] else [model]
    command = [sys.executable, *arguments, "--port", str(port), *named]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _answers(url):
            if server.poll() is not None:
                raise RuntimeError(f"the server ended: {' '.join(command)}")
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait()


def _answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.RequestException:
        return False


def measured(url: str, model: str, questions: list[str], clients: int) -> list[str]:
    """The figures of a row: this number of clients at once."""
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        calls = [
            pool.submit(ask, url, model, questions[n % len(questions)], n) for n in range(clients)
        ]
        firsts, pieces = zip(*(call.result() for call in calls), strict=True)
    seconds = time.perf_counter() - began
    return [
        f"{seconds:.1f}",
        f"{sum(pieces) / seconds:.1f}",
        *(f"{np.nanpercentile(firsts, each):.1f}" for each in (50, 95)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="see benchmarks/README.md")
    parser.add_argument("--model", default=None, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16, 50])
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    args = parser.parse_args()
    model = args.model or default_model()
    every = spec_bench(args.data / "spec_bench_questions.jsonl")
    questions = [each.turns[0] for each in every[::9] if len(each.turns[0]) < LONGEST_QUESTION]
    rows = []
    for name in args.servers:
        with serving(SERVERS[name], model) as url:
            ask(url, model, questions[-1], 1)  # does what only a first request needs
            for clients in args.clients:
                rows.append([name, clients, *measured(url, model, questions, clients)])
                print(*rows[-1], flush=True)
    print(table(["server", "clients", "s", "tokens/s", "first p50", "p95"], rows))


if __name__ == "__main__":
    main()
