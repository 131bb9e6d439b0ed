"""A request as the engine decodes it, and each of its rows until it ends."""

import logging
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from transformers import (
    BatchEncoding,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
)

from ...drafting.grammar.grammar_drafts import GrammarDrafts
from ...drafting.stats import DraftStats
from ..shared.streams import TextStream, token_bytes
from .grammars import Constraint, GrammarBudget
from .tool_calls import CallReader

logger = logging.getLogger(__name__)

# "time": the request took too long. "cancelled": its client has left. "grammar": its grammar took
# too long.
Outcome: TypeAlias = Literal["stop", "length", "time", "cancelled", "grammar", "error"]
_FAILURES = ("grammar", "error")
_LEAST_LOGPROB = -9999.0  # OpenAI's number for impossible tokens; JSON has no infinity

# A token, its log probability and the most probable tokens at its place, in the form of chats.
TokenLogprob: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """A part of a text, with the log probabilities of its tokens if the request wants them."""

    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True)
class PreparedRequest:
    """A request, as the engine decodes it."""

    inputs: BatchEncoding  # the prompt, ids and mask `(1, n)`
    options: dict[str, Any]  # of `generate`
    rows: int = 1
    processors: list[LogitsProcessor] = field(default_factory=list)
    seed: int | None = None  # of the first row
    stop_strings: list[str] = field(default_factory=list)
    prediction: np.ndarray | None = None  # the ids that the client expects
    top_logprobs: int | None = None  # log probabilities beside each token's own
    keeps_special_tokens: bool = False
    reader: Callable[[], CallReader | None] = lambda: None  # finds calls in the text
    constraint: Constraint | None = None  # to be compiled into `grammar`
    grammar: GrammarDrafts | None = None
    grammar_budget: GrammarBudget = field(default_factory=GrammarBudget)


