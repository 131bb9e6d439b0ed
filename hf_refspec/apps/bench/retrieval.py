"""Retrieval-augmented generation: speculative retrieval against waiting for every search."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .measure import Bench
from .methods import Method, transformers_methods
from .summary import Entry


@dataclass
class Setting:
    """A retriever, or a datastore with its options.

    Attributes:
        name (`str`): For the tables.
        size (`int`): How many passages or entries are searched.
        new_methods (callable): Returns the methods that retrieve, the baseline first. It is called
            once, before the first prompt, as building an index takes a while.
        longest_passage (`int`): How many tokens are put in front of a prompt, at most.
        sampled (`bool`): Whether the model samples.
    """

    name: str
    size: int
    new_methods: Callable[[], list[Method]]
    longest_passage: int = 0
    sampled: bool = False
    methods: list[Method] = field(default_factory=list)


def measure_retrieval(
    setting: Setting,
    name: str,
    prompt_ids: list[int],
    answer_ids: list[int] | None,
    bench: Bench,
) -> Iterator[Entry]:
    """Measures one prompt with one retriever.

    The model without retrieval, plainly and with prompt look-up, is measured beside it.

    Raises:
        ContextTooShortError: If the model's context does not hold passage, prompt and answer.
        IdsDifferError: If ids or passages differ in float32.
    """
    bench.check_context(name, prompt_ids, bench.new_tokens(answer_ids) + setting.longest_passage)
    if not setting.methods:
        setting.methods = [*setting.new_methods(), *bench.supported(transformers_methods())]
        for method in setting.methods:  # first calls compile, probe and load
            bench.call(method, [prompt_ids], answer_ids)
    entry, _ = bench.measure(
        name, [prompt_ids], answer_ids, setting.methods, do_sample=setting.sampled
    )
    yield {**entry, "setting": setting.name, "size": setting.size}
