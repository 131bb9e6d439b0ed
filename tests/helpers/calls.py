"""Calls of `generate` for tests: prompts, comparisons, and what is passed along."""

import numpy as np
import torch
from transformers import (
    Cache,
    CompileConfig,
    DynamicCache,
    LogitsProcessor,
    StaticCache,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

from hf_refspec.verification.probe import select_verifier
from tests.helpers.architectures import VOCAB_SIZE
from tests.helpers.drafters import Prophet, Prophets


def random_ids(length: int, seed: int = 0, first: int = 10) -> torch.Tensor:
    """A row of this length, `(1, length)`, of tokens from the first one on."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(first, VOCAB_SIZE, (1, length), generator=generator)


RANDOM_PROMPT = random_ids(12, seed=1, first=3)
PROMPT = torch.tensor([[5, 9, 12, 7, 5, 9, 33, 12, 7]])
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}


_PADDING = (0, 5, 2, 9, 0)


def padded_prompts(rows: int, length: int = 12, seed: int = 1) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB_SIZE, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in enumerate(_PADDING[:rows]):
        ids[row, :padding] = 0
        mask[row, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


class Call:
    """A call, greedy unless its options say otherwise, and what plain decoding returns for it.

    Attributes:
        inputs: `input_ids`, `attention_mask` and what belongs to them; by default of some rows.
        options: The inputs, greedy decoding, 32 new tokens, and those given.
        plain: What plain decoding returns: ids, by default `(rows, 12 + 32)`, or an output.
    """

    prompt_length, new_tokens = 12, 32

    def __init__(self, model, rows: int = 1, seed: int = 1, inputs=None, **options):
        self.model = model
        self.inputs = padded_prompts(rows, self.prompt_length, seed) if inputs is None else inputs
        self.rows = len(self.inputs["input_ids"])
        self.options = {**self.inputs, **GREEDY, "max_new_tokens": self.new_tokens, **options}
        torch.manual_seed(0)
        self.plain = self.generate()
        self._random_state = torch.get_rng_state()

    def generate(self, **kwargs):
        """Calls `generate` with these options in place of the call's own."""
        return self.model.generate(**{**self.options, **kwargs})

    def mask(self, length: int) -> torch.Tensor:
        """The attention mask of the prompts and what follows them, `(rows, length)`."""
        mask = self.inputs.get("attention_mask", torch.ones_like(self.inputs["input_ids"]))
        return torch.nn.functional.pad(mask, (0, length - mask.shape[1]), value=1)

    @property
    def plain_ids(self) -> torch.Tensor:
        return getattr(self.plain, "sequences", self.plain)

    def drafter(self, accuracies=0.8, branches: int = 2, seed: int = 0) -> Prophet:
        """A drafter that gets each row's text right as often as its accuracy says."""
        if self.rows == 1:
            return Prophet(self.plain_ids, np.ravel(accuracies)[0], branches, seed)
        return Prophets(self.inputs, self.plain_ids, accuracies, branches, seed)

    def assert_lossless(
        self, drafter=0.8, verification=None, max_draft_tokens=8, drafting=None, **options
    ):
        """Asserts that a drafter changes nothing that is returned, nor the random numbers after it.

        Args:
            drafter: A number is the accuracy of a `Prophet`, several are those of the rows. A
                function gets the ids of plain decoding and returns the drafter.
            drafting: Further arguments of the call with drafts alone.
            options: In place of the call's own, with and without drafts.

        Returns:
            The drafter's stats.
        """
        if options:
            call = Call(self.model, inputs=self.inputs, **{**self.options, **options})
            return call.assert_lossless(drafter, verification, max_draft_tokens, drafting)
        if callable(drafter):
            drafter = drafter(self.plain_ids)
        elif isinstance(drafter, (float, list, np.ndarray)):
            drafter = self.drafter(drafter)
        drafting = {"max_draft_tokens": max_draft_tokens, **(drafting or {})}
        drafting |= {"verification": verification} if verification else {}
        torch.manual_seed(0)
        drafted = self.generate(candidate_generator=drafter, **drafting)
        assert getattr(drafted, "sequences", drafted).tolist() == self.plain_ids.tolist()
        assert torch.equal(torch.get_rng_state(), self._random_state)
        for name in ("scores", "logits"):
            pair = (getattr(each, name, None) or () for each in (drafted, self.plain))
            for logits in zip(*pair, strict=True):
                torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
        if getattr(self.plain, "past_key_values", None) is not None:
            mask = self.mask(self.plain_ids.shape[1] - 1)
            assert_same_entries(drafted.past_key_values, self.plain.past_key_values, mask)
        return getattr(drafter, "stats", None)


def assert_lossless(
    model, drafter=0.9, inputs=PROMPT, verification=None, max_draft_tokens=8, **options
):
    """As [`Call.assert_lossless`], of one call; `inputs` may be ids alone."""
    inputs = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    drafting = options.pop("drafting", None)
    call = Call(model, inputs=inputs, **{**GREEDY, **options})
    return call.assert_lossless(drafter, verification, max_draft_tokens, drafting)


def up_to_end(tokens: torch.Tensor, ends) -> list[int]:
    """New tokens up to the first end of text."""
    tokens = tokens.tolist()
    places = [place for place, token in enumerate(tokens) if token in ends]
    return tokens[: places[0] + 1] if places else tokens


def assert_same_entries(one: Cache, other: Cache, mask: torch.Tensor) -> None:
    """Asserts that two caches hold the same for the tokens of a mask `(rows, length)`."""
    for layers in zip(one.layers, other.layers, strict=True):
        assert type(layers[0]) is type(layers[1])
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            entries = [getattr(layer, name, None) for layer in layers]
            if entries[1] is None:
                continue
            if name in ("keys", "values"):  # (rows, heads, slots, head_dim)
                assert entries[0].shape == entries[1].shape
                entries = [each[:, :, : mask.shape[1]].transpose(1, 2) for each in entries]
                shown = mask[:, -entries[0].shape[1] :].bool()  # some keep the last tokens only
                entries = [each[shown] for each in entries]
            torch.testing.assert_close(*entries, rtol=1e-4, atol=1e-5)


def new_cache(model, room: int | None = None) -> DynamicCache | StaticCache:
    """A static one with room for a number of tokens, or a dynamic one."""
    if room is None:
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=room)


