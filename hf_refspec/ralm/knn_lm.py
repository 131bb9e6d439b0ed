"""kNN-LM: a language model that looks up, at every token, what followed similar contexts.

Khandelwal et al. 2020, with the look-ups speculated (RaLMSpec, section 5.3 and appendix): the next
query needs the next token, and the entries after those that were found before nearly always give
it. Verification therefore compares tokens, not neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import GenerateDecoderOnlyOutput

from ..drafting.tree import DraftTree
from ..generation.acceptance import accept
from ..generation.entry_point import entry_point
from ..generation.row import Row, RowMark
from ..generation.validation import check_model, check_request
from ..index.retrieved import Retrieved
from ..retrieval.retriever import Retriever
from ..store.build.hidden_states import HiddenStates, Layer, recorded
from ..store.build.windows import read_windows
from ..store.knn_datastore import KnnDatastore
from ..verification.cache import find_cache
from ..verification.plain import PlainVerifier
from ..verification.verifier import CacheMark, Verifier
from .checked_search import RetrievalError
from .engine import generate_speculatively
from .options import Speculation
from .stats import RetrievalStats

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

DEFAULT_K = 1024
DEFAULT_LAMBDA = 0.25
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
    k: int = DEFAULT_K,
    lambda_: float = DEFAULT_LAMBDA,
    temperature: float = 1.0,
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
        k (`int`, *optional*, defaults to 1024): How many neighbours are looked up.
        lambda_ (`float`, *optional*, defaults to 0.25): How much the neighbours count, 0 to 1.
        temperature (`float`, *optional*, defaults to 1.0): Of `p_knn`: squared distances are
            divided by it. The temperature of sampling can be set in a `generation_config`.
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
    if retrieval_stats is not None and not isinstance(retrieval_stats, RetrievalStats):
        raise TypeError(
            "retrieval_stats must be a RetrievalStats() to be filled, or None, but is "
            f"{retrieval_stats!r}"
        )
    _check_request(model, input_ids, logits_processor, generation_config, model_kwargs, speculation)
    mixture.datastore.check_model(model)
    row = Row(input_ids, logits_processor, stopping_criteria, generation_config)
    verifier = PlainVerifier(model, generation_config, model_kwargs)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    with recorded(model, mixture.datastore.config.layer) as hidden:
        # The engine only searches and scores: nothing is put before the text.
        retriever = cast(Retriever, mixture.datastore)
        try:
            generate_speculatively(
                KnnText(row, verifier, hidden, mixture, streamer),
                retriever,
                speculation,
                mixture.k,
                **_guesses(mixture, speculation),
                stats=retrieval_stats,
            )
        except RetrievalError as error:
            error.text_ids = row.ids[0].tolist()
            raise
    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return row.ids
    return GenerateDecoderOnlyOutput(sequences=row.ids, past_key_values=verifier.cache)


class Mixture:
    """The distribution of the next token: the model's and the neighbours'.

    Args:
        datastore ([`KnnDatastore`]): Where neighbours are looked up.
        k (`int`): How many.
        lambda_ (`float`): How much they count.
        temperature (`float`): Squared distances are divided by it.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If it has a value that it cannot have.
    """

    def __init__(self, datastore: Any, k: int, lambda_: float, temperature: float) -> None:
        if not isinstance(datastore, KnnDatastore):
            raise TypeError(
                f"knn_datastore must be a KnnDatastore, but is {datastore!r}; make one with "
                "KnnDatastore.build(model, tokenizer, corpus, path)"
            )
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)):
            raise TypeError(f"k must be an int, but is {k!r}")
        if not 1 <= k <= len(datastore):
            raise ValueError(
                f"k must be from 1 to {len(datastore)}, the entries of the datastore, but is {k}"
            )
        if not 0 <= lambda_ <= 1:
            raise ValueError(f"lambda_ must be from 0 to 1, but is {lambda_}")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be above 0 and finite, but is {temperature}")
        self.datastore = datastore
        self.k = int(k)
        self._temperature = float(temperature)
        self._log_knn = math.log(lambda_) if lambda_ > 0 else -math.inf
        self._log_lm = math.log(1 - lambda_) if lambda_ < 1 else -math.inf

    def log_probs(self, logits: torch.Tensor, found: Retrieved) -> torch.Tensor:
        """Log-probabilities of the next token, float32 of shape `(vocab_size,)`.

        Args:
            logits (`torch.Tensor` of shape `(vocab_size,)`): The model's.
            found ([`Retrieved`]): The neighbours of its hidden state.
        """
        log_probs = torch.log_softmax(logits.float(), dim=-1) + self._log_lm
        tokens, probs = self.datastore.next_tokens(found, self._temperature)
        with np.errstate(divide="ignore"):  # of a far neighbour nothing may be left
            log_knn = (np.log(probs) + self._log_knn).astype(np.float32)
        # Each token once: on a GPU a sum over neighbours would depend on their order.
        places = torch.from_numpy(tokens).to(logits.device)
        mixed = torch.logaddexp(log_probs[places], torch.from_numpy(log_knn).to(logits.device))
        return log_probs.index_copy_(0, places, mixed)

    def log_probs_of(
        self, targets: np.ndarray, log_lm: np.ndarray, states: np.ndarray
    ) -> np.ndarray:
        """Log-probabilities of given tokens, float64 of shape `(n,)`.

        Args:
            targets (`np.ndarray`, int64 of shape `(n,)`): The tokens.
            log_lm (`np.ndarray`, float64 of shape `(n,)`): What they are by the model alone.
            states (`np.ndarray`, float32 of shape `(n, dimension)`): The hidden states before them.
        """
        knn = np.zeros(len(targets))
        for i, found in enumerate(self.datastore.search(list(states), self.k)):
            tokens, probs = self.datastore.next_tokens(found, self._temperature)
            knn[i] = probs[tokens == targets[i]].sum()
        with np.errstate(divide="ignore"):
            return np.logaddexp(log_lm + self._log_lm, np.log(knn) + self._log_knn)


@dataclass(frozen=True)
class _Step:
    """A token, what it was chosen by, and where."""

    token: int
    found: Retrieved
    logits: torch.Tensor
    query: np.ndarray
    before: RowMark
    cache: CacheMark


class KnnText:
    """The text of one call, as [`RetrievalAugmentedGeneration`]: a step is a token.

    Args:
        row ([`Row`]): Prompt and output.
        verifier ([`Verifier`]): Runs the model, one token a pass.
        hidden ([`HiddenStates`]): Of the last pass: the queries.
        mixture ([`Mixture`]): What tokens are chosen from.
        streamer (`BaseStreamer`, *optional*): Gets each token once it is verified.
    """

    def __init__(
        self,
        row: Row,
        verifier: Verifier,
        hidden: HiddenStates,
        mixture: Mixture,
        streamer: BaseStreamer | None,
    ) -> None:
        self._row = row
        self._verifier = verifier
        self._hidden = hidden
        self._mixture = mixture
        self._streamer = streamer
        # After the text: the logits `(vocab_size,)` and the hidden state, once the model was run.
        self._after: tuple[torch.Tensor, np.ndarray] | None = None

    @property
    def finished(self) -> bool:
        return self._row.finished

    def query(self) -> np.ndarray:
        """The hidden state after the text."""
        return self._run()[1]

    def step(self, found: Retrieved) -> _Step:
        """Chooses a token."""
        logits, query = self._run()
        before, cache = self._row.mark(), self._verifier.mark()
        log_probs = self._mixture.log_probs(logits, found)
        accept([self._row], log_probs[None, None], [DraftTree.empty()])
        self._after = None
        return _Step(self._row.output[-1], found, logits, query, before, cache)

    def agrees(self, step: _Step, truth: Retrieved) -> bool:
        """Whether these neighbours give the same token, by the same random number."""
        if np.array_equal(step.found.ids, truth.ids):
            return True
        log_probs = self._mixture.log_probs(step.logits, truth)
        return self._row.choose_at(step.before, log_probs) == step.token

    def roll_back(self, step: _Step) -> None:
        """To before the token was chosen."""
        self._row.roll_back(step.before)
        self._verifier.roll_back(step.cache)
        self._after = (step.logits, step.query)

    def commit(self, steps: Sequence[_Step]) -> None:
        """Streams the tokens."""
        if self._streamer is not None:
            for step in steps:
                self._streamer.put(torch.tensor([step.token]))

    def _run(self) -> tuple[torch.Tensor, np.ndarray]:
        if self._after is None:
            logits = self._verifier.forward([self._row], [DraftTree.empty()])
            self._verifier.keep([[]])
            self._after = (logits[0, -1], self._hidden.last().float().numpy(force=True).copy())
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


@torch.no_grad()
def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Iterable[str],
    knn_datastore: KnnDatastore | None = None,
    k: int = DEFAULT_K,
    lambda_: float = DEFAULT_LAMBDA,
    temperature: float = 1.0,
) -> float:
    """The perplexity of a text, or of several together: of the model, or of the kNN-LM.

    A long text is read in windows that overlap, each token once (but for the first of each text,
    which nothing comes before).

    Args:
        model (`PreTrainedModel`): The model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        text (`str` or iterable of them): What is read.
        knn_datastore ([`KnnDatastore`], *optional*): Without it, only the model is asked.
        k, lambda_, temperature: As of [`knn_lm`].

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the text has fewer than two tokens, or an argument is none that it can be.
    """
    mixture = None
    if knn_datastore is not None:
        mixture = Mixture(knn_datastore, k, lambda_, temperature)
        knn_datastore.check_tokenizer(tokenizer)
        knn_datastore.check_model(model)
    layer: Layer = "last_hidden" if knn_datastore is None else knn_datastore.config.layer
    total, count = 0.0, 0
    with recorded(model, layer) as hidden:
        for batch, ids in read_windows(model, tokenizer, text):
            logits = model(ids, use_cache=False).logits
            for row, window in enumerate(batch):
                predicted, targets = window.predicted, window.targets
                log_probs = logits[row, predicted].float().log_softmax(dim=-1)
                places = torch.from_numpy(targets).to(log_probs.device)[:, None]
                found = log_probs.gather(1, places)[:, 0].double().numpy(force=True)
                if mixture is not None:
                    assert hidden.states is not None
                    states = hidden.states[row, predicted].float().numpy(force=True)
                    found = mixture.log_probs_of(targets, found, states)
                total -= float(found.sum())
                count += len(targets)
    if count == 0:
        raise ValueError("text must have at least two tokens: there is nothing to predict")
    return math.exp(total / count)
