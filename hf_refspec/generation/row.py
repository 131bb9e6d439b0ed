"""Acceptance: which draft tokens are what the target model says, and what follows from each.

Plain decoding handles one token after another: logits processors, the choice, stopping criteria,
the streamer. [`TargetText`] does the same for every token on the accepted path of a draft tree, in
the same order and never for a token off that path, so that processors and criteria that keep state,
random numbers and streamers cannot tell the difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from ..drafting.tree import ROOT, DraftTree

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


class TargetText:
    """The text of one call: the prompt and the tokens that the target model chose.

    Args:
        input_ids (`torch.LongTensor` of shape `(1, prompt_length)`): The prompt.
        logits_processor (`LogitsProcessorList`): See each prefix of the text once, in order.
        stopping_criteria (`StoppingCriteriaList`): Are asked after every token.
        generation_config (`GenerationConfig`): Says whether to sample, and what to record.
        streamer (`BaseStreamer`, *optional*): Gets each token once, in order.

    Attributes:
        finished (`bool`): Whether a stopping criterion has ended the text.
        path (`list[int]`): The nodes of the last draft that have been accepted so far and were
            followed by another token: what the cache should keep.
        scores, logits (`tuple[torch.Tensor]` or `None`): Processed and raw logits, float32 of shape
            `(1, vocab_size)` for each token, where the generation config asks for them.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
    ) -> None:
        config = generation_config
        recorded = config.return_dict_in_generate
        self.finished = False
        self.path: list[int] = []
        self.max_length: int | None = None
        self.scores: tuple[torch.Tensor, ...] | None = None
        self.logits: tuple[torch.Tensor, ...] | None = None
        if recorded and config.output_scores:
            self.scores = ()
        if recorded and config.output_logits:
            self.logits = ()
        self._ids = input_ids
        self._not_in_ids: list[int] = []
        self._logits_processor = logits_processor
        self._do_sample = config.do_sample
        self._streamer = streamer
        self._eos_ids: set[int] = set()
        self._other_criteria = StoppingCriteriaList()
        self._split_criteria(stopping_criteria)

    def _split_criteria(self, criteria: StoppingCriteriaList) -> None:
        """Takes out the two that every call has: asked on the host, they cost no wait for a GPU."""
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self._eos_ids.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria:
                self.max_length = min(criterion.max_length, self.max_length or criterion.max_length)
            else:
                self._other_criteria.append(criterion)

    def __len__(self) -> int:
        return self._ids.shape[1] + len(self._not_in_ids)

    @property
    def ids(self) -> torch.Tensor:
        """Prompt and output, `(1, length)`, on the prompt's device."""
        if self._not_in_ids:
            # Not blocking: a copy to a GPU would otherwise wait for all that is queued there.
            new_ids = torch.tensor([self._not_in_ids])
            new_ids = new_ids.to(self._ids.device, non_blocking=True)
            self._ids = torch.cat([self._ids, new_ids], dim=-1)
            self._not_in_ids = []
        return self._ids

    def accept(self, logits: torch.Tensor, draft: DraftTree) -> list[int]:
        """Walks down the draft as far as the target model says the same; `path` is the way.

        Args:
            logits (`torch.Tensor` of shape `(1 + T, vocab_size)`): The target model's, after the
                text so far and after each draft node.
            draft ([`DraftTree`]): T nodes.

        Returns:
            The new tokens: those of the path and one more.
        """
        choices = logits.argmax(dim=-1).tolist() if self._chooses_at_once() else None
        children = draft.children()
        tokens: list[int] = []
        self.path = []
        node = ROOT
        while True:
            token = self.choose(logits[1 + node]) if choices is None else choices[1 + node]
            tokens.append(token)
            self.append(token)
            child = children.get((node, token))
            if self.finished or child is None:
                return tokens
            self.path.append(child)
            node = child

    def _chooses_at_once(self) -> bool:
        """Whether the choice depends on the logits alone: then all nodes' come over in one copy."""
        return (
            not self._do_sample
            and len(self._logits_processor) == 0
            and self.scores is None
            and self.logits is None
        )

    def choose(self, logits: torch.Tensor) -> int:
        """The next token, as `GenerationMixin._sample` chooses it.

        At batch size 1 that is one draw from the generator for each token.
        """
        ids = self.ids
        next_logits = logits[None].to(copy=True, dtype=torch.float32, device=ids.device)
        next_scores = self._logits_processor(ids, next_logits)
        if self.scores is not None:
            self.scores += (next_scores,)
        if self.logits is not None:
            self.logits += (next_logits,)
        if self._do_sample:
            probs = torch.nn.functional.softmax(next_scores, dim=-1)
            return int(torch.multinomial(probs, num_samples=1))
        return int(next_scores.argmax(dim=-1))

    def append(self, token: int) -> None:
        """Emits a token, and asks the stopping criteria."""
        self._not_in_ids.append(token)
        stopped = False
        if self._other_criteria:
            stopped = bool(self._other_criteria(self.ids, self.scores).all())
        self.finished = (
            stopped
            or token in self._eos_ids
            or (self.max_length is not None and len(self) >= self.max_length)
        )
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
