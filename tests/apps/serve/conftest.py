import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.helpers.running_server import RunningServer, Slow, serving


@pytest.fixture(scope="session")
def speller(byte_llama, tokenizer):
    """The model of bytes, which writes ASCII only: its texts are its tokens."""
    model = copy.deepcopy(byte_llama)
    letters = tokenizer("".join(map(chr, range(32, 127))) + "\n")["input_ids"]
    model.generation_config.suppress_tokens = [*{*range(len(tokenizer))} - {*letters}]
    return model


@pytest.fixture(scope="module")
def server(speller, tokenizer) -> Iterator[RunningServer]:
    with serving(speller, tokenizer) as running:
        yield running


@pytest.fixture
def slow(speller, tokenizer) -> Iterator[RunningServer]:
    """One request at a time, one that waits, a token every 20 ms."""
    with serving(speller, tokenizer, [Slow()], max_waiting=1) as running:
        yield running


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request) -> bool:
    """How the client asks for its answer."""
    return request.param


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def plain(speller, tokenizer):
    """The text that plain `generate` has for a message, or for a prompt."""

    def text(message=None, prompt=None, seed=0, max_new_tokens=32, model=speller, **options) -> str:
        if prompt is None:
            prompt = f"user: {message}\nassistant: "
        inputs = tokenizer(prompt, return_tensors="pt")
        torch.manual_seed(seed)
        options = {"do_sample": False, **options}
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, **options)
        return tokenizer.decode(
            output[0, inputs["input_ids"].shape[1] :],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )

    return text
