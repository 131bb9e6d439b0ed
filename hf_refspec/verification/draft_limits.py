"""The greatest depth of drafts: no further than the length at which the model's attention changes
(windows, rotary scaling) before it is probed there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from transformers import DynamicCache, PreTrainedConfig

from ..drafting.stats import DraftStats
from ..refusals import Reason, why_refused
from ..text_config import context_length, length_dependent_rope, text_config
from .probe import ProbedCall, known_finding
from .ranks import Ranks
from .verifier import Verifier

_LENGTHS = re.compile(r"window|chunk|block|topk|local_att|keep_|budget|compress|mem_len")
# Names that count something else: max_window_layers, moe_topk.
_COUNTS = re.compile(r"layers|moe|router|expert")
# Every probe's text is longer than this.
_CROSSED = 8


class DraftLimits:
    """Limits of the drafts of a call: their depth, and whether they may branch.

    Drafts first end before the next length at which attention may become another computation. Once
    a text is there and has a draft, a probe whose text crosses it decides whether drafts continue.
    A verifier that has not been `probed` is probed before its first draft.

    Attributes:
        verifier ([`Verifier`]): Runs the passes.
        chains (`bool`): True if drafts must not branch.
        ranks ([`Ranks`]): The processes that decode one text together; the first one decides.
        refused ([`Reason`], *optional*): Why drafts end at the next length, if they do.
    """

    def __init__(
        self,
        verifier: Verifier,
        rows: int = 1,
        chains: bool = False,
        probed: bool = True,
        ranks: Ranks | None = None,
        stats: DraftStats | None = None,
    ) -> None:
        """`rows` is 2 for any number of several; `stats` count the passes of probes."""
        self.verifier = verifier
        self.chains = chains or not verifier.kind.takes_trees
        self.ranks = Ranks() if ranks is None else ranks
        self.refused: Reason | None = None
        config = text_config(verifier.model)
        self.vocab_size: int = config.vocab_size
        self._call = ProbedCall(verifier.kind, verifier.model, rows, verifier.model_kwargs)
        self._stats = stats
        self._table = context_length(config)
        rope = length_dependent_rope(config)
        # The length at which rotary frequencies change; and whether they do so at every step from
        # there on, or once ("longrope").
        originally = "original_max_position_embeddings"
        unscaled = rope.get(originally) or getattr(config, originally, None) or self._table
        self._unscaled = unscaled if rope else None
        self._is_dynamic = rope.get("rope_type") == "dynamic"
        self._boundaries = ([] if probed else [0]) + boundaries(config)

    @property
    def may_pad(self) -> bool:
        """True if passes of packed rows may be padded: one token then runs as one of several, which
        must have been found exact. Each of several ranks has measured other costs."""
        is_exact = self.refused is None and self._boundaries[:1] != [0]
        return self.verifier.entries.packs and is_exact and self.ranks.alone

    def allow(self, length: int) -> bool:
        """True if drafts after texts of up to this length may be verified. Probes the lengths that
        they have reached, once each."""
        while self.refused is None and self._boundaries and length >= self._boundaries[0]:
            call = self._call._replace(boundary=self._boundaries[0] or None)
            finding = known_finding(call, self._stats)
            if finding.exact:
                self._boundaries = self._boundaries[1:]
            else:
                self.refused = why_refused(finding, self._boundaries[0])
        return self.refused is None

    def depth(self, index: int, length: int) -> int:
        """The greatest depth of a draft after the row with this index, whose text has this length;
        0 or less allows none.

        A draft passes no length that its text has not come to, and none where drafts are refused;
        what is probed is probed before a draft is verified. It ends with the table of positions,
        unless the text is past it already, as in plain decoding; and before rotary frequencies
        change: one pass has one set of them, so that a longer draft would change the accepted
        tokens' frequencies."""
        deepest = sys.maxsize
        # Some models count positions, others tokens with their padding (Phi-3 drops its cache so).
        for last in (self.verifier.last_position(index, length), length - 1):
            if self._table is not None and last < self._table:
                deepest = min(deepest, self._table - 1 - last)
            if self._unscaled is not None and last <= self._unscaled:
                # The step at the border is plain: some models begin a new cache there (Phi-3).
                deepest = min(deepest, max(self._unscaled - 1 - last, 0))
            elif self._is_dynamic:
                deepest = min(deepest, 0)
        refused = self.refused is not None
        ahead = [boundary for boundary in self._boundaries if refused or boundary > length]
        return min(deepest, ahead[0] - length) if ahead else deepest


def boundaries(config: PreTrainedConfig) -> list[int]:
    """The lengths, ascending, at which attention may become another computation: numbers that the
    configuration names like a window, a chunk or a selection of keys, and the windows of the cache.

    A false boundary costs one probe; a missed one can change ids.
    """
    named = [
        value
        for name, value in vars(config).items()
        if _LENGTHS.search(name) and not _COUNTS.search(name)
    ]
    windows = [
        getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers
    ]
    return sorted({value for value in _numbers([named, windows]) if value > _CROSSED})


def _numbers(values: Any) -> Iterator[int]:
    """All integers in nested lists and dictionaries."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from _numbers(value)
    elif isinstance(values, int) and not isinstance(values, bool):
        yield values
