"""kNN-LM: a language model that looks up the tokens that followed similar contexts.

Khandelwal et al. 2020, with speculative look-ups (RaLMSpec, section 5.3 and appendix). The next
query needs only the next token, which the entries after those found last nearly always predict, so
verification compares tokens, not neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from ..generation.row import Row, RowMark
from ..messages import check_count
from ..retrieval.retriever import Retrieved, Retriever
from ..transformers_names import decoder_output
from ..verification.caches import find_cache
from ..verification.verifier import PLAIN, Verifier
from .knn_datastore import HiddenStates, KnnDatastore, recorded
from .options import RalmSpeculation
from .run import RowText, checked_speculation
from .stats import RalmStats

# With more neighbours the request cache is nearly always right, and looking up the entries after
# them takes more time than it saves.
_FEW_NEIGHBOURS = 128


@torch.no_grad()
def knn_lm(  # noqa: D417
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    knn_datastore: KnnDatastore,
    k: int = 1024,
    lambda_: float = 0.25,
    temperature: float = 1.0,
    speculation: str | RalmSpeculation | None = "psa",
    ralm_stats: RalmStats | None = None,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """A kNN-LM for `model.generate(..., custom_generate=hf_refspec.knn_lm, knn_datastore=store)`.

    Every token comes from `lambda_ * p_knn + (1 - lambda_) * p_lm`. Logits processors get the
    logarithm of that, then greedy search or sampling chooses as usual. The text is the same with
    every `speculation`, provided that logits processors and stopping criteria depend on nothing but
    their arguments: they are asked about speculated tokens as well. `generate` prepares all
    arguments but these:

    Args:
        knn_datastore ([`KnnDatastore`]): Built with this model.
        k (`int`, *optional*, defaults to 1024): How many neighbours are looked up; all entries if
            there are fewer.
        lambda_ (`float`, *optional*, defaults to 0.25): How much the neighbours count, 0 to 1.
        temperature (`float`, *optional*, defaults to 1.0): Of `p_knn`: squared distances are
            divided by it. The temperature of sampling can be set in a `generation_config`.
        speculation (`str` or [`RalmSpeculation`], *optional*, defaults to `"psa"`): See
            [`RalmSpeculation.parse`]; `None` looks up before every token.
        ralm_stats ([`RalmStats`], *optional*): Receives counts and times.

    Returns:
        The output of `generate`: ids `(1, length)`, or a `GenerateDecoderOnlyOutput`.

    Raises:
        ValueError: If an option is invalid, the datastore was built with another model, or an
            argument of `generate` cannot be combined with this.
        RalmError: If the datastore fails; it carries the text so far.
    """
    speculation = checked_speculation(
        model, input_ids, logits_processor, generation_config, model_kwargs, speculation, "knn_lm"
    )
    mixture = Mixture(knn_datastore, k, lambda_, temperature)
    _check_request(model, generation_config, model_kwargs)
    knn_datastore.check_model(model)
    row = Row(input_ids, logits_processor, stopping_criteria, generation_config)
    retriever = cast(Retriever, knn_datastore)  # it only searches and scores
    few = mixture.k <= _FEW_NEIGHBOURS or (speculation and speculation.max_gamma is not None)
    neighbours = knn_datastore.next_entries if few else None
    with recorded(model, knn_datastore.config.layer) as hidden:
        verifier = Verifier(PLAIN, model, generation_config, model_kwargs)
        text = KnnText(row, streamer, verifier, hidden, mixture)
        text.generate(retriever, speculation, mixture.k, ralm_stats, neighbours)
    if not generation_config.return_dict_in_generate:
        return row.ids
    return decoder_output(row.ids, verifier.entries.cache)


class Mixture:
    """The next token's distribution (Khandelwal et al. 2020, equation 3)."""

    def __init__(self, datastore: KnnDatastore, k: int, lambda_: float, temperature: float) -> None:
        check_count("k", k)
        if not 0 <= lambda_ <= 1:
            raise ValueError(f"lambda_ must be from 0 to 1, but is {lambda_}")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be above 0 and finite, but is {temperature}")
        self.k = min(k, len(datastore))
        self._datastore = datastore
        self._temperature = temperature
        self._log_knn = math.log(lambda_) if lambda_ > 0 else -math.inf
        self._log_lm = math.log(1 - lambda_) if lambda_ < 1 else -math.inf

    def log_probs(self, logits: torch.Tensor, found: Retrieved) -> torch.Tensor:
        """The next token's log-probabilities, float32 `(vocab_size,)`, given the model's logits."""
        log_probs = torch.log_softmax(logits.float(), dim=-1) + self._log_lm
        tokens, probs = self._datastore.next_tokens(found, self._temperature)
        with np.errstate(divide="ignore"):  # a far neighbour may have probability 0
            log_knn = (np.log(probs) + self._log_knn).astype(np.float32)
        # Each token once: a GPU's sum over neighbours would depend on their order.
        places = torch.from_numpy(tokens).to(logits.device)
        mixed = torch.logaddexp(log_probs[places], torch.from_numpy(log_knn).to(logits.device))
        return log_probs.index_copy_(0, places, mixed)


@dataclass(frozen=True)
class KnnStep:
    """A token, and the state before it."""

    token: int
    found: Retrieved
    logits: torch.Tensor  # (vocab_size,), before it
    query: np.ndarray  # float32, (dimension,)
    before: RowMark
    end: int  # the length of the text after it
    restore_cache: Callable[[], None]


@dataclass
class KnnText(RowText):
    """The text of one call: a step is a token."""

    verifier: Verifier
    hidden: HiddenStates  # of the verifier's last pass
    mixture: Mixture
    # The logits and the query after the text, once the model was run.
    _next: tuple[torch.Tensor, np.ndarray] | None = None

    def query(self) -> np.ndarray:
        """The hidden state after the text, float32 of shape `(dimension,)`."""
        return self._run()[1]

    def _run(self) -> tuple[torch.Tensor, np.ndarray]:
        """The target's logits `(vocab_size,)` and the query after the text."""
        if self._next is None:
            result = self.verifier.forward([self.row])
            self.verifier.keep([[]])
            self._next = result.logits[-1], self.hidden.last()
        return self._next

    def step(self, found: Retrieved) -> KnnStep:
        """Chooses a token by the target's logits and these neighbours."""
        logits, query = self._run()
        before = self.row.mark()
        token = self.row.choose(self.mixture.log_probs(logits, found))
        self.row.append(token)
        self._next = None
        return KnnStep(token, found, logits, query, before, len(self.row), self.verifier.mark())

    def agrees(self, step: KnnStep, truth: Retrieved) -> bool:
        """True if these neighbours give the same token, by the same random number."""
        if np.array_equal(step.found.ids, truth.ids):
            return True
        log_probs = self.mixture.log_probs(step.logits, truth)
        return self.row.choose_at(step.before, log_probs) == step.token

    def roll_back(self, step: KnnStep) -> None:
        """Undoes a token and all later ones."""
        self.row.roll_back(step.before)
        step.restore_cache()
        self._next = step.logits, step.query


def _check_request(
    model: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> None:
    """Refuses what a kNN-LM alone cannot do."""
    if find_cache(model_kwargs) is None:
        name = type(model).__name__
        raise ValueError(f"`knn_lm` needs a model that keeps its past in a `Cache`, unlike {name}")
    if generation_config.return_dict_in_generate:
        for name in ("output_scores", "output_logits"):
            if getattr(generation_config, name):
                raise ValueError(f"`knn_lm` cannot be combined with `{name}=True`: not supported.")
