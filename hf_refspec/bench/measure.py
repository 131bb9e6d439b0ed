"""One prompt, decoded in all ways in turn, timed and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from .models import context_length
from .replay import ForcedText
from .said import Said, tied
from .ways import LOOK_UP, Way, mixed

NEW_TOKENS = 256  # at most, where the model says what it likes
WARM_UP_TEXT, WARM_UP_TOKENS = 320, 80


class IdsDifferError(Exception):
    """A way to decode has not given the ids of plain decoding."""


class ContextTooShortError(Exception):
    """The model's context does not hold a prompt and its answer."""


@dataclass(frozen=True)
class Sample:
    """One call of `generate`.

    Attributes:
        way (`str`), nodes (`int` or `str`): How, see [`Way`].
        tokens (`int`): New tokens.
        forward_passes (`int`): Of the model, the prefill among them.
        prefill_seconds (`float`): Up to the end of the first forward pass.
        decoding_seconds (`float`): From there on.
        other_tokens (`int`): How many tokens the model chose otherwise than in plain decoding; in a
            replay, would have chosen.
        drafted, accepted (`int`), accepted_lengths (`list[int]`), drafting_seconds (`float`): Of
            our own ways, see [`SpeculationStats`].
    """

    way: str
    nodes: int | str
    tokens: int
    forward_passes: int
    prefill_seconds: float
    decoding_seconds: float
    other_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    drafting_seconds: float = 0.0


