"""Drafters for calls of `generate` that name none: [`attach`] and [`detach`]."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from torch import nn
    from transformers import Pipeline, PreTrainedModel
    from transformers.generation import CandidateGenerator

    from .drafting.contract import Drafter
    from .drafting.stats import DraftStats

logger = logging.getLogger("hf_refspec")

# The attachments of each model, and of all models of the process; the last one counts.
_attached: WeakKeyDictionary[nn.Module, list[Attachment]] = WeakKeyDictionary()
_attached_to_all: list[Attachment] = []


class Attachment:
    """The result of [`attach`]. As a context manager it is detached at the end of the body.

    Attributes:
        options (`dict`): The arguments that [`attach`] adds to calls of `generate`.
        stats (`DraftStats`): The counts of all calls together.
    """

    def __init__(
        self,
        drafter: Drafter | CandidateGenerator | str,
        reading: Mapping[str, Any],
        **options: Any,
    ) -> None:
        from .drafting.blend import as_drafter
        from .drafting.calls import DrafterPool
        from .drafting.stats import DraftStats

        self.options = {**options, **reading}
        self.stats = DraftStats()
        self._drafter = drafter
        # "auto" alone is the model's own; beside other sources it learns when those pay.
        is_default = drafter == "auto" and not reading
        self._pool = None if is_default else DrafterPool(as_drafter(drafter))
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def __repr__(self) -> str:
        plain = ((n, value) for n, value in self.options.items() if isinstance(value, (int, str)))
        options = "".join(f", {name}={value!r}" for name, value in plain)
        return f"Attachment({self._drafter!r}{options})"

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: Any) -> None:
        for stack in (*_attached.values(), _attached_to_all):
            if self in stack:
                stack.remove(self)

    def drafter(self, model: PreTrainedModel) -> AbstractContextManager[Drafter]:
        """A drafter that no other call has, for one call."""
        if self._pool is not None:
            return self._pool.drafter()
        from .drafting.calls import default_drafters
        from .text_config import vocab_size_of
        from .verification.model_memo import memo_of

        return default_drafters(memo_of(model), vocab_size_of(model)).drafter()

    def count(self, stats: DraftStats) -> None:
        """Adds the counts of a call that is over."""
        with self._lock:
            self.stats += stats
            self.stats.explain(stats.verification, stats.reason)

    def log_plain_call(self, why: str) -> None:
        """Logs once for each reason that a call runs without the drafter."""
        if why not in self._logged:
            self._logged.add(why)
            logger.warning("generate() runs plainly, without the attached drafter: %s", why)


def attach(
    model: nn.Module | Pipeline | None = None,
    drafter: Drafter | CandidateGenerator | Literal["auto"] = "auto",
    *,
    max_draft_tokens: int | Literal["auto"] = "auto",
    verification: str = "auto",
    use_mtp: bool = False,
    assistant_model: PreTrainedModel | None = None,
    speculation_type: str | None = None,
) -> Attachment:
    """Makes every later `generate` of a model use a drafter, also inside of a pipeline or an agent.

    The text stays the same. A call that cannot be speculated (beam search, an encoder-decoder
    model) runs plainly, which is logged once; one with `candidate_generator=` (also `None`) or
    `custom_generate=` is left alone. Nothing is saved with the model or attached to its copies.

        with rs.attach(model):
            pipeline("text-generation", model=model, tokenizer=tokenizer)("Hello")

    Args:
        model (`nn.Module` or `Pipeline`, *optional*): The target model, what wraps it (as PEFT
            does), or a pipeline that holds it. By default all models of the process; one that has a
            drafter of its own keeps it.
        drafter ([`Drafter`], `CandidateGenerator` or `"auto"`, *optional*, defaults to `"auto"`):
            As `candidate_generator` of `generate`. Calls in several threads get forks of it.
        max_draft_tokens (`int` or `"auto"`, *optional*, defaults to `"auto"`): As of `generate`.
        verification (`str`, *optional*, defaults to `"auto"`): As of `generate`.
        use_mtp (`bool`, *optional*, defaults to `False`): As of `generate`, beside the drafter.
        assistant_model ([`PreTrainedModel`], *optional*): One that reads the model's hidden states,
            as of `generate`, beside the drafter.
        speculation_type (`str`, *optional*): As of `generate`: `"dflash"` for a block drafter.

    Returns:
        [`Attachment`]: A context manager, with the `stats` of all calls. Without `with` it lasts
        until [`detach`].

    Raises:
        TypeError: If an option has the wrong type, or `model` has no `generate`.
        ValueError: If an option has a value that it cannot have.
    """
    from .refusals import check_options
    from .transformers_names import reading_arguments

    stacks = _stacks(model)
    check_options(max_draft_tokens, verification)
    reading = reading_arguments(assistant_model, use_mtp, speculation_type)
    if assistant_model is not None and "assistant_model" not in reading:
        raise ValueError(
            f"`assistant_model` is a {type(assistant_model).__name__}, which reads no hidden "
            "states: attach `drafter | rs.DraftModel(assistant)`, or pass "
            '`speculation_type="dflash"` if it is a block drafter.'
        )
    options = {"max_draft_tokens": max_draft_tokens, "verification": verification}
    attachment = Attachment(drafter, reading, **options)
    for stack in stacks:
        stack.append(attachment)
    return attachment


def detach(model: nn.Module | Pipeline | None = None) -> None:
    """Removes what was attached last to a model, or to all models, if anything is.

    Args:
        model (`nn.Module` or `Pipeline`, *optional*): As [`attach`] took it.

    Raises:
        TypeError: If `model` has no `generate`.
    """
    for stack in _stacks(model):
        if stack:
            stack.pop()


def attachment_of(model: PreTrainedModel) -> Attachment | None:
    """The attachment that drafts in calls of this model that name no drafter."""
    stack = _attached.get(model) or _attached_to_all
    return stack[-1] if stack else None


def _stacks(model: nn.Module | Pipeline | None) -> list[list[Attachment]]:
    """The attachments of all models, or of those with `generate` in a module or a pipeline."""
    if model is None:
        return [_attached_to_all]
    from transformers import GenerationMixin

    module: Any = model if hasattr(model, "modules") else getattr(model, "model", None)
    is_module = hasattr(module, "modules") and not isinstance(module, type)
    modules = module.modules() if is_module else ()
    generating = [module for module in modules if isinstance(module, GenerationMixin)]
    if not generating:
        raise TypeError(
            "model must be a transformers model with generate(), or a pipeline of one, but has "
            f"the type {type(model).__name__}"
        )
    return [_attached.setdefault(module, []) for module in generating]
