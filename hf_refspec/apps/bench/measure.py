"""One prompt decoded by all methods in turn, timed and compared."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from time import perf_counter
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from ...drafting.stats import SpeculationStats
from ...text_config import context_length, text_config
from .forced_text import ForcedText
from .methods import LOOK_UP, Method
from .outputs import TIED_STEPS, Output, rounding_steps
from .summary import Entry, Sample

NEW_TOKENS = 256  # at most, where the model writes freely
WARM_UP_TEXT, WARM_UP_TOKENS = 320, 80


class IdsDifferError(Exception):
    """A method returned other ids than the first method, in float32."""


class ContextTooShortError(Exception):
    """The model's context does not hold a prompt and its answer."""


@contextmanager
def timed(model: PreTrainedModel, compiled: bool) -> Iterator[list[float]]:
    """Records when the body begins, when each forward pass ends, and when the body ends.

    A streamer would copy each token from the GPU and so slow down what is measured; of the passes
    only the first waits for the GPU. Of compiled passes, into which a hook would be compiled, only
    the first is recorded.
    """

    def note(*_: Any) -> None:
        times.append(_now(model) if len(times) == 1 else perf_counter())

    def prefill(*args: Any, **kwargs: Any) -> Any:
        outputs = type(model)._prefill(model, *args, **kwargs)
        note()
        return outputs

    vars(note)["only_reads"] = True  # so that the model is not probed again
    times = [_now(model)]
    with ExitStack() as stack:
        if compiled:
            vars(model)["_prefill"] = prefill
            stack.callback(vars(model).pop, "_prefill")
        else:
            stack.callback(model.register_forward_hook(note).remove)
        yield times
        times.append(_now(model))