class PassTimer:
    """Counts a model's forward passes and notes when the first is over.

    A streamer could tell nearly the same, but would cost each token a copy from the GPU, in our
    ways more than in plain decoding.
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
    """A model and the ways to decode with it.

    Attributes:
        model (`PreTrainedModel`): The target model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        make_ways (callable): Makes the ways, with drafters that have seen nothing.
        replay (`bool`): Whether recorded answers are forced.
        ways (`list[Way]`): Those in use; the first is plain decoding.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    make_ways: Callable[[], list[Way]]
    replay: bool
    ways: list[Way] = field(default_factory=list)

    @property
    def computes_exactly(self) -> bool:
        """Whether other ids are an error: in a shorter type near-ties may fall either way."""
        return self.model.dtype == torch.float32

    @property
    def takes_look_up(self) -> bool:
        """Whether transformers drafts by prompt look-up: not where the model's state is no cache
        that can be cropped."""
        return not getattr(self.model, "_is_stateful", False)

    def begin(self) -> None:
        """Takes drafters that have seen nothing: what one suite said is nothing to another."""
        self.ways = self._possible_ways()

    def warm_up(self) -> None:
        """Lets the first call of each way, which compiles, probes and loads, pass uncounted.

        The model is made to repeat itself, so that drafts of all sizes are verified.
        """
        vocab_size = self.model.config.get_text_config(decoder=True).vocab_size
        length = min(WARM_UP_TEXT, context_length(self.model))
        repeated = [1 + i % min(100, vocab_size - 1) for i in range(length)]
        border = max(length - WARM_UP_TOKENS, 1)
        prompt_ids, answer_ids = repeated[:border], repeated[border:]
        for way in self._possible_ways():
            self.say(prompt_ids, answer_ids, **way.kwargs)

    def ask(
        self, name: str, prompt_ids: list[int], answer_ids: list[int] | None = None
    ) -> tuple[dict[str, Any], list[int]]:
        """Decodes in all ways in turn, in mixed order.

        Args:
            name (`str`): What the prompt is called.
            prompt_ids (`list[int]`): The prompt.
            answer_ids (`list[int]`, *optional*): What the model is made to say; else it says what
                it likes.

        Returns:
            What was measured, as plain types, and the ids of plain decoding.

        Raises:
            ContextTooShortError: If the model's context does not hold it.
            IdsDifferError: If ids differ in float32, and not by a tie.
        """
        self.check_context(name, prompt_ids, NEW_TOKENS if answer_ids is None else len(answer_ids))
        samples: list[Sample] = []
        order = mixed(range(len(self.ways)), name)
        timed = {i: self._timed(self.ways[i], prompt_ids, answer_ids) for i in order}
        _, plain_ids, plain = timed[0]
        for i, way in enumerate(self.ways):
            sample, ids, said = timed[i]
            if answer_ids is not None and ids != answer_ids:
                raise IdsDifferError(f"{name}: {way.name} does not say what it is made to say")
            if self.computes_exactly:
                self._check_difference(name, way, prompt_ids, said, plain)
            samples.append(replace(sample, other_tokens=len(said.differences(plain))))
        entry = {"name": name, "prompt_tokens": len(prompt_ids)}
        return {**entry, "samples": [asdict(sample) for sample in samples]}, plain_ids

    def answer(self, name: str, prompt_ids: list[int]) -> list[int]:
        """What the model says by itself, not timed.

        Raises:
            ContextTooShortError: If the model's context does not hold it.
        """
        self.check_context(name, prompt_ids, NEW_TOKENS)
        return self.generate(prompt_ids, max_new_tokens=NEW_TOKENS)

    def remember(self, prompt_ids: list[int], output_ids: list[int]) -> None:
        """Adds a finished call to all caches."""
        for cache in filter(None, (way.cache for way in self.ways)):
            cache.add(prompt_ids, output_ids)

    def _possible_ways(self) -> list[Way]:
        """All; but where there is no prompt look-up, the probe decides what drafts can be
        verified."""
        ways = self.make_ways()
        if self.takes_look_up:
            return ways
        return [
            replace(way, options={"verification": "auto"}) if way.drafter else way
            for way in ways
            if way.name != LOOK_UP
        ]

    def check_context(self, name: str, prompt_ids: list[int], new_tokens: int) -> None:
        """Refuses a prompt that, with its answer, is longer than the model can read.

        Raises:
            ContextTooShortError: If it is.
            ValueError: If it is of tokens that the model has not.
        """
        vocab_size = self.model.config.get_text_config(decoder=True).vocab_size
        if max(prompt_ids) >= vocab_size:
            raise ValueError(
                f"{name} has the token {max(prompt_ids)}, but the model a vocabulary of "
                f"{vocab_size}: its tokenizer is another model's"
            )
        context = context_length(self.model)
        if len(prompt_ids) + new_tokens > context:
            raise ContextTooShortError(
                f"{name} has {len(prompt_ids)} tokens and up to {new_tokens} new ones, more than "
                f"the model's context of {context}"
            )

    def say(
        self, prompt_ids: list[int], answer_ids: list[int] | None, **kwargs: Any
    ) -> tuple[list[int], Callable[[], Said]]:
        """Makes the model say an answer, or lets it say what it likes.

        Returns:
            The new ids, and what to call, when time no longer counts, for what to compare.
        """
        if answer_ids is None:
            ids = self.generate(prompt_ids, max_new_tokens=NEW_TOKENS, **kwargs)
            return ids, lambda: Said(ids)
        forced = ForcedText(torch.tensor(prompt_ids + answer_ids, device=self.model.device))
        ids = self.generate(
            prompt_ids,
            max_new_tokens=len(answer_ids),
            eos_token_id=None,
            logits_processor=LogitsProcessorList([forced]),
            **kwargs,
        )
        return ids, forced.unforced

    def generate(self, prompt_ids: list[int], **kwargs: Any) -> list[int]:
        """The new ids, greedily unless `kwargs` say otherwise."""
        ids = torch.tensor([prompt_ids], device=self.model.device)
        # Said outright: a prompt may hold the token that else is taken for padding.
        mask = torch.ones_like(ids)
        kwargs = {"do_sample": False, **kwargs}
        output = self.model.generate(ids, attention_mask=mask, **kwargs)
        return output[0, len(prompt_ids) :].tolist()

    def _timed(
        self, way: Way, prompt_ids: list[int], answer_ids: list[int] | None
    ) -> tuple[Sample, list[int], Said]:
        timer = PassTimer(self.model)
        with timer():
            ids, said = self.say(prompt_ids, answer_ids, **way.kwargs)
        sample = Sample(
            way.name,
            way.nodes,
            tokens=len(ids),
            forward_passes=timer.passes,
            prefill_seconds=timer.prefilled - timer.began,
            decoding_seconds=timer.ended - timer.prefilled,
        )
        if way.drafter is None:
            return sample, ids, said()
        names = ("drafted", "accepted", "accepted_lengths", "drafting_seconds")
        stats = {name: getattr(way.drafter.stats, name) for name in names}
        return replace(sample, **stats), ids, said()

    def _check_difference(
        self, name: str, way: Way, prompt_ids: list[int], said: Said, plain: Said
    ) -> None:
        places = said.beyond_rounding(plain)
        if not places:
            return
        first, length = places[0], min(len(said.tokens), len(plain.tokens))
        if said.logits is None and first < length:
            logits = self._plain_logits(prompt_ids, first)
            if tied(float(logits[plain.tokens[first]]), float(logits[said.tokens[first]])):
                return
        raise IdsDifferError(
            f"{name}: {way.name} ({way.nodes} nodes) gives other ids than plain decoding, from new "
            f"token {first} on; in float32 they must be the same"
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
