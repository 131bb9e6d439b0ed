"""One prompt, decoded by all methods in turn, timed and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from ..ralm.stats import RetrievalStats
from .methods import LOOK_UP, Method, mixed
from .models import context_length, vocabulary_size
from .outputs import Output, tied
from .replay import ForcedText

NEW_TOKENS = 256  # at most, where the model says what it likes
WARM_UP_TEXT, WARM_UP_TOKENS = 320, 80
# One for each step of the text: where they are the same they say nothing, and else it is an error.
_NOT_KEPT = ("best_ids", "speculation_was_right")


class IdsDifferError(Exception):
    """A method has not given the ids of plain decoding, or of the baseline."""


class ContextTooShortError(Exception):
    """The model's context does not hold a prompt and its answer."""


@dataclass(frozen=True)
class Sample:
    """One call of `generate`.

    Attributes:
        method (`str`), nodes (`int` or `str`): How, see [`Method`].
        tokens (`int`): New tokens.
        forward_passes (`int`): Of the model, the prefill among them.
        prefill_seconds (`float`): Up to the end of the first forward pass.
        decoding_seconds (`float`): From there on.
        run (`int`): The number of the run, where methods are measured repeatedly.
        other_tokens (`int`): How many tokens the model chose otherwise than in plain decoding; in a
            replay, would have chosen.
        drafted, accepted (`int`), accepted_lengths (`list[int]`), drafting_seconds (`float`): Of
            our own drafters, see [`SpeculationStats`].
        retrieval (`dict`, *optional*): Where it retrieved, [`RetrievalStats`].
    """

    method: str
    nodes: int | str
    tokens: int
    forward_passes: int
    prefill_seconds: float
    decoding_seconds: float
    run: int = 0
    other_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    drafting_seconds: float = 0.0
    retrieval: dict[str, Any] | None = None


class PassTimer:
    """Counts a model's forward passes and notes when the first is over.

    A streamer could tell nearly the same, but would cost each token a copy from the GPU, with
    drafts more than in plain decoding.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.passes = 0
        self.began = self.prefilled = self.ended = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Times what is done meanwhile."""
        hook = self._model.register_forward_hook(self._count)
        try:
            self.began = self._now()
            yield
            self.ended = self._now()
        finally:
            hook.remove()

    def _count(self, *_: Any) -> None:
        self.passes += 1
        if self.passes == 1:
            self.prefilled = self._now()

    def _now(self) -> float:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return perf_counter()


