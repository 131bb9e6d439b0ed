"""Observations hold the verified tree and the target's logits at each of its nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from calls import Call
from drafters import Prophets
from trees import paths

import hf_refspec as rs
from hf_refspec.generation import budget as budgets
from hf_refspec.generation.pass_costs import PassCosts

ACCURACIES = [0.9, 0.4, 0.7]


@dataclass
class Observed:
    """One call of `observe`, and the text before it."""

    text: list[int]
    tokens: list[int]
    verified: rs.DraftTree
    logits: torch.Tensor


class Listening(Prophets):
    """Records its observations; the forks of a call share the list."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen, self.drafted = [], []

    def fork(self):
        fork = super().fork()
        fork.seen, fork.drafted = self.seen, self.drafted
        return fork

    def begin(self, prompt_ids, vocab_size):
        super().begin(prompt_ids, vocab_size)
        self.text = prompt_ids.tolist()

    def observe(self, observation):
        # Logits are valid until the next pass.
        tokens = observation.tokens.tolist()
        self.seen.append(
            Observed(self.text, tokens, observation.verified, observation.logits.clone())
        )
        self.text = self.text + tokens
        super().observe(observation)

    def draft(self, budget):
        tree = super().draft(budget)
        # Probabilities differ, so that only some nodes are worth verifying.
        depths = tree.depths()
        self.drafted.append(len(tree))
        return rs.DraftTree(tree.tokens, tree.parents, np.float32(0.9) ** depths)


def check(model, seen: list[Observed]) -> None:
    """Against plain forward passes over the text with the path to each node behind it."""
    vocab_size = model.config.vocab_size
    for each in seen:
        assert each.logits.shape == (1 + len(each.verified), vocab_size)
        found = [(), *paths(each.verified.tokens, each.verified.parents)]
        for path, logits in zip(found, each.logits, strict=True):
            with torch.no_grad():
                plain = model(torch.tensor([[*each.text, *path]])).logits[0, -1]
            torch.testing.assert_close(logits, plain, rtol=1e-3, atol=1e-4)
        # The accepted path and what the target chose after it.
        *accepted, last = each.tokens
        node = found.index(tuple(accepted))
        assert int(each.logits[node].argmax()) == last


class Dear(PassCosts):
    """Known from the first pass on: a node costs a twentieth of a pass, and nothing is lost."""

    def wants_plain_step(self, rows, length):
        return False

    def seconds(self, tokens):
        return 1 + 0.05 * np.array(tokens)

    def dearest(self, tokens):
        return np.ones(len(tokens))


def dear(model, kind_of_pass) -> Dear:
    costs = Dear()
    costs.record(1, 1.0)
    return costs


@pytest.mark.parametrize(("blended", "budget"), [(False, 7), (True, "auto")])
@pytest.mark.parametrize(
    ("model_type", "rows", "verification"),
    [
        ("llama", 1, "tree"),
        ("llama", 1, "chain"),
        ("llama", 3, "tree"),
        ("gpt2", 3, "chain"),
        ("mistral", 1, "chain"),
        ("qwen3_next", 1, "chain"),
    ],
)
def test_every_source_observes_the_verified_tree_and_the_logits_of_its_nodes(
    models_by_type, model_type, rows, verification, blended, budget, monkeypatch
):
    monkeypatch.setattr(budgets, "pass_costs", dear)
    call = Call(models_by_type(model_type), rows)
    listening = [
        Listening(call.inputs, call.plain, ACCURACIES[:rows], branches=2, seed=seed)
        for seed in range(1 + blended)
    ]
    drafter = rs.Blend(listening) if blended else listening[0]
    drafting = {"max_draft_tokens": budget, "verification": verification}
    drafted = call.generate(candidate_generator=drafter, **drafting)
    assert drafted.tolist() == call.plain.tolist()

    for source in listening:
        check(call.model, source.seen)
        assert [len(each.verified) for each in source.seen[:rows]] == [0] * rows  # the prefill
        sizes = [len(each.verified) for each in source.seen]
        assert sum(sizes) == drafter.stats.drafted > 0
        assert sum(len(each.tokens) for each in source.seen) == drafter.stats.tokens
        if budget != "auto":
            assert max(sizes) <= budget
    if blended:  # both observe the merged tree
        for mine, theirs in zip(listening[0].seen, listening[1].seen, strict=True):
            assert mine.verified is theirs.verified
    branching = any(not each.verified.is_chain for each in listening[0].seen)
    assert branching == (verification == "tree")


@pytest.mark.parametrize("rows", [1, 3])
def test_trimmed_nodes_are_not_observed(llama, rows, monkeypatch):
    monkeypatch.setattr(budgets, "pass_costs", dear)
    call = Call(llama, rows)
    drafter = Listening(call.inputs, call.plain, 0.9, branches=4)
    drafted = call.generate(candidate_generator=drafter, max_draft_tokens="auto")
    assert drafted.tolist() == call.plain.tolist()
    check(llama, drafter.seen)
    sizes = [len(each.verified) for each in drafter.seen]
    assert 0 < sum(sizes) == drafter.stats.drafted < sum(drafter.drafted)
    assert drafter.stats.mat > 1


def test_a_pass_without_a_draft_has_the_logits_of_the_root(llama):
    call = Call(llama, rows=3)
    drafter = Listening(call.inputs, call.plain, 0.9)
    call.generate(candidate_generator=drafter, max_draft_tokens=0, max_new_tokens=8)
    assert len(drafter.seen) == 3 * 8
    assert all(each.logits.shape == (1, llama.config.vocab_size) for each in drafter.seen)
    check(llama, drafter.seen)