class ServedRow(StoppingCriteria):
    """A row of a request: it waits, is decoded or has ended.

    As a stopping criterion it sees every token, and ends the text at a stop string, when time is
    up, or when it is cancelled because the client has left; the last two also end the prefill.
    Times are of `time.monotonic`. `listener` receives the pieces of the text, and `None` at its
    end, in the engine's thread."""

    def __init__(
        self,
        request: PreparedRequest,
        index: int,
        tokenizer: PreTrainedTokenizerBase,
        listener: Callable[[Piece | None], Any],
    ) -> None:
        self.request = request
        self.reader = request.reader()
        self.seed = None if request.seed is None else request.seed + index
        self.outcome: Outcome | None = None
        self.tokens = 0
        self.ends = [0]  # how many characters the text has before each token, and at its end
        self.stats = DraftStats()
        self.listener = listener
        self.session = ExitStack()  # holds its drafter while it is decoded
        self._last_token = -1
        self.submitted_at = monotonic()
        self.began_at: float | None = None
        self.first_token_at: float | None = None
        self._ends_at = float("inf")
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer, not request.keeps_special_tokens)
        self._stop = StopStrings(request.stop_strings)
        self.next_logprobs = torch.empty(0)  # the model's own of all tokens, if asked for
        self._logprobs: list[TokenLogprob] = []  # of the tokens since the last piece

    def processors(self) -> LogitsProcessorList:
        """The request's processors and its grammar's, as one."""
        request = self.request
        if not request.processors and request.grammar is None and request.top_logprobs is None:
            return LogitsProcessorList()
        return LogitsProcessorList([_OfOneRequest(self)])

    def begin(self, max_seconds: float) -> None:
        """Marks the start of its decoding, which may take `max_seconds`."""
        self.began_at = monotonic()
        self._ends_at = self.began_at + max_seconds

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> Any:
        if not self.tokens:
            self.first_token_at = monotonic()
        self._last_token = int(input_ids[0, -1])
        self.tokens += 1
        ended = self.outcome in _FAILURES
        if not ended:
            if self.request.top_logprobs is not None:
                self._logprobs.append(self._described(self._last_token, self.request.top_logprobs))
            new = self._text.put(self._last_token)
            self.ends.append(self.ends[-1] + len(new))
            if text := self._stop.put(new):
                self._pass_on(text)
            ended = self._stop.found or self.is_interrupted()
        return torch.full(input_ids.shape[:1], ended, device=input_ids.device)

    def is_interrupted(self) -> bool:
        """True if its client has left or time is up, which then is its outcome."""
        if self.outcome is None and monotonic() > self._ends_at:
            self.outcome = "time"
        return self.outcome is not None

    def cancel(self) -> None:
        """Ends it after its next token, or in its prefill, unless it has ended."""
        self.outcome = self.outcome or "cancelled"

    def stop(self, outcome: Outcome = "error") -> None:
        """Sets an outcome other than the text's own end."""
        self.outcome = outcome

    def end(self, stats: DraftStats, end_tokens: Set[int | None]) -> None:
        """Sends the rest of the text, and sets the outcome; `end_tokens` end a text."""
        self.stats = stats
        if self.outcome in _FAILURES:
            return
        rest = "" if self._stop.found else self._stop.put(self._text.end()) + self._stop.end()
        if rest or self._logprobs:
            self._pass_on(rest)
        if self._stop.found or self._last_token in end_tokens:
            self.outcome = "stop"
        elif self.outcome is None:
            self.outcome = "length"

    def _pass_on(self, text: str) -> None:
        self.listener(Piece(text, self._logprobs))
        self._logprobs = []

    def _described(self, token: int, top: int | None = None) -> TokenLogprob:
        """A token and its log probability; a token that the text leaves out adds no bytes."""
        # Some tokenizers drop the space before the first word of a text.
        before = [token] if self.tokens > 1 else []
        text = self._decode([*before, token]).removeprefix(self._decode(before))
        skipped = not self.request.keeps_special_tokens and token in self._tokenizer.all_special_ids
        encoded = [] if skipped else [*token_bytes(self._tokenizer, token, text)]
        logprob = max(float(self.next_logprobs[token]), _LEAST_LOGPROB)
        described = {"token": text, "logprob": logprob, "bytes": encoded}
        if top is None:
            return described
        best = self.next_logprobs.topk(min(top, len(self.next_logprobs))).indices.tolist()
        return {**described, "top_logprobs": [self._described(token) for token in best]}

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    @property
    def prompt_tokens(self) -> int:
        return self.request.inputs["input_ids"].shape[1]

    @property
    def accepted_prediction_tokens(self) -> int:
        """Accepted tokens of the prediction, which is the first source."""
        return self.stats.sources[0].first if self.stats.sources else 0

    @property
    def rejected_prediction_tokens(self) -> int:
        predicted = () if self.request.prediction is None else self.request.prediction
        return max(0, len(predicted) - self.accepted_prediction_tokens)


class _OfOneRequest(LogitsProcessor):
    """A request's processors and its grammar's; if one fails, this request ends, and no other."""

    def __init__(self, row: ServedRow) -> None:
        self._row = row
        self._processors = LogitsProcessorList(row.request.processors)
        grammar = row.request.grammar
        self._grammar = None if grammar is None else grammar.processor()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        request = self._row.request
        if request.top_logprobs is not None:
            self._row.next_logprobs = scores[0].float().log_softmax(dim=-1)
        try:
            processed = self._processors(input_ids, scores)
            if self._grammar is not None:
                request.grammar_budget.add_token()
                if request.grammar_budget.left <= 0:
                    self._row.stop("grammar")
                    return scores
                with request.grammar_budget:
                    processed = self._grammar(input_ids, processed)
            if processed.max() == -torch.inf:
                raise ValueError("no token may follow")
        except Exception:
            logger.exception("A logits processor failed.")
            self._row.stop()
            return scores
        return processed


class StopStrings:
    """Passes a text on up to its first stop string; holds back a possible start of one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.found = False
        self._strings = strings
        self._held = ""

    def put(self, text: str) -> str:
        """Returns the text that certainly precedes any stop string."""
        text = self._held + text
        places = [place for string in self._strings if (place := text.find(string)) >= 0]
        self.found = bool(places)
        if self.found:
            return text[: min(places)]
        starts = (i for i in range(len(text)) if any(s.startswith(text[i:]) for s in self._strings))
        end = next(starts, len(text))  # the rest may be the start of a stop string
        self._held = text[end:]
        return text[:end]

    def end(self) -> str:
        """The text that is still held back at the end."""
        return self._held