@dataclass
class Bench:
    """A model and the methods to decode with it.

    Attributes:
        model (`PreTrainedModel`): The target model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        make_methods (callable): Makes the methods, with drafters that have seen nothing.
        replay (`bool`): Whether recorded answers are forced.
        max_new_tokens (`int`, *optional*): Of an answer; by default 256, of a recorded one all.
        methods (`list[Method]`): Those in use; the first is plain decoding.
        warm (`set[str]`): What has been warmed up, by name.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    make_methods: Callable[[], list[Method]]
    replay: bool
    max_new_tokens: int | None = None
    methods: list[Method] = field(default_factory=list)
    warm: set[str] = field(default_factory=set)

    @property
    def computes_exactly(self) -> bool:
        """Whether other ids are an error: in a shorter type near-ties may fall either way."""
        return self.model.dtype == torch.float32

    def begin(self) -> None:
        """Takes drafters that have seen nothing: each suite starts with empty caches."""
        self.methods = self.possible(self.make_methods())

    def possible(self, methods: list[Method]) -> list[Method]:
        """Those that the model can be decoded with.

        Transformers has no prompt look-up where the state is no cache that can be cropped; there
        the probe decides how drafts can be verified.
        """
        if not getattr(self.model, "_is_stateful", False):
            return methods
        return [
            replace(method, options={"verification": "auto"}) if method.drafter else method
            for method in methods
            if method.name != LOOK_UP
        ]

    def warm_up(self) -> None:
        """Lets the first call of each method, which compiles, probes and loads, pass uncounted.

        The model is made to repeat itself, so that drafts of all sizes are verified.
        """
        length = min(WARM_UP_TEXT, context_length(self.model))
        repeated = [1 + i % min(100, vocabulary_size(self.model) - 1) for i in range(length)]
        border = max(length - WARM_UP_TOKENS, 1)
        self.call_all(self.possible(self.make_methods()), repeated[:border], repeated[border:])

    def call_all(
        self, methods: list[Method], prompt_ids: list[int], answer_ids: list[int] | None
    ) -> None:
        """Calls methods without measuring anything."""
        for method in methods:
            self._call(method, prompt_ids, answer_ids)

    def measure(
        self,
        name: str,
        prompt_ids: list[int],
        answer_ids: list[int] | None = None,
        methods: list[Method] | None = None,
        runs: int = 1,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], list[int]]:
        """Decodes by all methods in turn, in mixed order.

        Args:
            name (`str`): What the prompt is called.
            prompt_ids (`list[int]`): The prompt.
            answer_ids (`list[int]`, *optional*): What the model is made to say; else it says what
                it likes.
            methods (`list[Method]`, *optional*): The first is the one whose ids all must have but
                those that retrieve where it does not, or the other way round.
            runs (`int`, *optional*, defaults to 1): How often.
            kwargs: Further keyword arguments of every `generate`.

        Returns:
            What was measured, as plain types, and the ids of the first method.

        Raises:
            ContextTooShortError: If the model's context does not hold it.
            IdsDifferError: If ids differ in float32, and not by a tie.
        """
        methods = self.methods if methods is None else methods
        answer_ids = None if answer_ids is None else answer_ids[: self.max_new_tokens]
        self.check_context(name, prompt_ids, self.new_tokens(answer_ids))
        samples: list[Sample] = []
        for run in range(runs):
            order = mixed(range(len(methods)), f"{name}, {run}")
            calls = {i: self._call(methods[i], prompt_ids, answer_ids, **kwargs) for i in order}
            if run == 0:
                _, first_ids, expected = calls[0]
            for i, method in enumerate(methods):
                sample, ids, output = calls[i]
                if answer_ids is not None and ids != answer_ids:
                    raise IdsDifferError(f"{name}: {method.name} does not say what it is made to")
                other_tokens = 0
                if method.retrieves == methods[0].retrieves:
                    self._check(name, method, methods[0], prompt_ids, output, expected)
                    other_tokens = len(output.differences(expected))
                samples.append(replace(sample, run=run, other_tokens=other_tokens))
        entry = {"name": name, "prompt_tokens": len(prompt_ids)}
        return {**entry, "samples": [asdict(sample) for sample in samples]}, first_ids

    def answer(self, name: str, prompt_ids: list[int]) -> list[int]:
        """What the model says by itself, not timed.

        Raises:
            ContextTooShortError: If the model's context does not hold it.
        """
        self.check_context(name, prompt_ids, self.new_tokens(None))
        return self._generate(prompt_ids, max_new_tokens=self.new_tokens(None))

    def remember(self, prompt_ids: list[int], output_ids: list[int]) -> None:
        """Adds a finished call to all caches."""
        for cache in filter(None, (method.cache for method in self.methods)):
            cache.add(prompt_ids, output_ids)

    def new_tokens(self, answer_ids: list[int] | None) -> int:
        """The most new tokens of a call."""
        return len(answer_ids) if answer_ids is not None else self.max_new_tokens or NEW_TOKENS

    def check_context(self, name: str, prompt_ids: list[int], new_tokens: int) -> None:
        """Refuses a prompt that, with its answer, is longer than the model can read.

        Raises:
            ContextTooShortError: If it is.
            ValueError: If it is of tokens that the model has not.
        """
        if max(prompt_ids) >= vocabulary_size(self.model):
            raise ValueError(
                f"{name} has the token {max(prompt_ids)}, but the model a vocabulary of "
                f"{vocabulary_size(self.model)}: its tokenizer is another model's"
            )
        context = context_length(self.model)
        if len(prompt_ids) + new_tokens > context:
            raise ContextTooShortError(
                f"{name} has {len(prompt_ids)} tokens and up to {new_tokens} new ones, more than "
                f"the model's context of {context}"
            )

    def _call(
        self, method: Method, prompt_ids: list[int], answer_ids: list[int] | None, **kwargs: Any
    ) -> tuple[Sample, list[int], Output]:
        """One call: what is kept of it, the new ids, and what is compared."""
        kwargs = {**kwargs, **method.kwargs, "max_new_tokens": self.new_tokens(answer_ids)}
        retrieval = RetrievalStats()
        if method.retrieves:
            kwargs["retrieval_stats"] = retrieval
        forced = None
        if answer_ids is not None:
            forced = ForcedText(torch.tensor(prompt_ids + answer_ids, device=self.model.device))
            kwargs |= {"eos_token_id": None, "logits_processor": LogitsProcessorList([forced])}
        timer = PassTimer(self.model)
        torch.manual_seed(0)
        with timer():
            ids = self._generate(prompt_ids, **kwargs)
        sample = Sample(
            method.name,
            method.nodes,
            tokens=len(ids),
            forward_passes=timer.passes,
            prefill_seconds=timer.prefilled - timer.began,
            decoding_seconds=timer.ended - timer.prefilled,
        )
        if method.drafter is not None:
            names = ("drafted", "accepted", "accepted_lengths", "drafting_seconds")
            stats = {name: getattr(method.drafter.stats, name) for name in names}
            sample = replace(sample, **stats)
        if method.retrieves:
            kept = {key: x for key, x in retrieval.to_dict().items() if key not in _NOT_KEPT}
            sample = replace(sample, retrieval=kept)
        output = Output(ids) if forced is None else forced.unforced()
        return sample, ids, replace(output, passages=retrieval.best_ids)

    def _generate(self, prompt_ids: list[int], **kwargs: Any) -> list[int]:
        """The new ids, greedily unless `kwargs` say otherwise."""
        ids = torch.tensor([prompt_ids], device=self.model.device)
        # Said outright: a prompt may hold the token that else is taken for padding.
        mask = torch.ones_like(ids)
        kwargs = {"do_sample": False, **kwargs}
        output = self.model.generate(ids, attention_mask=mask, **kwargs)
        return output[0, len(prompt_ids) :].tolist()

    def _check(
        self,
        name: str,
        method: Method,
        first: Method,
        prompt_ids: list[int],
        output: Output,
        expected: Output,
    ) -> None:
        """Refuses other ids than the first method's, or other passages, where it can be exact."""
        if not self.computes_exactly:
            return
        how = f"{name}: {method.name}" + (f" ({method.nodes} nodes)" if method.drafter else "")
        if output.passages != expected.passages:
            raise IdsDifferError(f"{how} has retrieved something else than {first.name}")
        places = output.beyond_rounding(expected)
        if not places:
            return
        place, length = places[0], min(len(output.tokens), len(expected.tokens))
        if output.logits is None and place < length and not method.retrieves:
            logits = self._plain_logits(prompt_ids, place)
            if tied(float(logits[expected.tokens[place]]), float(logits[output.tokens[place]])):
                return
        raise IdsDifferError(
            f"{how} gives other ids than {first.name}, from new token {place} on; in float32 they "
            "must be the same"
        )

    def _plain_logits(self, prompt_ids: list[int], place: int) -> torch.Tensor:
        """The logits from which plain decoding chooses a new token, `(vocab_size,)`."""
        ids = torch.tensor([prompt_ids], device=self.model.device)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=place + 1,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return output.logits[place][0]
