"""Which verifier a call gets: the best one that a probe has found exact with the model itself.

There is no list of model names: the probe makes up a text, verifies tiny drafts in it, and compares
their logits with what plain decoding computes. The finding is kept with the model for as long as
nothing that can change its logits has changed, see `model_memo.py`, and for later processes, see
`finding.py`.

A short text says nothing about what changes at some length: a sliding window, a chunk of attention.
Another probe crosses such a length once a text is there, see `generation/plan.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import Cache, GenerationConfig, PreTrainedModel, StaticCache

from ..drafting.stats import DraftStats
from ..drafting.tree import ROOT, DraftTree
from ..kernels.pass_kernels import has_quantised_weights
from ..refusals import Reason, RefusedCallError, why_inexact, why_unverifiable
from ..text_config import attends_locally, boundaries, special_ids, text_config
from ..transformers_names import (
    USUAL_ARGUMENTS,
    is_quantised,
    next_kwargs,
    prefill,
    takes_usual_steps,
)
from .caches import call_device, find_cache, fresh_kwargs, has_padding
from .finding import Finding
from .model_memo import keep_for_later, memo_of_state, probing
from .passes import FixedTokens, PassResult, UnverifiableError, prepared, random_numbers
from .ranks import Ranks
from .verifier import CHAIN, RECURRENT, REPRODUCIBLE, STATIC, TREE, Kind, Verifier

logger = logging.getLogger("hf_refspec")

# The tokens of a prompt, of the path that is verified, and of the other branches.
_PROMPT = 8
_PATH = 4
_DISTRACTORS = 8
_PADDING = 3  # the padding of the second row, or of the only one where the call's is padded
_LEAST_VOCABULARY = _PATH + _DISTRACTORS
# Special tokens are among the lowest ids: after them a trained model's logits are nearly flat.
_LOWEST_ID = 1000
# A second text is tried before a verifier is refused; in short types, where rounding hides much,
# two texts of three decide. Bits must be the same in all of them.
_TEXTS = 3
# Beyond it a model in float32 does not agree with itself: its step over one token is another
# function than its pass over several (Zamba 2 and Nemotron-H, 1e-4), or a library rounds each
# product.
_FLOAT32_ROUNDING = 5e-5
# Up to this distance a float32 verifier agrees with the model's single steps. Exact types of
# transformers stay below it, and a branch that leaked would exceed it.
_AGREEMENT = 1e-5
# The most that a model may round in bfloat16, so that near-ties alone change places; half of the
# tokens may be rounded more.
_SHORT_ROUNDING = torch.finfo(torch.bfloat16).eps ** 0.5
# The path of the text by which a quantised model is compared with itself.
_LONG_PATH = 16
_OF_QUANTISED = "own rounding"
_SAID = "said that products are rounded"
_DROPOUT = "dropout is at work in training mode, where no two passes agree: call `model.eval()`"


class ProbedCall(NamedTuple):
    """A call that a finding is about."""

    kind: Kind
    model: PreTrainedModel
    rows: int
    model_kwargs: dict[str, Any]
    boundary: int | None = None  # a length that the text of the probe crosses
    config: GenerationConfig | None = None  # whose passes may be compiled


@dataclass(frozen=True)
class Choice:
    """The verifier of a call."""

    verifier: Verifier | None  # `None` where drafts cannot be verified exactly: decode plainly
    reason: Reason | None = None  # why there is none
    is_probed: bool = True  # true if it has been found exact; until then nothing may be drafted


def select_verifier(
    model: PreTrainedModel,
    requested: str,
    rows: int,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    drafts: bool = True,
    probes_later: bool = False,
    named: bool = False,
    stats: DraftStats | None = None,
) -> Choice:
    """The first kind of verifier that suits this call's rows and cache and that the probe finds
    exact.

    `requested` is `"auto"`, or `"tree"`, `"chain"` or `"reproducible"` to allow only that. A single
    row without padding takes the steps of plain decoding, and is not probed, unless the call
    `drafts`. With `probes_later` the tree of a model that takes the usual steps is probed before
    the first draft, by [`~generation.plan.Exactness`]. `stats` count the passes of probes.

    Raises:
        RefusedCallError: If there is none and the call has `named` the requested one; other calls
            decode plainly.
    """
    trusts_code = named and requested != REPRODUCIBLE.name
    reason = why_unverifiable(model, rows, model_kwargs, requested, trusts_code)
    if reason is not None:
        if named:
            raise RefusedCallError(f"`verification={requested!r}` is impossible: {reason.text}.")
        return Choice(None, reason)
    findings: list[tuple[str, Finding]] = []  # by the names of kinds
    for kind in _candidates(requested, rows, find_cache(model_kwargs)):
        if not kind.supports(model, model_kwargs):
            continue
        # Compiled passes may round to other bits, so that the call's own are compared.
        config = generation_config if kind is REPRODUCIBLE else None
        call = ProbedCall(kind, model, rows, model_kwargs, config=config)
        takes_plain_steps = (
            rows == 1
            and not kind.widths
            and not has_padding(model_kwargs)
            and takes_usual_steps(model)
        )
        can_wait = (
            probes_later
            and kind is TREE
            and model_kwargs.keys() <= USUAL_ARGUMENTS
            # A model with windows is probed at once, so that this call tries chains already.
            and not attends_locally(text_config(model))
            and _key(call) not in memo_of_state(model)
        )
        if takes_plain_steps and (not drafts or can_wait):
            return Choice(Verifier(kind, model, generation_config, model_kwargs), is_probed=False)
        finding = finding_about(call, stats)
        if finding.exact:
            # Prompts keep plain decoding's bits where a later probe may still refuse drafts, or
            # the prefill be compiled.
            rounds = not kind.widths and not boundaries(text_config(model))
            return Choice(Verifier(kind, model, generation_config, model_kwargs, rounds))
        findings.append((kind.name, finding))
    reason = why_inexact(findings, rows, find_cache(model_kwargs))
    if named:
        several = f" with {rows} rows" if rows > 1 else ""
        raise RefusedCallError(
            f"`verification={requested!r}` is not exact on {type(model).__name__}{several} with "
            f"this cache and attention implementation ({reason.text}). Pass `verification='auto'` "
            "to let the model decide."
        )
    return Choice(None, reason)


def _candidates(requested: str, rows: int, cache: Cache | None) -> Sequence[Kind]:
    """The kinds of verifiers that may be tried, the best first. In a static cache, and with several
    rows, a chain is verified as a tree."""
    if requested == REPRODUCIBLE.name:
        return (REPRODUCIBLE,)
    if isinstance(cache, StaticCache):
        return (STATIC,)
    if rows > 1:
        return (TREE,)
    kinds = {"auto": (TREE, CHAIN, RECURRENT), "tree": (TREE,), "chain": (CHAIN, RECURRENT)}
    return kinds[requested]


def finding_about(call: ProbedCall, stats: DraftStats | None = None) -> Finding:
    """The finding about a call like this; a model's state is probed once, counted by `stats`."""
    model = call.model
    key = _key(call)
    memo = memo_of_state(model)
    finding: Finding | None = Ranks.of(model).agree(memo.get(key))
    if finding is None:
        finding = probe(call)
        if stats is not None:
            stats.add(probe_passes=finding.passes)
        if not finding.lacked_memory:
            memo_of_state(model)[key] = finding  # the probe has shown what belongs to the state
        if finding.exact:
            keep_for_later(model, memo, key, finding)
    if finding.rounds_products and finding.exact and _SAID not in memo_of_state(model):
        memo_of_state(model)[_SAID] = True
        logger.warning(
            "%s multiplies quantised weights with the precision of bfloat16: as there, drafts may "
            "exchange tokens that are nearly equally likely.",
            type(model).__name__,
        )
    return finding


