"""How probable the model found the tokens of an answer, and what else it considered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from ..shared.text_stream import PART_OF_CHARACTER

_LEAST = -9999.0  # OpenAI's number for what cannot be; JSON has no infinity


@dataclass(frozen=True)
class TokenLogprob:
    """A token's text with its log probability, and the most probable ones in its place."""

    token: str
    logprob: float
    top: list[TokenLogprob]

    def described(self) -> dict[str, Any]:
        """As chats describe it. What is a part of a character has no bytes of its own."""
        whole = PART_OF_CHARACTER not in self.token
        return {
            "token": self.token,
            "logprob": self.logprob,
            "bytes": [*self.token.encode()] if whole else None,
        }

    def described_with_top(self) -> dict[str, Any]:
        return {**self.described(), "top_logprobs": [each.described() for each in self.top]}


class LogprobRecorder(LogitsProcessor):
    """Remembers the logits for the next token, `top` of which are of interest. It changes nothing,
    and is the first processor: the probabilities are the model's own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._logprobs = torch.empty(0)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._logprobs = scores[0].float().log_softmax(dim=-1)
        return scores

    def of(self, token: int) -> TokenLogprob:
        """What is known of the token that was chosen."""
        top = self._logprobs.topk(min(self._top, len(self._logprobs)))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        others = [TokenLogprob(self._text(id), max(logprob, _LEAST), []) for id, logprob in pairs]
        return TokenLogprob(self._text(token), max(float(self._logprobs[token]), _LEAST), others)

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
