"""Passes over pending tokens and drafts, kept and rolled back, against plain forward passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from architectures import VOCAB_SIZE
from calls import padded_prompts, prepared
from transformers import PreTrainedModel
from trees import paths

from hf_refspec import DraftTree
from hf_refspec.verification.chain import ChainVerifier, PlainVerifier, RecurrentVerifier
from hf_refspec.verification.static import ReproducibleVerifier, StaticVerifier
from hf_refspec.verification.token_sequence import FixedTokens
from hf_refspec.verification.tree import TreeVerifier
from hf_refspec.verification.verifier import Verifier

# A text long enough to cross Mistral's window of 16.
TEXT = torch.randint(3, VOCAB_SIZE, (1, 40), generator=torch.Generator().manual_seed(3))
EMPTY = DraftTree.empty()


def branching(*path: int) -> DraftTree:
    """The path with wrong siblings before each of its nodes; the path's are the odd ones."""
    tokens, parents = [], []
    for depth, token in enumerate(path):
        parents += [2 * depth - 1] * 2
        tokens += [(token + 1) % VOCAB_SIZE, token]
    return DraftTree(
        np.array(tokens), np.array(parents, dtype=np.int32), np.ones(len(tokens), np.float32)
    )


KINDS = {
    "tree": (TreeVerifier, "llama", 1),
    "tree, 3 rows": (TreeVerifier, "llama", 3),
    "tree, gpt2, 3 rows": (TreeVerifier, "gpt2", 3),
    "tree, window": (TreeVerifier, "mistral", 1),
    "tree, latent attention": (TreeVerifier, "deepseek_v3", 1),
    "tree, heads repeated otherwise": (TreeVerifier, "jetmoe", 1),
    "tree, some windows, eager": (TreeVerifier, "gpt_oss", 1),
    "tree, some windows, 3 rows": (TreeVerifier, "gemma2", 3),
    "tree, latent attention, 3 rows": (TreeVerifier, "deepseek_v3", 3),
    "tree, window, 3 rows": (TreeVerifier, "mistral", 3),
    "tree, some windows, packed, 3 rows": (TreeVerifier, "gemma3_text", 3),
    "static": (StaticVerifier, "llama", 1),
    "static, window": (StaticVerifier, "mistral", 1),
    "static, some windows, 3 rows": (StaticVerifier, "gemma2", 3),
    "reproducible, 3 rows": (ReproducibleVerifier, "llama", 3),
    "reproducible, window": (ReproducibleVerifier, "mistral", 1),
    "chain": (ChainVerifier, "llama", 1),
    "chain, window": (ChainVerifier, "mistral", 1),
    "recurrent": (RecurrentVerifier, "qwen3_next", 1),
    "recurrent, mamba2": (RecurrentVerifier, "mamba2", 1),
    "plain": (PlainVerifier, "llama", 1),
    "plain, mamba": (PlainVerifier, "mamba", 1),
    "plain, no cache": (PlainVerifier, "rwkv", 1),
}