def _key(call: ProbedCall) -> str:
    """All that a finding depends on, apart from the state of the model."""
    kwargs = call.model_kwargs
    config = call.config
    parts = (
        call.kind.name,
        getattr(call.kind.entries, "__name__", None),  # two kinds verify chains
        min(call.rows, 2),
        call.rows > 1 or has_padding(kwargs),
        kwargs.get("token_type_ids") is not None,
        kwargs.keys() <= USUAL_ARGUMENTS,  # others do not let rows be packed
        call_device(call.model, kwargs),
        call.boundary,
        "" if config is None or config.disable_compile else repr(config.compile_config),
    )
    return repr(parts)


def probe(call: ProbedCall) -> Finding:
    """Verifies drafts in texts until they show whether logits equal plain decoding's."""
    kind = call.kind
    model = call.model
    device = call_device(model, call.model_kwargs)
    ranks = Ranks.of(model)
    own = _of_quantised(call, device)
    if not own.exact:
        return own
    in_float32 = _computing_dtype(model, device) == torch.float32
    exact, passes = 0, own.passes
    for seed in range(_TEXTS):
        finding: Finding = ranks.agree(_found(call, device, seed))
        is_clear = in_float32 and not finding.rounds_products and kind is not REPRODUCIBLE
        needed = 1 if is_clear else 2
        logger.debug("%s on %s: %s", kind.name, type(model).__name__, finding)
        exact += finding.exact
        passes += finding.passes
        is_decided = exact == needed and kind is not REPRODUCIBLE  # bits are compared in all texts
        if is_decided or seed + 1 - exact == 2 or not finding.same_bits:
            break
    return replace(finding, exact=exact >= needed and finding.same_bits, passes=passes)