def compiled_anywhere(**options) -> CompileConfig:
    """A configuration with which `generate` compiles passes over a static cache on a CPU too."""
    config = CompileConfig(mode="default", **options)
    config._compile_all_devices = True
    return config


def prepared(model, input_ids, **kwargs):
    """The generation config and model inputs that `generate` prepares for its decoding loop."""
    taken = []

    def taking(
        model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
    ):
        taken.extend([generation_config, model_kwargs])
        return input_ids

    model.generate(input_ids, custom_generate=taking, **kwargs)
    return taken


@torch.no_grad()
def verified_as(model, rows: int = 1, prompt=PROMPT) -> str:
    """The verifier that a call gets; "none" where it decodes plainly."""
    config, kwargs = prepared(model, prompt.repeat(rows, 1), max_new_tokens=3)
    choice = select_verifier(model, "auto", rows, config, kwargs)
    assert (choice.verifier is None) == (choice.reason is not None)
    return "none" if choice.verifier is None else choice.verifier.kind.name


class Forced(LogitsProcessor):
    """Forces each row to emit the one of some texts `(texts, length)` that begins as it does."""

    def __init__(self, texts: torch.Tensor):
        self.texts = texts

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -float("inf"))
        for row, ids in enumerate(input_ids):
            position = min(len(ids), self.texts.shape[1] - 1)
            text = (self.texts[:, :8] == ids[:8]).all(dim=-1).nonzero()[0, 0]
            forced[row, self.texts[text, position]] = 0
        return forced


class Alternating(LogitsProcessor):
    """Keeps state: forbids even tokens at every second call, and remembers the texts that it saw.
    It holds a module, as those of outlines do."""

    def __init__(self):
        self.seen: list[list[list[int]]] = []
        self.library = torch

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        if len(self.seen) % 2:
            scores = scores.clone()
            scores[:, ::2] = -float("inf")
        return scores


class StopAtCall(StoppingCriteria):
    """Stops at its n-th call; at one that depends on the row's prompt if there is no n."""

    def __init__(self, calls: int | None = None):
        self.calls, self.asked = calls, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.asked += 1
        stops = self.asked >= (self.calls or input_ids[:, 11] % 9 + 5)
        return stops if self.calls is None else torch.full((len(input_ids),), stops)


class ListStreamer(BaseStreamer):
    def __init__(self):
        self.puts = []
        self.ended = 0

    def put(self, value):
        assert value.device.type == "cpu"
        self.puts.append(value.tolist())

    def end(self):
        self.ended += 1
