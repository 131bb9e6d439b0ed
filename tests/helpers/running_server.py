"""A server on a free port of this machine, in a thread or in a process of its own."""

import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, Any
from unittest import mock

import openai
import requests
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_refspec import Drafter, DraftTree, RunningBatch
from hf_refspec.apps.cli.arguments import listen
from hf_refspec.apps.cli.main import main
from hf_refspec.apps.serve import engine as engines
from hf_refspec.apps.serve import grammars, served_model
from hf_refspec.apps.serve.engine import RequestEngine
from hf_refspec.apps.serve.routes import Server, make_app, url
from hf_refspec.apps.serve.served_model import ServedModel
from hf_refspec.drafting.auto import default_sources

NAME = "tiny"
SECONDS = 600  # for what takes a few on a machine with nothing else to do


class Slow(Drafter):
    """Drafts nothing, and every forward pass takes some time."""

    def draft(self, budget, call):
        return DraftTree.empty()

    def observe(self, observation):
        time.sleep(0.02)


@dataclass
class RunningServer:
    """A server, what it decodes with, and its address."""

    url: str  # ends with /v1
    engine: RequestEngine
    server: Server

    @property
    def client(self) -> openai.OpenAI:
        # Loads no certificates.
        plain_http = openai.DefaultHttpxClient(verify=False, timeout=SECONDS)
        options = {"max_retries": 0, "timeout": SECONDS, "http_client": plain_http}
        return openai.OpenAI(base_url=self.url, api_key="none", **options)

    def chat(self, text: str, **options):
        """Sends one message, greedily."""
        options = {"temperature": 0, "max_tokens": 32, **options}
        messages = [{"role": "user", "content": text}]
        return self.client.chat.completions.create(model=NAME, messages=messages, **options)

    def post(
        self, body: str | bytes, path: str = "/chat/completions", **headers
    ) -> requests.Response:
        headers = {"Content-Type": "application/json", **headers}
        return requests.post(self.url + path, data=body, headers=headers, timeout=SECONDS)

    def metrics(self) -> dict[str, float]:
        """The value of each metric by its name with its labels."""
        text = requests.get(self.url.removesuffix("/v1") + "/metrics", timeout=SECONDS).text
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        prefix = "hf_refspec_"
        pairs = (line.removeprefix(prefix).rsplit(" ", 1) for line in lines)
        return {name: float(value) for name, value in pairs}

    def outcomes(self, outcome: str) -> float:
        """How many requests ended so."""
        return self.metrics().get(f'requests_total{{outcome="{outcome}"}}', 0)


class Reply:
    """An answer as its client reads it, whole or joined from the chunks of a stream.

    Attributes:
        texts: The text of each choice.
        tokens: Each token with its probabilities, where they were asked for.
        finish_reason: That of the choice that ended last.
    """

    def __init__(self, answer: Any):
        self.chunks = [answer] if hasattr(answer, "choices") else list(answer)
        choices = [choice for chunk in self.chunks for choice in chunk.choices]
        self.texts = [""] * (1 + max(choice.index for choice in choices))
        for choice in choices:
            part = getattr(choice, "delta", None) or getattr(choice, "message", None)
            self.texts[choice.index] += (part.content if part else choice.text) or ""
        parts = [choice.logprobs for choice in choices if choice.logprobs]
        self.tokens = [token for part in parts for token in getattr(part, "content", None) or []]
        self.finish_reason = choices[-1].finish_reason

    @property
    def text(self) -> str:
        """The text of an answer that has one."""
        [text] = self.texts
        return text


def wait_until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


@contextmanager
def serving(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: list[Drafter] | None = None,
    max_new_tokens: int = 1000,
    max_seconds: float = SECONDS,
    max_waiting: int = 8,
    max_body_bytes: int = 100_000,
    isolates: bool = False,
    max_rows: int = 1,
    clock: Callable[[], float] = lambda: 0.0,
    grammar_seconds: float = SECONDS,
    max_draft_tokens: int | str = "auto",
    **limits: Any,
) -> Iterator[RunningServer]:
    """Serves a model until the block is left. With "auto" it may draft nothing, by the clock. A
    grammar may take any time by default."""
    sources = default_sources() if sources is None else sources
    batch = partial(RunningBatch, max_draft_tokens=max_draft_tokens)
    with mock.patch.object(engines, "RunningBatch", batch):
        engine = RequestEngine(
            model, tokenizer, sources, max_seconds, max_waiting, isolates, max_rows
        )
    engine.start()
    served = ServedModel([NAME], tokenizer, model.config, max_new_tokens, clock)
    connections = limits.pop("connections", 256)
    app = make_app(served, engine, max_body_bytes, **{"hosts": ["127.0.0.1"], **limits})
    with listen("127.0.0.1", 0) as listening:
        server = Server(app, engine, connections)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        compiler = partial(grammars.GrammarCompiler, seconds=grammar_seconds)
        try:
            with (
                mock.patch.object(served_model, "GrammarCompiler", compiler),
                mock.patch.object(grammars, "_STARTING_SECONDS", SECONDS),
            ):
                yield RunningServer(url(listening), engine, server)
        finally:
            server.should_exit = server.force_exit = True
            thread.join()
            engine.close(SECONDS)


@contextmanager
def server_process(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """`hf-refspec serve` until the block is left: the process, the address, and the log so far."""
    command = [sys.executable, "-m", "hf_refspec", "serve", "--port", "0", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    pipe = {"stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    with subprocess.Popen(command, env=env, **pipe) as process:
        try:
            yield process, *_address(process.stderr)
        finally:
            process.kill()


@contextmanager
def forked_server(*arguments: object) -> Iterator[tuple[str, list[str]]]:
    """`hf-refspec serve` in a fork of this process, which has loaded its modules: the address, and
    the log so far."""
    reader, writer = os.pipe()
    command = ["serve", "--port", "0", *map(str, arguments)]
    process = multiprocessing.get_context("fork").Process(target=_run, args=(command, writer))
    process.start()
    os.close(writer)
    with open(reader, encoding="utf-8") as stderr:
        try:
            yield _address(stderr)
        finally:
            process.kill()
            process.join()


def _run(command: list[str], stderr: int) -> None:
    sys.stderr = os.fdopen(stderr, "w", buffering=1, encoding="utf-8")
    main(command)


def _address(stderr: IO[str]) -> tuple[str, list[str]]:
    """Where a server says that it answers, and its log until then."""
    log: list[str] = []
    while not (address := re.search(r"http://\S+/v1", "".join(log))):
        log.append(stderr.readline())
        assert log[-1], log
    return address[0], log