class Bench:
    """A verifier of some rows; their texts are the prompts of a call and a given continuation."""

    def __init__(self, kind: type[Verifier], model: PreTrainedModel, rows: int):
        self.kind, self.model, self.rows = kind, model, rows
        self.inputs = padded_prompts(rows)
        self.text = torch.cat([self.inputs["input_ids"], TEXT.expand(rows, -1)], dim=-1)
        self.text[1:, 12:] = self.text[1:, 12:].flip(1)
        self.verifier = self.new(12)

    @torch.no_grad()
    def new(self, length: int) -> Verifier:
        """Another verifier that has prefilled so many tokens of each row."""
        mask = torch.ones_like(self.text[:, :length])
        mask[:, :12] = self.inputs["attention_mask"]
        inputs = {"input_ids": self.text[:, :length], "attention_mask": mask}
        static = issubclass(self.kind, StaticVerifier)
        options = {"cache_implementation": "static" if static else None, "max_new_tokens": 9}
        verifier = self.kind(self.model, *prepared(self.model, **options, **inputs))
        verifier.forward(self.at([length] * self.rows), [EMPTY] * self.rows)
        verifier.keep([[]] * self.rows)
        return verifier

    def at(self, lengths) -> list[FixedTokens]:
        return [FixedTokens(row[None, :n]) for row, n in zip(self.text, lengths, strict=True)]

    @torch.no_grad()
    def forward(self, lengths, drafts=None, verifier=None) -> list[torch.Tensor]:
        """The logits of each row at its root and nodes."""
        verifier = self.verifier if verifier is None else verifier
        drafts = drafts or [EMPTY] * self.rows
        logits, roots = verifier.forward(self.at(lengths), drafts)
        return [logits[root : root + 1 + len(d)] for root, d in zip(roots, drafts, strict=True)]

    def draft(self, row: int, length: int, count: int = 3) -> tuple[DraftTree, list[int]]:
        """A draft of what follows, and its nodes on that path."""
        path = self.text[row, length : length + count].tolist()
        if self.kind is PlainVerifier:
            return EMPTY, []
        if self.kind.takes_trees:
            return branching(*path), [2 * depth + 1 for depth in range(count)]
        return DraftTree.chain(path), list(range(count))

    def drafts(self, lengths) -> tuple[list[DraftTree], list[list[int]]]:
        """Such a draft of each row, and their nodes on the path."""
        drafts, paths = zip(*map(self.draft, range(self.rows), lengths), strict=True)
        return list(drafts), list(paths)

    @torch.no_grad()
    def plain(self, row: int, ids: list[int]) -> torch.Tensor:
        """The logits after `ids` of a row, in one forward pass without padding or cache."""
        padding = int((self.inputs["attention_mask"][row] == 0).sum())
        return self.model(torch.tensor([ids[padding:]]), use_cache=False).logits[0, -1]

    def assert_plain(self, logits: list[torch.Tensor], lengths, drafts=None) -> None:
        """The logits at the root and at each node of the drafts are those of plain passes."""
        for row, length in enumerate(lengths):
            draft = EMPTY if drafts is None else drafts[row]
            for node, path in enumerate([(), *paths(draft.tokens, draft.parents)]):
                expected = self.plain(row, [*self.text[row, :length].tolist(), *path])
                torch.testing.assert_close(logits[row][node], expected, rtol=1e-3, atol=2e-4)


@pytest.fixture(params=KINDS)
def bench(request, models_by_type) -> Bench:
    kind, model_type, rows = KINDS[request.param]
    return Bench(kind, models_by_type(model_type), rows)


def test_several_pending_tokens_and_a_draft_behind_them_have_the_logits_of_plain_steps(bench):
    for length in (15, 17, 20, 33):
        lengths = [length] * bench.rows
        drafts, paths = bench.drafts(lengths)
        bench.assert_plain(bench.forward(lengths, drafts), lengths, drafts)
        bench.verifier.keep([path[:1] for path in paths])


def test_kept_nodes_of_a_draft_are_cached(bench):
    """All, some and none of them: the next pass is right wherever it goes on."""
    length = 13
    for kept in (3, 1, 0, 2):
        lengths = [length] * bench.rows
        drafts, paths = bench.drafts(lengths)
        bench.assert_plain(bench.forward(lengths, drafts), lengths, drafts)
        bench.verifier.keep([path[:kept] for path in paths])
        if not bench.verifier.entries.reruns and bench.verifier.cache is not None:
            accepted = len(paths[0][:kept])
            assert bench.verifier.cached == [length + accepted] * bench.rows
        length += kept + 1
    bench.assert_plain(bench.forward([length] * bench.rows), [length] * bench.rows)


def test_a_rolled_back_verifier_equals_a_fresh_one(bench):
    lengths, further = [14] * bench.rows, [30] * bench.rows
    bench.forward(lengths)
    bench.verifier.keep([[]] * bench.rows)
    mark = bench.verifier.mark()
    for _ in range(2):  # any number of times
        drafts, paths = bench.drafts([15] * bench.rows)
        bench.forward([15] * bench.rows, drafts)
        bench.verifier.keep(paths)
        bench.forward(further)
        bench.verifier.keep([[]] * bench.rows)
        bench.verifier.roll_back(mark)
        assert bench.verifier.cached == mark.attributes["cached"]

        fresh = bench.new(14)
        lengths = [17] * bench.rows
        drafts, paths = bench.drafts(lengths)
        logits = bench.forward(lengths, drafts)
        bench.assert_plain(logits, lengths, drafts)
        expected = bench.forward(lengths, drafts, fresh)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=2e-4)
        for verifier in (bench.verifier, fresh):
            verifier.keep(paths)
        bench.assert_plain(bench.forward([28] * bench.rows), [28] * bench.rows)
        bench.verifier.keep([[]] * bench.rows)
        bench.verifier.roll_back(mark)
    cache = bench.verifier.cache
    if issubclass(bench.kind, (TreeVerifier, ChainVerifier)):
        assert cache.get_seq_length() == 14


