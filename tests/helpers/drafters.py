"""Drafters for tests, which know the target text and draft it with a given accuracy."""

from dataclasses import dataclass

import numpy as np
import torch

from hf_refspec import Drafter, DraftTree, Observation
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.contract import Call


def drafted(
    drafter: Drafter, prompt, output=(), budget: int = 8, vocab_size: int = 50
) -> DraftTree:
    """The draft of a call after a prompt and an output."""
    with drafter_call(drafter, [np.array(prompt, dtype=np.int64)], vocab_size):
        if output:
            drafter.observe(Observation(np.array(output)))
        tree = drafter.draft(budget, Call()).checked(vocab_size)
    assert len(tree) <= budget
    return tree


class Fixed(Drafter):
    """Drafts one tree again and again, and records its calls."""

    def __init__(self, tree: DraftTree | None = None):  # does not call super().__init__()
        self.tree = DraftTree.empty() if tree is None else tree
        self.fails_to_begin = False
        self.calls = []

    @classmethod
    def chain(cls, tokens, probs=None) -> "Fixed":
        return cls(DraftTree.chain(tokens, probs))

    def begin(self, prompt_ids, vocab_size):
        self.calls.append(("begin", prompt_ids.tolist(), vocab_size))
        if self.fails_to_begin:
            raise ValueError("it has the id 9")

    def draft(self, budget, call):
        first = np.arange(len(self.tree)) < budget
        return self.tree if first.all() else self.tree.part(first)

    def observe(self, observation):
        verified = observation.verified.tokens.tolist()
        self.calls.append(("observe", observation.tokens.tolist(), verified))

    def end(self):
        self.calls.append(("end",))

    @property
    def observed(self) -> list[tuple]:
        return [call for call in self.calls if call[0] == "observe"]


class Prophet(Drafter):
    """Drafts random trees that hold the target's next tokens with a given chance per token.

    Args:
        target_ids: Prompt and output of plain decoding, `(1, length)` or `(length,)`.
        accuracy: Chance that the next target token is among a node's children; 1.0 for a good
            drafter, 0.0 for a bad one.
        branches: The most wrong siblings of a node.
        seed: Of the trees.
    """

    def __init__(self, target_ids, accuracy: float, branches: int = 2, seed: int = 0):
        self.target_ids = np.asarray(target_ids).reshape(-1)
        self.accuracy = accuracy
        self.branches = branches
        self.seed = seed

    def begin(self, prompt_ids, vocab_size):
        self.position = len(prompt_ids)
        self.vocab_size = vocab_size
        self.rng = np.random.default_rng(self.seed)
        self.observed = []

    def observe(self, observation):
        self.position += len(observation.tokens)
        self.observed += observation.tokens.tolist()

    def draft(self, budget: int, call) -> DraftTree:
        if call.chain:
            return self._chain(budget)
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for target in self.target_ids[self.position : self.position + 8].tolist():
            wrong = self.rng.integers(0, self.vocab_size, self.rng.integers(0, self.branches + 1))
            siblings = set(wrong.tolist()) - {target}
            right = self.rng.random() < self.accuracy
            order = self.rng.permutation([*siblings, *([target] if right else [])]).tolist()
            on_path = None
            for token in order:
                if token == target:
                    on_path = len(tokens)
                tokens.append(int(token))
                parents.append(parent)
            if on_path is None:
                break
            parent = on_path
        tokens, parents = tokens[:budget], parents[:budget]
        return DraftTree(tokens, parents, [1.0] * len(tokens))

    def _chain(self, budget: int) -> DraftTree:
        chain = self.target_ids[self.position : self.position + 8].copy()[:budget]
        wrong = self.rng.random(len(chain)) >= self.accuracy
        chain[wrong] = (chain[wrong] + 1) % self.vocab_size
        return DraftTree.chain(chain)


class Prophets(Prophet):
    """A `Prophet` that knows the target text of every row, each by its prompt.

    Args:
        inputs: `input_ids` and `attention_mask` of the call.
        outputs: Ids of plain decoding, `(rows, length)`.
        accuracies: Chance that a draft is right, one for each row (or more) or one for all.
    """

    def __init__(self, inputs, outputs, accuracies, branches: int = 2, seed: int = 0):
        super().__init__(np.zeros(1), 0.0, branches, seed)
        ids, mask = inputs["input_ids"].numpy(), inputs["attention_mask"].numpy().astype(bool)
        self.prompts = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
        self.answers = np.asarray(outputs)[:, ids.shape[1] :]
        self.accuracies = np.broadcast_to(np.atleast_1d(accuracies)[: len(ids)], len(ids))

    def begin(self, prompt_ids, vocab_size):
        row = self.prompts.index(prompt_ids.tolist())
        self.target_ids = np.concatenate([prompt_ids, self.answers[row]])
        self.accuracy = self.accuracies[row]
        super().begin(prompt_ids, vocab_size)


@dataclass
class Observed:
    """One call of `observe`, and the text before it."""

    text: list[int]
    tokens: list[int]
    verified: DraftTree
    logits: torch.Tensor | None


class Listening(Prophets):
    """Records what it observes, and its drafts with the text before them; the forks of a call share
    both lists."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen: list[Observed] = []
        self.drafts: list[tuple[list[int], DraftTree]] = []

    def fork(self):
        fork = super().fork()
        fork.seen, fork.drafts = self.seen, self.drafts
        return fork

    def begin(self, prompt_ids, vocab_size):
        super().begin(prompt_ids, vocab_size)
        self.text = prompt_ids.tolist()

    def observe(self, observation):
        tokens, logits = observation.tokens.tolist(), observation.logits
        logits = None if logits is None else logits.clone()  # they are valid until the next pass
        self.seen.append(Observed(self.text, tokens, observation.verified, logits))
        self.text = self.text + tokens
        super().observe(observation)

    def draft(self, budget, call):
        """Probabilities differ, so that only some nodes are worth verifying."""
        tree = super().draft(budget, call)
        self.drafts.append((self.text, tree))
        return DraftTree(tree.tokens, tree.parents, np.float32(0.9) ** tree.depths())


class Noise(Drafter):
    """Drafts random tokens."""

    def begin(self, prompt_ids, vocab_size):
        self.vocab_size = vocab_size
        self.rng = np.random.default_rng(len(prompt_ids))

    def draft(self, budget: int, call) -> DraftTree:
        tokens = self.rng.choice(self.vocab_size, min(budget, self.vocab_size), replace=False)
        parents = [int(self.rng.integers(-1, node)) for node in range(len(tokens))]
        return DraftTree(tokens, parents, [1.0] * len(tokens))