def _of_quantised(call: ProbedCall, device: torch.device) -> Finding:
    """A finding that is not exact if a quantised model rounds so much that drafts of any kind would
    change more than near-ties; three passes show it. Other models are not run."""
    model = call.model
    ranks = Ranks.of(model)
    known: Finding | None = ranks.agree(memo_of_state(model).get(_OF_QUANTISED))
    if known is not None:
        return replace(known, passes=0)
    by_library = is_quantised(model) or has_quantised_weights(model)
    if not by_library or not CHAIN.supports(model, call.model_kwargs):
        return Finding(True)
    before = _random_state(device)
    try:
        with probing(model):
            # Products of integers have the precision of bfloat16.
            dtype = torch.bfloat16 if _multiplies_integers(model) else None
            call = call._replace(rows=1, boundary=None)
            texts = _Texts(call, device, 0, path=_LONG_PATH, dtype=dtype)
            rounding = texts.own_rounding()
    except Exception:  # the probe of a kind says why
        _set_random_state(device, before)
        return Finding(True)
    failure = None
    most = _FLOAT32_ROUNDING if texts.dtype == torch.float32 else _SHORT_ROUNDING
    if rounding > most or any(module.training for module in model.modules()):
        _set_random_state(device, before)  # dropout has drawn, or a library rounds by chance
    if rounding > most:
        failure = (
            f"its quantised products make one text's logits differ by {rounding:.1e} between one "
            "pass and two, so that drafts would change more than near-ties"
        )
    found: Finding = ranks.agree(Finding(failure is None, failure=failure, passes=texts.passes))
    memo_of_state(model)[_OF_QUANTISED] = found
    return found


def _found(call: ProbedCall, device: torch.device, seed: int) -> Finding:
    """The finding of the text that the `seed` makes up."""
    before = _random_state(device)
    texts: _Texts | None = None
    try:
        with probing(call.model):
            texts = _Texts(call, device, seed)
            finding = texts.finding(call.kind)
    except UnverifiableError as error:
        finding = Finding(False, failure=str(error))
    except Exception as error:  # models raise anything at inputs that they cannot take
        lacked_memory = isinstance(error, torch.OutOfMemoryError)
        line, *_ = repr(error).split("\\n")  # compilers' have many
        failure = f"a probe of it raised {line}"
        finding = Finding(False, failure=failure, lacked_memory=lacked_memory)
    drew = not all(map(torch.equal, before, _random_state(device)))
    if drew and any(module.training for module in call.model.modules()):
        finding = Finding(False, failure=_DROPOUT)
    if texts is not None:  # a small vocabulary has no text
        finding = replace(finding, passes=texts.passes)
    if not finding.exact:  # an exact model draws no random numbers, but other threads may have
        _set_random_state(device, before)
    return finding


