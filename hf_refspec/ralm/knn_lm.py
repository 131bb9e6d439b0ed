"""kNN-LM: a language model that looks up, at every token, what followed similar contexts.

Khandelwal et al. 2020, with the look-ups speculated (RaLMSpec, section 5.3 and appendix): the next
query needs the next token, and the entries after those that were found before nearly always give
it. Verification therefore compares tokens, not neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import GenerateDecoderOnlyOutput

from ..drafting.tree import DraftTree
from ..generation.acceptance import accept
from ..generation.entry_point import entry_point
from ..generation.row import Row, RowMark
from ..generation.validation import check_model, check_request, check_steps
from ..retrieval.retrieved import Retrieved
from ..retrieval.retriever import Retriever
from ..verification.cache import find_cache
from ..verification.chain import PlainVerifier
from ..verification.verifier import CacheMark, Verifier
from .checked_search import RetrievalError
from .engine import generate_speculatively
from .hidden_states import HiddenStates, recorded
from .knn_datastore import KnnDatastore
from .mixture import Mixture
from .options import Speculation
from .stats import RetrievalStats, check_stats

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

# With more than that, the request cache gets enough: the entries after each would bring hardly
# anything, and make it dearer to ask than to be wrong.
_MOST_WITH_NEIGHBOURS = 128


@entry_point("streamer")
@torch.no_grad()
def knn_lm(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    knn_datastore: KnnDatastore | None = None,
    k: int | None = None,
    lambda_: float | None = None,
    temperature: float | None = None,
    speculation: str | Speculation | None = "psa",
    retrieval_stats: RetrievalStats | None = None,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """A kNN-LM for `model.generate(..., custom_generate=hf_refspec.knn_lm, knn_datastore=store)`.

    Every token comes from `lambda_ * p_knn + (1 - lambda_) * p_lm`. Logits processors get the
    logarithm of that, and greedy search or sampling goes on as usual. The text is the same with
    every `speculation`, provided that logits processors and stopping criteria depend on nothing but
    their arguments: they are asked about speculated tokens as well. `generate` prepares all
    arguments but these:

    Args:
        knn_datastore ([`KnnDatastore`]): Built with this model.
        k (`int`, *optional*): How many neighbours are looked up. By default, as the two below, what
            was chosen on held-out text (see [`KnnDatastore.tune`]); where nothing was, 1024, or all
            if there are fewer.
        lambda_ (`float`, *optional*): How much the neighbours count, 0 to 1, near or far. What was
            chosen falls with the distance of the nearest; where nothing was, 0.25.
        temperature (`float`, *optional*): Of `p_knn`: squared distances are divided by it; where
            nothing was chosen, 1.0. The temperature of sampling can be set in a
            `generation_config`.
        speculation (`str` or [`Speculation`], *optional*, defaults to `"psa"`): See
            [`Speculation.parse`]; `None` looks up before every token.
        retrieval_stats ([`RetrievalStats`], *optional*): Is filled with what was looked up and how
            long that took.

    Returns:
        What `generate` returns: ids `(1, length)`, or a `GenerateDecoderOnlyOutput`.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option has a value that it cannot have, the datastore was built with
            another model, or an argument of `generate` cannot be combined with this.
        RetrievalError: If the datastore fails; it carries the text so far.
    """
    speculation = Speculation.parse(speculation)
    mixture = Mixture(knn_datastore, k, lambda_, temperature)
    check_stats(retrieval_stats)
    _check_request(model, input_ids, logits_processor, generation_config, model_kwargs, speculation)
    mixture.datastore.check_model(model)
    row = Row(input_ids, logits_processor, stopping_criteria, generation_config)
    verifier = PlainVerifier(model, generation_config, model_kwargs)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    with recorded(model, mixture.datastore.config.layer) as hidden:
        text = KnnText(row, verifier, hidden, mixture, streamer)
        text.generate(speculation, retrieval_stats)
    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return row.ids
    return GenerateDecoderOnlyOutput(sequences=row.ids, past_key_values=verifier.cache)


@dataclass(frozen=True)
class _Step:
    """A token, what it was chosen by, and where."""

    token: int
    found: Retrieved
    logits: torch.Tensor
    query: np.ndarray
    before: RowMark
    cache: CacheMark


@dataclass
class KnnText:
    """The text of one call, as [`RetrievalAugmentedGeneration`]: a step is a token.

    Attributes:
        row ([`Row`]): Prompt and output.
        verifier ([`Verifier`]): Runs the model, one token a pass.
        hidden ([`HiddenStates`]): Of the last pass: the queries.
        mixture ([`Mixture`]): What tokens are chosen from.
        streamer (`BaseStreamer`, *optional*): Gets each token once it is verified.
    """

    row: Row
    verifier: Verifier
    hidden: HiddenStates
    mixture: Mixture
    streamer: BaseStreamer | None
    # After the text: the logits `(vocab_size,)` and the hidden state, once the model was run.
    _after: tuple[torch.Tensor, np.ndarray] | None = None

    def generate(self, speculation: Speculation | None, stats: RetrievalStats | None) -> None:
        """Generates the text.

        Raises:
            RetrievalError: With the text so far, if the datastore fails.
        """
        # The engine only searches and scores: nothing is put before the text.
        retriever = cast(Retriever, self.mixture.datastore)
        guesses = _guesses(self.mixture, speculation)
        try:
            generate_speculatively(
                self, retriever, speculation, self.mixture.k, **guesses, stats=stats
            )
        except RetrievalError as error:
            error.text_ids = self.row.ids[0].tolist()
            raise

    @property
    def finished(self) -> bool:
        return self.row.finished

    def query(self) -> np.ndarray:
        """The hidden state after the text."""
        return self._run()[1]

    def step(self, found: Retrieved) -> _Step:
        """Chooses a token."""
        logits, query = self._run()
        before, cache = self.row.mark(), self.verifier.mark()
        log_probs = self.mixture.log_probs(logits, found)
        accept([self.row], log_probs[None, None])
        self._after = None
        return _Step(self.row.output[-1], found, logits, query, before, cache)

    def agrees(self, step: _Step, truth: Retrieved) -> bool:
        """Whether these neighbours give the same token, by the same random number."""
        if np.array_equal(step.found.ids, truth.ids):
            return True
        log_probs = self.mixture.log_probs(step.logits, truth)
        return self.row.choose_at(step.before, log_probs) == step.token

    def roll_back(self, step: _Step) -> None:
        """To before the token was chosen."""
        self.row.roll_back(step.before)
        self.verifier.roll_back(step.cache)
        self._after = (step.logits, step.query)

    def commit(self, steps: Sequence[_Step]) -> None:
        """Streams the tokens."""
        if self.streamer is not None:
            for step in steps:
                self.streamer.put(torch.tensor([step.token]))

    def _run(self) -> tuple[torch.Tensor, np.ndarray]:
        if self._after is None:
            logits = self.verifier.forward([self.row], [DraftTree.empty()])
            self.verifier.keep([[]])
            self._after = (logits[0, -1], self.hidden.last().float().numpy(force=True).copy())
        return self._after


def _check_request(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    speculation: Speculation | None,
) -> None:
    """Refuses what this cannot do, from the arguments as `generate` has prepared them."""
    check_model(model, "knn_lm")
    check_request(input_ids, generation_config, model_kwargs, "knn_lm")
    check_steps(model, model_kwargs, "knn_lm")
    if find_cache(model_kwargs) is None:
        raise ValueError(
            f"`knn_lm` needs a model that keeps its past in a `Cache`, but {type(model).__name__} "
            "does not"
        )
    if len(input_ids) > 1:
        raise ValueError(
            f"`knn_lm` continues one text, but `input_ids` has {len(input_ids)} rows. Pass one "
            "prompt at a time."
        )
    if generation_config.return_dict_in_generate:
        for name in ("output_scores", "output_logits"):
            if getattr(generation_config, name):
                raise ValueError(f"`knn_lm` cannot be combined with `{name}=True`: not supported.")
    stateful = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
    for processor in logits_processor:
        if speculation is not None and isinstance(processor, stateful):
            raise ValueError(
                f"`speculation` cannot be combined with a {type(processor).__name__}: it remembers "
                "tokens that are taken back. Pass `speculation=None`, or leave it out."
            )


def _guesses(mixture: Mixture, speculation: Speculation | None) -> dict[str, Any]:
    """What guesses come from beside what was retrieved: the entries after it (RaLMSpec, section
    5.3), and the PQ index."""
    if speculation is None:
        return {}
    store = mixture.datastore
    guesses: dict[str, Any] = {}
    if mixture.k <= _MOST_WITH_NEIGHBOURS:
        guesses["neighbours"] = store.neighbours
    if speculation.pq_index and store.pq_index is not None:
        guesses["candidates"] = store.pq_index.candidates
    return guesses
