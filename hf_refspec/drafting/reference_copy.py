"""Drafts copied from references, the prompt and the output: LLMA, and a tree of all matches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..index.llma import LONGEST_MATCH, copy_tree, llma_span
from ..index.suffix_array import DEPTH
from ..index.token_buffer import TokenBuffer
from ..messages import check_count, check_ids
from ..text_config import text_tokenizer
from .contract import Call, LookUp, Observation
from .token_ids import Reference, references_to_ids
from .tree import DraftTree

LLMA_LONGEST_MATCH = 5  # tokens, as published


class ReferenceCopy(LookUp):
    """Copies what followed the last tokens elsewhere: in references, the prompt or the output.

    Args:
        references (`str`, list of ids, 1-D tensor or array, or a list of these, *optional*):
            Texts that the output may have in common: retrieved documents, the file to edit,
            earlier answers. A draft never runs from one into the next.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The target model's, for references that are strings.
        include_prompt (`bool`, *optional*, defaults to `True`):
            True to copy from the prompt and the output so far, too.
        match_length (`int`, *optional*, defaults to 1):
            n, the smallest number of last tokens that must occur in a text to copy from there, 128
            at most.
        copy_length (`int`, *optional*):
            k, the longest path of a draft; by default the budget of draft nodes is the only limit.
        published (`bool`, *optional*, defaults to `False`):
            By default it drafts a tree from all matches. `True` is LLMA, the algorithm of
            "Inference with Reference" (arXiv 2304.04487, section 2.2): the k tokens after the first
            occurrence of the longest suffix of the output, from 5 tokens down to n, are copied from
            the references, or without any from the prompt, never from the output.
            `max_draft_tokens="auto"` may copy fewer.

    Raises:
        ValueError: If `references` is empty, or has an empty text, a negative id, or a string
            without a `tokenizer`; if there is nothing to copy from; if n or k is out of range. A
            call raises it for ids outside of the target's vocabulary.
    """

    _anchor = -1
    _of_a_call = (*LookUp._of_a_call, "_anchor", "_prompt_end")

    def __init__(
        self,
        references: Reference | Sequence[Reference] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        include_prompt: bool = True,
        match_length: int = 1,
        copy_length: int | None = None,
        published: bool = False,
    ) -> None:
        check_count("match_length", match_length, most=DEPTH)
        if copy_length is not None:
            check_count("copy_length", copy_length)
        if references is None and not include_prompt:
            raise ValueError(
                "include_prompt=False leaves nothing to copy from without references; give some"
            )
        tokenizer = text_tokenizer(tokenizer)
        self.match_length = match_length
        self.copy_length = copy_length
        self.published = published
        self._copies_prompt = references is None if published else include_prompt
        self._copies_output = include_prompt and not published
        longest_match = LLMA_LONGEST_MATCH if published else LONGEST_MATCH
        self.longest_match = max(longest_match, match_length)
        # References, prompt and output, one after another. Only the references outlive a call.
        self._text = TokenBuffer()
        for ids in [] if references is None else references_to_ids(references, tokenizer):
            self._text.add_text(ids)
        self._prompt_end = self._references_end = len(self._text)
        self._largest_id = int(self._text.tokens.max(initial=-1))

    def check(self, vocab_size: int, processors: Sequence[Any] | None = None) -> None:
        remedy = "were they made with another tokenizer?"
        check_ids("references", self._largest_id, vocab_size, remedy)

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self.end()
        if self._copies_prompt:
            self._text.extend(prompt_ids)
        self._prompt_end = len(self._text)
        # The paper matches the output alone, not the end of the prompt.
        super().begin(prompt_ids[:0] if self.published else prompt_ids, vocab_size)
        self._anchor = -1

    def look_up(self, context: np.ndarray, budget: int, behind_path: bool, call: Call) -> DraftTree:
        length = budget if self.copy_length is None else min(budget, self.copy_length)
        text = self._text.text
        if self.published:
            _, span = llma_span(text, context, self.match_length, length)
            return DraftTree.chain(span)
        chain = call.chain and not behind_path
        tree, anchor = copy_tree(
            text, context, budget, self.match_length, length, chain, self._anchor
        )
        if not behind_path:
            self._anchor = anchor
        return DraftTree(*tree)

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        if self._copies_output:
            self._text.extend(observation.tokens)

    def source_texts(self) -> list[tuple[str, Sequence[Any]]]:
        references, prompt = np.split(self._text.tokens[: self._prompt_end], [self._references_end])
        prompt = np.append(prompt, -1)  # a copy: a later call writes its prompt to this place
        return [("references", [references]), ("prompt", [prompt])]

    def end(self) -> None:
        self._text.truncate(self._references_end)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_text": self._text.tokens[: self._references_end].copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._text = TokenBuffer()
        self._text.extend(state["_text"])
        self._prompt_end = self._references_end