ROWS = [name for name in KINDS if name.endswith("3 rows")]
rows_benches = pytest.mark.parametrize("bench", ROWS, indirect=True)


@rows_benches
def test_rows_with_different_numbers_of_pending_tokens(bench):
    for lengths, kept in (([13, 15, 20], [0, 2, 1]), ([17, 18, 30], [3, 0, 2])):
        drafts, paths = bench.drafts(lengths)
        drafts = [drafts[0], EMPTY if kept[1] == 0 else drafts[1], drafts[2]]
        bench.assert_plain(bench.forward(lengths, drafts), lengths, drafts)
        bench.verifier.keep([path[:count] for path, count in zip(paths, kept, strict=True)])
        after = [length + count for length, count in zip(lengths, kept, strict=True)]
        assert bench.verifier.cached == after


@rows_benches
def test_rows_of_different_lengths_are_rolled_back(bench):
    bench.forward([13, 15, 20])
    bench.verifier.keep([[], [], []])
    mark = bench.verifier.mark()
    for _ in range(2):
        drafts, paths = bench.drafts([22] * 3)
        bench.forward([22] * 3, drafts)
        bench.verifier.keep([paths[0], None, paths[2][:1]])
        bench.verifier.roll_back(mark)
        assert bench.verifier.cached == [13, 15, 20]
        lengths = [16, 16, 21]
        drafts, paths = bench.drafts(lengths)
        bench.assert_plain(bench.forward(lengths, drafts), lengths, drafts)
        bench.verifier.keep(paths)
        bench.verifier.roll_back(mark)


@rows_benches
def test_a_row_that_waits_keeps_nothing_of_a_pass(bench):
    bench.forward([14] * 3)
    bench.verifier.keep([[], None, []])
    assert bench.verifier.cached == [14, 12, 14]
    lengths = [16, 15, 17]
    drafts, _ = bench.drafts(lengths)
    bench.assert_plain(bench.forward(lengths, drafts), lengths, drafts)


@pytest.mark.parametrize("bench", [n for n in ROWS if "tree" in n], indirect=True)
def test_rows_leave_without_disturbing_the_others(bench):
    bench.forward([14, 20, 16])
    bench.verifier.keep([[], [], []])
    bench.verifier.select([0, 2])
    assert bench.verifier.cached == [14, 16]
    bench.text, bench.rows = bench.text[[0, 2]], 2
    bench.inputs = {name: value[[0, 2]] for name, value in bench.inputs.items()}
    lengths = [15, 19]
    drafts, _ = bench.drafts(lengths)
    bench.assert_plain(bench.forward(lengths, drafts), lengths, drafts)


@rows_benches
def test_finish_leaves_all_but_the_last_column_in_the_cache(bench):
    bench.forward([14, 18, 16])
    bench.verifier.keep([[], [], []])
    with torch.no_grad():
        bench.verifier.finish(bench.text[:, :18], [15, 19, 17])
    assert bench.verifier.cache.get_seq_length() == 17
    fresh = bench.new(17)
    fresh.finish(bench.text[:, :18], [18] * 3)
    for one, other in zip(bench.verifier.cache.layers, fresh.cache.layers, strict=True):
        # A layer that keeps a window has no more than that. A static cache goes on behind the rows.
        gone = max(0, 17 - getattr(one, "max_cache_len", getattr(one, "sliding_window", 18) - 1))
        for name in ("keys", "values"):  # without padding
            kept, expected = (
                getattr(each, name)[:, :, 5 - gone : 17 - gone] for each in (one, other)
            )
            torch.testing.assert_close(kept, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_crop_drops_the_last_tokens_of_a_row(models_by_type, kept):
    bench = Bench(TreeVerifier, models_by_type("llama"), 1)
    draft, path = bench.draft(0, 20)
    bench.forward([20], [draft])
    bench.verifier.keep([path[:kept]])
    assert bench.verifier.crop(15)
    assert bench.verifier.cached == [15]
    assert bench.verifier.cache.get_seq_length() == 15
    bench.assert_plain(bench.forward([18]), [18])
    sliding = Bench(ChainVerifier, models_by_type("mistral"), 1)
    assert not sliding.verifier.crop(8)