class _Texts:
    """One text for each row: a prompt and a path.

    In a tree the path comes after other branches. Their content must not matter at all, whatever
    the dtype. The logits must equal those of the same tokens one after another. They may differ by
    as much as the logits of one pass over all tokens without a cache do, which differ by rounding
    alone. In float32 that pass is spared where they agree to [`_AGREEMENT`].
    """

    def __init__(
        self,
        call: ProbedCall,
        device: torch.device,
        seed: int,
        path: int = _PATH,
        dtype: torch.dtype | None = None,
    ) -> None:
        """The text's tokens are compared in this `dtype`, by default the model's own."""
        boundary = call.boundary
        self.model = call.model
        self.rows = min(call.rows, 2)
        self.model_kwargs = call.model_kwargs
        self.config = call.config or GenerationConfig(disable_compile=True)
        self.passes = 0  # that have run
        self.dtype = dtype or _computing_dtype(call.model, device)
        self.prompt = _PROMPT if boundary is None else max(boundary - 1, 2)
        rng = np.random.default_rng(seed)
        ids = rng.permutation(_ordinary_ids(call.model))
        self.path = ids[:path]
        self.distractors = ids[path : path + _DISTRACTORS]
        # A long text repeats a few tokens. Where keys are selected, equal ones may tie, and what
        # else is in the pass decides which of them is taken (Doge).
        words = ids if boundary is None else ids[-_DISTRACTORS:]
        text = rng.choice(words, (self.rows, self.prompt + len(self.path)))
        text[:, self.prompt :] = self.path
        self.mask = torch.ones(text.shape, dtype=torch.int64, device=device)
        if self.rows > 1 or has_padding(call.model_kwargs):
            self.mask[-1, :_PADDING] = 0
        self.text = torch.from_numpy(text).to(device)  # (R, prompt + path)

    def finding(self, kind: Kind) -> Finding:
        verified = self._verified(kind, self.distractors)
        in_float32 = self.dtype == torch.float32 and kind is not REPRODUCIBLE
        reference = self._one_after_another()  # (R, 5, vocab_size)
        # The second row is verified from its second token on once more.
        expected = torch.cat([reference.flatten(0, 1), reference[:1, -1], *reference[1:, -3:]])
        # All ranks go on, or none does.
        error = Ranks.of(self.model).agree(self._difference(verified, expected))
        if in_float32 and error <= _AGREEMENT:
            return Finding(True, error)
        at_once = self._at_once()
        rounding = self._difference(at_once.flatten(0, 1), reference.flatten(0, 1))
        leak = None
        rounds_products = (
            self.dtype == torch.float32
            and rounding > _FLOAT32_ROUNDING
            and _multiplies_integers(self.model)
        )
        # In float32 no leak could hide within the rounding that `error` is allowed.
        if kind.takes_trees and (rounds_products or self.dtype != torch.float32):
            other = self._verified(kind, np.roll(self.distractors, 1))
            leak = self._difference(other, verified)
        elif rounds_products:  # what comes later in a chain must not matter either
            self.path = np.append(self.path[:-1], self.distractors[0])
            other = self._verified(kind, self.distractors)
            leak = self._difference(other[:_PATH], verified[:_PATH])
        same_bits = kind is not REPRODUCIBLE or self._has_same_bits(kind, verified)
        eps = torch.finfo(self.dtype).eps
        layers = getattr(text_config(self.model), "num_hidden_layers", 1)
        usual = eps * layers**0.5
        if self.dtype == torch.float32:
            max_rounding = 2 * _SHORT_ROUNDING if rounds_products else _FLOAT32_ROUNDING
            max_error = max(3 * rounding, 2 * usual)
        else:
            # Exact models are below either; models that forget their state are at three times it.
            max_rounding = eps**0.5
            max_error = 1.5 * max(rounding, usual)
        # A product that depends on other tokens (bitsandbytes in 8 bits) is not rounding.
        max_leak = _FLOAT32_ROUNDING if rounds_products else max(3 * rounding, eps)
        leaks = leak is not None and leak > max_leak
        exact = rounding <= max_rounding and error <= max_error and not leaks
        return Finding(exact and same_bits, error, rounding, leak, rounds_products, same_bits)

    def own_rounding(self) -> float:
        """The distance of the path's logits between one pass over the text and two, neither of
        which has a draft's branches."""
        verifier = self._verifier(CHAIN)
        self._pass(verifier, [self.prompt - 1])
        drafted = self._pass(verifier, [self.prompt], [DraftTree.chain(self.path)])
        return self._difference(drafted.logits[drafted.roots[0] :], self._at_once()[0])

    def _difference(self, logits: torch.Tensor, reference: torch.Tensor) -> float:
        """|logits - reference| relative to the reference's spread: the largest of all tokens' in
        float32, the median in short types, where rounding may send a token to another expert."""
        logits, reference = logits.float(), reference.float()
        spread = (reference - reference.mean(dim=-1, keepdim=True)).norm(dim=-1)
        differences = (logits - reference).norm(dim=-1) / spread
        of_rows = differences.max() if self.dtype == torch.float32 else differences.median()
        return of_rows.item()

    def _kwargs(self, length: int) -> dict[str, Any]:
        """The arguments of a call with a prompt of this length."""
        return fresh_kwargs(self.model, self.model_kwargs, self.mask[:, :length])

    def _one_after_another(self) -> torch.Tensor:
        """The logits after the prompts and after each token of the paths, by plain steps."""
        begin = self.prompt - 1
        kwargs = self._kwargs(begin)
        outputs = prefill(self.model, self.text[:, :begin], GenerationConfig(), kwargs)
        logits = []
        for length in range(begin + 1, self.text.shape[1] + 1):
            kwargs = next_kwargs(self.model, outputs, kwargs)
            model_inputs = prepared(self.model, self.text[:, :length], size=1, kept=1, **kwargs)
            outputs = self.model(**model_inputs, return_dict=True)
            logits.append(outputs.logits[:, -1:])
        self.passes += 1 + len(logits)
        return torch.cat(logits, dim=1)

    def _at_once(self) -> torch.Tensor:
        """The logits of the same positions by one pass without a cache."""
        kwargs = fresh_kwargs(self.model, self.model_kwargs, self.mask)
        path = len(self.path)
        names = ("attention_mask", "position_ids", "token_type_ids")
        kwargs = {name: kwargs[name] for name in names if name in kwargs}
        if "token_type_ids" in kwargs:
            # The output may be of another type than the prompt (PaliGemma).
            prompt = next_kwargs(self.model, {}, self._kwargs(self.prompt - 1))
            types = prompt["token_type_ids"]
            kwargs["token_type_ids"] = torch.cat([types, types[:, -1:].expand(-1, path)], dim=-1)
        if "logits_to_keep" in self.model_kwargs:  # all logits of a long text take much memory
            kwargs["logits_to_keep"] = 1 + path
        self.passes += 1
        return self.model(self.text, use_cache=False, **kwargs).logits[:, -1 - path :]

    def _verified(self, kind: Kind, distractors: np.ndarray) -> torch.Tensor:
        """The logits of a pass over a draft for each row, at its root and its path, and of a pass
        over the rest: `(5 R + 1, vocab_size)`, with a second row 3 more."""
        verifier = self._verifier(kind)
        self._pass(verifier, [self.prompt - 1] * self.rows)
        draft, path = self._draft(kind, distractors)
        first = self._pass(verifier, [self.prompt] * self.rows, [draft] * self.rows)
        # Then both rows, of which the second is padded, continue at different positions.
        kept = [_PATH - 1, 1][: self.rows]
        verifier.keep([path[:count] for count in kept])
        lengths = [self.prompt + count + 1 for count in kept]
        rest = [DraftTree.empty(), DraftTree.chain(self.path[2:])][: self.rows]
        second = self._pass(verifier, lengths, rest)
        after = [
            second.logits[root : root + 1 + len(draft)]
            for root, draft in zip(second.roots, rest, strict=True)
        ]
        nodes = [0, *(1 + node for node in path)]
        drafted = first.logits[[root + node for root in first.roots for node in nodes]]
        return torch.cat([drafted, *after])

    def _verifier(self, kind: Kind) -> Verifier:
        """A verifier with its own cache of the call's length."""
        config = copy(self.config)
        config.max_length = max(config.max_length or 0, self.text.shape[1])
        config.cache_implementation = "static"
        config.return_dict_in_generate = True
        return Verifier(kind, self.model, config, self._kwargs(self.prompt - 1))

    def _has_same_bits(self, kind: Kind, verified: torch.Tensor) -> bool:
        """True if such a verifier returns the same bits without drafts."""
        verifier = self._verifier(kind)
        steps = []
        for length in range(self.prompt - 1, self.prompt + _PATH + 1):
            result = self._pass(verifier, [length] * self.rows)
            verifier.keep([[]] * self.rows)
            steps.append(result.logits[result.roots])
        expected = torch.stack(steps[1:], dim=1)  # (R, 5, vocab_size)
        after = [expected[0, -1:], *expected[1:, -3:]]
        return torch.equal(torch.cat([expected.flatten(0, 1), *after]), verified)

    def _pass(
        self,
        verifier: Verifier,
        lengths: Sequence[int],
        drafts: Sequence[DraftTree] | None = None,
    ) -> PassResult:
        """One pass over the first tokens of each row and its draft."""
        rows = [FixedTokens(row[None, :n]) for row, n in zip(self.text, lengths, strict=True)]
        result = verifier.forward(rows, drafts)
        self.passes += 1
        return result

    def _draft(self, kind: Kind, distractors: np.ndarray) -> tuple[DraftTree, list[int]]:
        """The path as a chain, or in a tree with all distractors before its first node and one
        before each other node; and the nodes of the path."""
        if not kind.takes_trees:
            return DraftTree.chain(self.path), list(range(_PATH))
        tokens = distractors.tolist()
        parents = [ROOT] * len(distractors)
        path = []
        parent = ROOT
        for depth, token in enumerate(self.path.tolist()):
            if depth > 0:
                tokens.append(int(distractors[depth]))
                parents.append(parent)
            tokens.append(token)
            parents.append(parent)
            parent = len(tokens) - 1
            path.append(parent)
        probs = np.ones(len(tokens), dtype=np.float32)
        return DraftTree(np.array(tokens), np.array(parents, dtype=np.int32), probs), path


