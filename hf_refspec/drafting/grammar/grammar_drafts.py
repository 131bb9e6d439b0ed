"""Drafts of the tokens that a grammar forces."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...messages import check_ids
from ...text_config import text_tokenizer
from ..calibration import Outcomes
from ..contract import NO_PATH, Call, Observation, PathDrafter
from ..tree import ROOT, DraftTree
from .processor import (
    CompiledGrammar,
    GrammarProcessor,
    llguidance,
    unpacked_mask,
    with_token_ids,
)
from .schemas import JSON_FORM, call_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger("hf_refspec")

# The largest choice that is drafted, if each of its tokens has at least `_LEAST_PROB`; all of them
# together are estimated at `_ALL`.
_CHOICES = 6
_LEAST_PROB = 0.1
_ALL = 0.9
# The number of tokens that ended earlier free parts of texts and are tried as the end of a free
# part, and the estimate of all of them together after each of its tokens.
_ENDS = 3
_END_PROB = 0.7
_ENDS_OF_JSON = ('",', ",", '"}', '"', "}")  # the ends of its strings and numbers


class _Ends(Outcomes):
    """Free tokens after which others were forced, with their counts."""

    def __init__(self, *tokens: int) -> None:
        super().__init__(*tokens)
        self.counts = Counter(tokens)


class GrammarDrafts(PathDrafter):
    """Constrains a text by a grammar, and drafts the tokens that it forces.

        grammar = GrammarDrafts(tokenizer, json_schema=Person)
        model.generate(
            **inputs,
            logits_processor=[grammar.processor()],
            candidate_generator=grammar | ReferenceCopy() | TokenRecycling(),
        )

    The processor constrains, the drafter only drafts: a call without a processor logs a warning,
    once. In a blend the drafter removes what the grammar forbids from the others' trees, and
    continues them with what it forces. Forks and copies share the compiled grammar.

    The grammar's text begins after the prompt, and ends with the tokenizer's `eos_token`. JSON has
    the form of `json.dumps`, with its keys in the order of the schema.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target model's, a fast one.
        json_schema (`dict` or pydantic model class, *optional*): The schema of the JSON to write.
        regex (`str`, *optional*): A regular expression for the whole text, in Rust's syntax.
        lark (`str`, *optional*): A grammar in llguidance's dialect of Lark. `<think>` without
            quotation marks is the token of that name, `"<think>"` is text, which the tokenizer
            may turn into that token unless it is special.
        tools (sequence of `dict`, *optional*): OpenAI's tool definitions, for a call of one of them
            as `{"name": ..., "arguments": {...}}`.

    Attributes:
        stops (callable): Asked between the steps of a draft, which ends where it returns true: a
            server's drafts have little time. By default nothing stops a draft.

    Raises:
        ImportError: If llguidance is not installed (extra `grammar`).
        TypeError: If not exactly one grammar is given.
        ValueError: If llguidance cannot read the tokenizer or compile the grammar, or if the
            grammar contradicts itself or forces a text without end.
    """

    prunes = True
    _matcher: LLMatcher | None = None  # after the text; None if it broke the grammar
    _inside = False  # true if the last token was free, that is, not forced
    _of_a_call = (*PathDrafter._of_a_call, "_matcher", "_inside")

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        json_schema: Any = None,
        regex: str | None = None,
        lark: str | None = None,
        tools: Any = None,
    ) -> None:
        arguments = {"json_schema": json_schema, "regex": regex, "lark": lark, "tools": tools}
        grammars = {name: value for name, value in arguments.items() if value is not None}
        if len(grammars) != 1:
            raise TypeError(
                "give exactly one of json_schema, regex, lark and tools, "
                f"but {' and '.join(grammars) or 'none'} was given"
            )
        tokenizer = text_tokenizer(tokenizer)
        [(name, value)] = grammars.items()
        library = llguidance().LLMatcher
        if name in ("json_schema", "tools"):
            if name == "tools":
                value = call_schema(value)
            elif hasattr(value, "model_json_schema"):
                value = value.model_json_schema()
            grammar = library.grammar_from_json_schema(json.dumps(value), defaults=JSON_FORM)
        elif name == "regex":
            grammar = library.grammar_from_regex(value)
        else:
            grammar = library.grammar_from_lark(with_token_ids(tokenizer, value))
        self._grammar = CompiledGrammar(tokenizer, name, str(grammar))
        self.stops: Callable[[], bool] = bool
        ends = _ENDS_OF_JSON if isinstance(value, dict) else ()
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ends]
        self._ends = _Ends(*(end[0] for end in ids if len(end) == 1))

    def processor(self) -> GrammarProcessor:
        """The logits processor that constrains, for one call after another."""
        return GrammarProcessor(self._grammar)

    def check(self, vocab_size: int, processors: Sequence[Any] | None = None) -> None:
        """Also warns in a call that only transformers' own processors constrain: drafts change no
        token, so that the text need not follow the grammar."""
        remedy = "it ends texts with that id; pass the target's own tokenizer"
        check_ids("tokenizer", self._grammar.eos_id, vocab_size, remedy)
        if processors is not None and all(
            type(processor).__module__.startswith("transformers.") for processor in processors
        ):
            _warn_unconstrained()

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._matcher = self._grammar.start()
        self._inside = False

    def continue_path(self, path: np.ndarray, budget: int, call: Call) -> DraftTree:
        matcher = self._after(path)
        if matcher is None:
            return DraftTree.empty()
        return self._grown(matcher, budget, inside=len(path) > 0 or self._inside)

    def prune(self, tree: DraftTree, path: np.ndarray = NO_PATH) -> DraftTree:
        matcher = self._after(path)
        if matcher is None:
            return tree
        allowed = np.zeros(len(tree), np.bool_)
        # After each allowed node.
        states = {ROOT: matcher}
        forced: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents.tolist()):
            if self.stops():
                break
            if parent not in states:
                continue
            state = states[parent]
            token = int(tree.tokens[node])
            if parent not in forced:
                forced[parent] = state.compute_ff_tokens()[:1]
            if token == self._grammar.eos_id:
                allowed[node] = not forced[parent] and state.is_accepting()
            elif token in forced[parent] or not forced[parent]:
                after = state.deep_copy()
                allowed[node] = after.try_consume_tokens([token])
                if allowed[node]:
                    states[node] = after
        return tree.part(allowed)

    def _after(self, path: np.ndarray) -> LLMatcher | None:
        """The state after the text and a path; `None` if the grammar does not allow them."""
        if self._matcher is None or self._matcher.is_error():  # as one that is too complex
            return None
        # A copy, not this one and back: masks of states that were gone back to may be wrong.
        matcher = self._matcher.deep_copy()
        read = matcher.try_consume_tokens(path.tolist())
        return matcher if read == len(path) else None

    def _grown(self, matcher: LLMatcher, budget: int, inside: bool) -> DraftTree:
        """The tokens that are forced after a state; of a small choice all tokens, and what each
        forces; and `inside` a free part, the tokens that may end it."""
        nodes: list[tuple[int, int, float]] = []  # tokens, parents and probabilities
        states: list[tuple[LLMatcher, int, float]] = [(matcher, ROOT, 1.0)]
        for state, parent, prob in states:  # it grows
            if self.stops():
                break
            forced = state.compute_ff_tokens()
            state.consume_tokens(forced)
            if state.is_stopped():
                forced.append(self._grammar.eos_id)
            for token in forced[: budget - len(nodes)]:
                nodes.append((token, parent, prob))
                parent = len(nodes) - 1
            if len(nodes) + len(states) > budget or state.is_stopped():
                continue
            choices = self._choices(state)
            all_prob = _ALL
            if not choices and inside and parent == ROOT:
                choices = self._ending(state)
                all_prob = _END_PROB
            choice_prob = prob * all_prob / max(len(choices), 1)
            if choice_prob < _LEAST_PROB:
                continue
            for token in choices[: budget - len(nodes)]:
                nodes.append((token, parent, choice_prob))
                if token != self._grammar.eos_id:
                    states.append((_after_token(state, token), len(nodes) - 1, choice_prob))
        tokens, parents, probs = zip(*nodes, strict=True) if nodes else ((), (), ())
        return DraftTree(np.array(tokens), np.array(parents), np.array(probs))

    def _choices(self, matcher: LLMatcher) -> list[int]:
        """The tokens that may follow, if they are few, without the beginnings of others: tokenizers
        rarely cut there, unless something else may follow as well."""
        few = np.flatnonzero(unpacked_mask(matcher))
        if len(few) > 8 * _CHOICES:  # beginnings among them
            return []
        texts = {int(token): self._grammar.token_bytes(int(token)) for token in few}
        whole = [
            token
            for token, text in texts.items()
            if not any(other != text and other.startswith(text) for other in texts.values())
            or (len(few) <= _CHOICES and not _ends_here(_after_token(matcher, token)))
        ]
        return whole if len(whole) <= _CHOICES else []

    def _ending(self, matcher: LLMatcher) -> list[int]:
        """Tokens that ended earlier free parts, and would end the one that the state is in."""
        ends = []
        for token, _ in self._ends.counts.most_common(_ENDS):
            after = matcher.deep_copy()
            if after.try_consume_tokens([token]) and _ends_here(after):
                ends.append(token)
        return ends

    def observe(self, observation: Observation) -> None:
        if self._matcher is None:
            return
        forced = _ends_here(self._matcher)
        for token in observation.tokens.tolist():
            if not self._matcher.try_consume_tokens([token]):
                self._matcher = None
                return
            self._inside = not forced
            forced = _ends_here(self._matcher)
            if self._inside and forced:
                self._ends.counts[token] += 1

    def end(self) -> None:
        self._matcher = None


@cache
def _warn_unconstrained() -> None:
    logger.warning(
        "GrammarDrafts drafts, but only its processor constrains the text: pass "
        "`logits_processor=[grammar.processor()]` as well."
    )


def _after_token(matcher: LLMatcher, token: int) -> LLMatcher:
    """The state after a token that a state allows."""
    after = matcher.deep_copy()
    after.try_consume_tokens([token])
    return after


def _ends_here(matcher: LLMatcher) -> bool:
    """True if the next token is forced, or the text has ended."""
    return matcher.is_stopped() or bool(matcher.compute_ff_tokens())