def _now(model: PreTrainedModel) -> float:
    """The time, once the GPU has finished its work."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return perf_counter()


@dataclass
class Bench:
    """A model and the methods that are compared on it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    new_methods: Callable[[], list[Method]]  # with new drafters
    replay: bool  # whether recorded answers are forced
    max_new_tokens: int | None = None  # by default 256, or the whole recorded answer
    sampling: dict[str, Any] = field(default_factory=dict)  # for `generate`; empty for greedy
    methods: list[Method] = field(default_factory=list)  # plain decoding first

    def begin(self) -> None:
        """Starts a suite, with empty caches."""
        self.methods = self.supported(self.new_methods())

    def supported(self, methods: list[Method]) -> list[Method]:
        """The methods that the model supports: transformers has no prompt look-up for models with a
        running state, and our drafts are then verified as the probe decides."""
        if not getattr(self.model, "_is_stateful", False):
            return methods
        return [
            replace(method, options={"verification": "auto"}) if method.drafter else method
            for method in methods
            if method.name != LOOK_UP
        ]

    def warm_up(self) -> None:
        """Calls each method once, as first calls compile, probe and load; on a text that repeats
        itself, so that drafts of all sizes are verified."""
        length = min(WARM_UP_TEXT, context_length(self.model) or WARM_UP_TEXT)
        text = [1 + i % min(100, text_config(self.model).vocab_size - 1) for i in range(length)]
        split = max(length - WARM_UP_TOKENS, 1)
        for method in self.supported(self.new_methods()):
            self.call(method, [text[:split]], text[split:])

    def measure(
        self,
        name: str,
        prompts: list[list[int]],
        answer_ids: list[int] | None = None,
        methods: list[Method] | None = None,
        **kwargs: Any,
    ) -> tuple[Entry, list[int]]:
        """Decodes one prompt, or a batch, by all methods, in an order that depends on the name.

        The recorded answer, if there is one, is forced on the only row; `kwargs` go to `generate`.
        Returns the entry for results.json, with a sample for each method, and the new ids of the
        first method and row. In a sample `other_tokens` counts the tokens that differ from the
        first method's, and `first_difference` has the `place` of the first of them and by how many
        `steps` of rounding the first method's logits prefer its own token.

        Raises `ContextTooShortError`, and `IdsDifferError` if ids differ in float32, other than by
        a tie of two logits.
        """
        methods = self.methods if methods is None else methods
        answer_ids = None if answer_ids is None else answer_ids[: self.max_new_tokens]
        for prompt_ids in prompts:
            self.check_context(name, prompt_ids, self.new_tokens(answer_ids))
        # Shuffled: the first method meets cold caches.
        order = random.Random(name).sample(range(len(methods)), len(methods))
        calls = {i: self.call(methods[i], prompts, answer_ids, **kwargs) for i in order}
        for i, method in enumerate(methods):
            if answer_ids is not None and calls[i][1] != [answer_ids]:
                raise IdsDifferError(f"{name}: {method.name} does not return the forced answer")
        # Without retrieval the model writes another text, so only like methods are compared.
        alike = [i for i, each in enumerate(methods) if each.retrieves == methods[0].retrieves]
        for row, prompt_ids in enumerate(prompts):
            compared = [(methods[i], calls[i][0], calls[i][2][row]) for i in alike]
            self._compare(name, prompt_ids, answer_ids, compared)
        text = sha256(json.dumps([*prompts, answer_ids]).encode()).hexdigest()[:16]
        samples = [calls[i][0] for i in range(len(methods))]
        prompt_tokens = sum(map(len, prompts))
        entry = {"name": name, "text": text, "prompt_tokens": prompt_tokens, "samples": samples}
        return entry, calls[0][1][0]

    def answer(self, name: str, prompt_ids: list[int]) -> list[int]:
        """The model's own answer, greedy and not timed."""
        self.check_context(name, prompt_ids, self.new_tokens(None))
        output = self._generate([prompt_ids], max_new_tokens=self.new_tokens(None))
        return output[0, len(prompt_ids) :].tolist()

    def remember(self, prompt_ids: list[int], output_ids: list[int]) -> None:
        """Adds a finished call to all session caches."""
        for cache in filter(None, (method.cache for method in self.methods)):
            cache.add(prompt_ids, output_ids)

    def new_tokens(self, answer_ids: list[int] | None) -> int:
        """The maximum number of new tokens of a call."""
        return len(answer_ids) if answer_ids is not None else self.max_new_tokens or NEW_TOKENS

    def check_context(self, name: str, prompt_ids: list[int], new_tokens: int) -> None:
        """Checks that a prompt and its answer fit the model's vocabulary and context."""
        vocab_size = text_config(self.model).vocab_size
        if max(prompt_ids) >= vocab_size:
            raise ValueError(
                f"{name} has the token {max(prompt_ids)}, but the model has a vocabulary of "
                f"{vocab_size}: the tokenizer belongs to another model"
            )
        context = context_length(self.model)
        if context is not None and len(prompt_ids) + new_tokens > context:
            raise ContextTooShortError(
                f"{name} has {len(prompt_ids)} tokens and up to {new_tokens} new ones, more than "
                f"the model's context of {context}"
            )

    def call(
        self,
        method: Method,
        prompts: list[list[int]],
        answer_ids: list[int] | None = None,
        **kwargs: Any,
    ) -> tuple[Sample, list[list[int]], list[Output]]:
        """Calls `generate` once; returns the sample, the new ids of each row, and each row's output
        to compare."""
        sampling = self.sampling if answer_ids is None else {}  # a forced token is not drawn
        kwargs = {**sampling, **kwargs, **method.kwargs}
        kwargs["max_new_tokens"] = self.new_tokens(answer_ids)
        forced = self._forced(prompts[0], answer_ids)
        gpus = range(torch.cuda.device_count()) if self.model.device.type == "cuda" else ()
        for gpu in gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        torch.manual_seed(0)
        static = "cache_implementation" in method.options
        with timed(self.model, compiled=static) as times:
            output = self._generate(prompts, forced, **kwargs)
        output = getattr(output, "sequences", output)
        rows = output[:, max(map(len, prompts)) :].tolist()
        if len(rows) > 1:
            rows = [self._ended(row) for row in rows]
        tokens = sum(map(len, rows))
        counted = len(rows) == 1 and not static
        drafted = method.drafter.stats if method.drafter else SpeculationStats()
        sample: Sample = {
            "method": method.name,
            "nodes": method.nodes,
            "tokens": tokens,
            "forward_passes": len(times) - 2 if counted else _row_passes(method, tokens),
            "prefill_seconds": times[1] - times[0],
            "decoding_seconds": times[-1] - times[1],
            "drafting_seconds": drafted.drafting_seconds,
            "learning_seconds": drafted.learning_seconds,
            "peak_bytes": sum(map(torch.cuda.max_memory_allocated, gpus)),
            "other_tokens": None,
            "first_difference": None,
            "figures": {},  # further ones of a subclass
        }
        chosen = rows if forced is None else [forced.unforced()]
        return sample, rows, [Output(each) for each in chosen]

    def _forced(self, prompt_ids: list[int], answer_ids: list[int] | None) -> ForcedText | None:
        if answer_ids is None:
            return None
        return ForcedText(torch.tensor(prompt_ids + answer_ids, device=self.model.device))

    def _generate(
        self, prompts: list[list[int]], forced: ForcedText | None = None, **kwargs: Any
    ) -> Any:
        """Calls `generate` with a row for each prompt, greedily unless `kwargs` say otherwise."""
        length = max(map(len, prompts))
        padding = [length - len(each) for each in prompts]
        pad = self.model.generation_config.pad_token_id or 0
        ids = [[pad] * most + each for most, each in zip(padding, prompts, strict=True)]
        # With a mask, as a prompt may contain the padding token.
        mask = [[0] * most + [1] * (length - most) for most in padding]
        inputs, attention_mask = (
            torch.tensor(each, device=self.model.device) for each in (ids, mask)
        )
        kwargs = {"do_sample": False, **kwargs}
        if forced is not None:
            kwargs |= {"eos_token_id": None, "logits_processor": LogitsProcessorList([forced])}
        return self.model.generate(inputs, attention_mask=attention_mask, **kwargs)

    def _ended(self, row: list[int]) -> list[int]:
        """The new tokens of a row of a batch, without the padding after its end."""
        end = self.model.generation_config.eos_token_id
        ends = set(end if isinstance(end, list) else [end])
        length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        return row[:length]

    def _compare(
        self,
        name: str,
        prompt_ids: list[int],
        answer_ids: list[int] | None,
        calls: list[tuple[Method, Sample, Output]],
    ) -> None:
        """Records in each sample how a row's tokens differ from the first method's."""
        first, _, expected = calls[0]
        differences = [output.differences(expected) for _, _, output in calls]
        for (_, sample, _), places in zip(calls, differences, strict=True):
            sample["other_tokens"] = (sample["other_tokens"] or 0) + len(places)
        if answer_ids is None:  # a free text goes on differently
            differences = [places[:1] for places in differences]
        length = max((places[-1] + 1 for places in differences if places), default=0)
        logits: list[torch.Tensor] = []
        # Where the model retrieves or samples, its best logit does not decide the token.
        chooses_best = answer_ids is not None or not (first.retrieves or self.sampling)
        if length and chooses_best:
            logits = self._logits(first, prompt_ids, answer_ids, length)
        for (method, sample, output), places in zip(calls, differences, strict=True):
            steps = [self._margin(logits, place, expected, output) for place in places]
            if places and logits and sample["first_difference"] is None:
                sample["first_difference"] = {"place": places[0], "steps": steps[0]}
            if self.model.dtype == torch.float32:  # in other types near-ties may flip
                where = f"{name}: {method.name}"
                where += f" ({method.nodes} nodes)" if method.drafter else ""
                if output.passages != expected.passages:
                    raise IdsDifferError(f"{where} retrieved other passages than {first.name}")
                untied = [i for i, each in zip(places, steps, strict=True) if each > TIED_STEPS]
                if untied:
                    raise IdsDifferError(
                        f"{where} returns other ids than {first.name}, from new token {untied[0]} "
                        "on; in float32 they must be the same"
                    )

    def _margin(
        self, logits: list[torch.Tensor], place: int, expected: Output, output: Output
    ) -> float:
        """The distance of the expected token's logit from the other token's, in rounding steps."""
        if place >= min(len(logits), len(expected.tokens), len(output.tokens)):
            return math.inf  # unknown, or one text ends where the other goes on
        own, other = expected.tokens[place], output.tokens[place]
        pair = float(logits[place][own]), float(logits[place][other])
        return rounding_steps(*pair, self.model.dtype)

    def _logits(
        self, method: Method, prompt_ids: list[int], answer_ids: list[int] | None, length: int
    ) -> list[torch.Tensor]:
        """A method's logits for its first new tokens, `(vocab_size,)` each, by a second call:
        recording them in the first would disturb the timing."""
        output = self._generate(
            [prompt_ids],
            self._forced(prompt_ids, answer_ids),
            **method.kwargs,
            max_new_tokens=length,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return [logits[0] for logits in output.logits]


def _row_passes(method: Method, tokens: int) -> int:
    """The forward passes of all unfinished rows; a plain pass yields one token a row."""
    return sum(method.drafter.stats.accepted_lengths) if method.drafter else tokens