def _multiplies_integers(model: PreTrainedModel) -> bool:
    """True if a library that transformers has loaded it with multiplies integers that stand for
    weights (bitsandbytes, HQQ, GPTQ). Weights of GGUF files are ordinary numbers by then."""
    if not is_quantised(model):
        return False
    kept = [buffer for buffer in model.buffers() if buffer.ndim == 2 and len(buffer) > 1]
    return any(
        not weight.is_floating_point() and weight.dtype != torch.bool
        for weight in (*model.parameters(), *kept)
    )


def _ordinary_ids(model: PreTrainedModel) -> np.ndarray:
    """Ids that are likely to be text: not the lowest, and none that the configuration names."""
    config = text_config(model)
    if config.vocab_size < _LEAST_VOCABULARY:
        raise ValueError(f"a vocabulary of {config.vocab_size} is too small to probe")
    ids = np.arange(min(_LOWEST_ID, config.vocab_size // 4), config.vocab_size)
    ids = ids[~np.isin(ids, special_ids(model.config))]
    return ids if len(ids) >= _LEAST_VOCABULARY else np.arange(config.vocab_size)


def _computing_dtype(model: PreTrainedModel, device: torch.device) -> torch.dtype:
    """The type that a model computes in: its own, or `torch.autocast`'s."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return model.dtype


def _random_state(device: torch.device) -> list[torch.Tensor]:
    """The states of the generators that a pass may draw from, the host's first."""
    devices = [torch.device("cpu")] if device.type == "cpu" else [torch.device("cpu"), device]
    return [random_numbers(source).get_rng_state() for source in devices]


def _set_random_state(device: torch.device, state: list[torch.Tensor]) -> None:
    """Sets the generators back to what [`_random_state`] returned."""
    for source, source_state in zip((torch.device("cpu"), device), state, strict=False):
        random_numbers(source).set_rng_state(source_state)
