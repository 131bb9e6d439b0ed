"""A `DraftModel` drafts what its assistant expects, and runs it only where that pays."""

import copy
import pickle

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from transformers import PreTrainedModel

import hf_refspec as rs
from hf_refspec import Drafter, DraftTree
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.contract import Call, Observation, PathDrafter, Sampling, checked_draft
from hf_refspec.drafting.draft_model import DraftModel
from hf_refspec.drafting.tree import merged
from tests.helpers.architectures import ARCHITECTURES, VOCAB_SIZE, small
from tests.helpers.calls import GREEDY, PROMPT, assert_lossless, random_ids
from tests.helpers.passes import passes_of
from tests.helpers.trees import nodes_of


def expected(model: PreTrainedModel, ids, count: int) -> list[int]:
    """The greedy continuation."""
    options = {**GREEDY, "max_new_tokens": count}
    return model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()


@pytest.fixture
def sure_llama(llama):
    """One that is sure of its next tokens."""
    model = copy.deepcopy(llama)
    model.lm_head.weight.data *= 100
    return model


def call_of(drafter: Drafter):
    """A call with the usual prompt."""
    return drafter_call(drafter, [PROMPT[0].numpy()], VOCAB_SIZE)


def chain_of(drafter: Drafter, budget: int, **options) -> DraftTree:
    return checked_draft(drafter, budget, Call(chain=True, **options), VOCAB_SIZE)


def observe(drafter: Drafter, *tokens: int) -> None:
    drafter.observe(Observation(np.array(tokens)))


# --- drafts


def test_a_chain_is_the_assistants_greedy_text(llama):
    with call_of(drafter := DraftModel(llama)):
        chain = chain_of(drafter, 6)
    assert chain.tokens.tolist() == expected(llama, PROMPT[0].tolist(), 6)
    assert (np.diff(chain.probs) <= 0).all() and chain.probs[0] < 1


def test_a_tree_is_its_most_probable_nodes_beside_that_chain(llama):
    with call_of(drafter := DraftModel(llama)):
        tree = drafter.draft(12, Call()).checked(VOCAB_SIZE)
    with torch.no_grad():
        probs = llama(PROMPT).logits[0, -1].softmax(-1).topk(4)
    first = np.flatnonzero(tree.parents < 0)
    assert len(tree) == 12
    assert tree.tokens[first].tolist() == probs.indices[: len(first)].tolist()
    np.testing.assert_allclose(tree.probs[first], probs.values[: len(first)], rtol=0.05)


def test_estimates_are_those_of_the_calls_temperature(llama):
    chains = []
    for sampling in (None, Sampling(temperature=2.0)):
        drafter = DraftModel(llama)
        with call_of(drafter):
            chains.append(chain_of(drafter, 1, sampling=sampling))
    assert chains[0].tokens.tolist() == chains[1].tokens.tolist()
    assert chains[1].probs[0] < chains[0].probs[0]


def test_only_what_is_new_is_read(llama):
    drafter, prompt = DraftModel(llama), PROMPT[0].tolist()
    with passes_of(llama) as passes, call_of(drafter):
        chain = chain_of(drafter, 3).tokens.tolist()
        assert passes == [len(prompt), 1, 1]
        observe(drafter, *chain, 7)  # all accepted: the last of them was not read
        observe(drafter, 8)
        right = expected(llama, [*prompt, *chain, 7, 8], 1)
        passes.clear()
        assert chain_of(drafter, 1).tokens.tolist() == right
        assert passes == [3]


def test_what_the_target_rejected_leaves_the_cache(llama):
    drafter, prompt = DraftModel(llama), PROMPT[0].tolist()
    with passes_of(llama) as passes, call_of(drafter):
        chain = chain_of(drafter, 4).tokens.tolist()
        text = [*prompt, chain[0], (chain[1] + 1) % VOCAB_SIZE]
        observe(drafter, *text[len(prompt) :])
        right = expected(llama, text, 2)
        passes.clear()
        assert chain_of(drafter, 2).tokens.tolist() == right
        assert passes == [1, 1]


def test_no_draft_is_longer_than_the_assistant_can_read(models_by_type):
    assistant = small("gpt2", n_positions=16)
    drafter = DraftModel(assistant)
    for length, drafted in ((10, 6), (16, 0), (20, 0)):
        with drafter_call(drafter, [np.arange(3, 3 + length)], VOCAB_SIZE):
            assert len(chain_of(drafter, 8)) == drafted


# --- what pays


def paying(probs: np.ndarray, drafting_seconds: float) -> float:
    """The speed where neither nodes nor drafting cost anything."""
    return 1.0 + probs.sum()


def too_dear(probs: np.ndarray, drafting_seconds: float) -> float:
    return 1e-9 / (1e-9 + drafting_seconds)


def test_passes_go_on_while_they_cost_less_than_they_save(llama):
    drafter = DraftModel(llama)
    with call_of(drafter):
        for speed, least, most in ((paying, 20, 64), (too_dear, 0, 0)):
            assert least <= len(drafter.draft(64, Call(speed=speed))) <= most


@pytest.mark.parametrize("rows", [1, 5])
def test_an_assistant_that_is_sure_and_wrong_soon_runs_once_a_draft(sure_llama, rows):
    """Where the call names the number of nodes, outcomes bound the number of passes."""
    ids = random_ids(20 * rows, first=3).reshape(rows, 20)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    drafter = rs.ReferenceCopy() | DraftModel(sure_llama)
    with passes_of(sure_llama) as read:
        options = {"max_draft_tokens": 64, "max_new_tokens": 40}
        steps = assert_lossless(small("qwen3"), drafter, inputs, **options).forward_passes
    assert steps > 10
    assert len(read) < 3 * rows * steps  # where 64 would have room


# --- in a blend


class Chain(PathDrafter):
    """Drafts one path, and continues paths by 1 and 2."""

    def __init__(self, tokens, prob: float):
        self.tokens, self.prob = tokens, prob
        self.paths = []

    def draft(self, budget, call):
        return DraftTree.chain(self.tokens, [self.prob] * len(self.tokens)).truncated(budget)

    def continue_path(self, path, budget, call):
        self.paths.append(path.tolist())
        return DraftTree.chain([1, 2], [0.9, 0.8])


def test_where_others_are_sure_the_assistant_does_not_run(llama):
    blend = Chain([4, 5], 1.0) | DraftModel(llama)
    with passes_of(llama) as passes, call_of(blend):
        tree = blend.draft(2, Call(speed=paying))
    assert tree.tokens.tolist() == [4, 5]
    assert passes == []


def test_where_they_drafted_what_it_does_not_expect_it_turns_off(sure_llama):
    prompt = PROMPT[0].tolist()
    right = expected(sure_llama, prompt, 3)
    wrong = (right[1] + 1) % VOCAB_SIZE
    blend = Chain([right[0], wrong], 1.0) | DraftModel(sure_llama)
    with passes_of(sure_llama) as passes, call_of(blend):
        blend.draft(3, Call(speed=paying))
        assert blend.sources[1]._tree.best_chain().tokens.tolist() == right
    assert passes[:2] == [len(prompt) + 2, 1]


def test_where_others_are_no_longer_sure_it_goes_on_from_what_they_drafted(sure_llama):
    prompt = PROMPT[0].tolist()
    right = expected(sure_llama, prompt, 3)
    blend = Chain(right[:2], 1.0) | DraftModel(sure_llama)
    with passes_of(sure_llama) as passes, call_of(blend):
        assert chain_of(blend, 3, speed=paying).tokens.tolist() == right
    assert passes == [len(prompt) + 2]


def test_others_go_on_with_what_it_drafted(sure_llama):
    other = Chain([], 1.0)
    blend = other | DraftModel(sure_llama)
    with call_of(blend):
        tree = merged(blend._estimates(8, Call()), 64).checked(VOCAB_SIZE)
        own = blend.sources[1]._tree
    paths = {tuple(path) for path in other.paths}
    assert paths and paths <= nodes_of(own).keys()
    assert all((*path, 1, 2) in nodes_of(tree) for path in paths)


def test_what_they_drafted_behind_it_is_counted_as_theirs(sure_llama):
    other = Chain([], 1.0)
    blend = other | DraftModel(sure_llama)
    with call_of(blend):
        blend.draft(8, Call())
        path = other.paths[0]
        observe(blend, *path, 1, 2, 9)
        of_others, of_model = blend.stats.sources
        assert (of_others.accepted, of_others.first) == (2, 2)
        assert of_others.drafted == 2 * len(other.paths)
        assert of_model.accepted == len(path)
        before = blend._calibrations[0]._accepted.sum()
        blend.draft(8, Call())
        observe(blend, 9)  # what is behind a rejected path has no outcome
        assert blend._calibrations[0]._accepted.sum() == before == 2


# --- assistants and their vocabularies


def test_what_is_no_decoder_is_refused(llama):
    with pytest.raises(ValueError, match="is a LlamaModel, but must be a decoder-only language"):
        DraftModel(llama.model)


def test_another_vocabulary_is_refused_but_where_it_is_only_padded(llama):
    for size in (VOCAB_SIZE + 30, VOCAB_SIZE - 30):
        assistant = small("llama", vocab_size=size)
        drafter = DraftModel(assistant)
        with pytest.raises(ValueError, match=rf"of {size}, .* has 97\. .*padded=True.* generator`"):
            llama.generate(PROMPT, candidate_generator=drafter)
        assert assert_lossless(llama, DraftModel(assistant, padded=True)).drafted > 0


def test_of_a_part_of_the_vocabulary_nothing_else_is_drafted(llama):
    some = np.arange(0, VOCAB_SIZE, 3)
    drafter = DraftModel(llama, vocabulary=some[::-1].copy())
    with call_of(drafter):
        tree = drafter.draft(20, Call())
    with torch.no_grad():
        probs = llama(PROMPT).logits[0, -1, some].softmax(-1).numpy()
    first = tree.parents < 0
    assert np.isin(tree.tokens, some).all()
    assert tree.tokens[first].tolist() == some[np.argsort(-probs)[: first.sum()]].tolist()
    np.testing.assert_allclose(tree.probs[first], np.sort(probs)[::-1][: first.sum()], rtol=0.1)
    assert assert_lossless(llama, rs.ReferenceCopy() | drafter, max_draft_tokens=6).drafted > 0


def test_its_output_layer_is_read_again_when_the_assistant_has_changed(llama):
    assistant = copy.deepcopy(llama)
    drafter = DraftModel(assistant, vocabulary=range(VOCAB_SIZE))
    negated, halved = assistant.lm_head.weight.data.neg_, assistant.bfloat16
    for change in (lambda: None, negated, halved):
        change()
        chains = []
        for each in (drafter, DraftModel(assistant)):
            with call_of(each):
                chains.append(chain_of(each, 3).tokens.tolist())
        assert chains[0] == chains[1]


@pytest.mark.parametrize(
    ("vocabulary", "error", "message"),
    [
        ([3, 97], ValueError, "has the id 97, but LlamaForCausalLM has 97 tokens"),
        ([], ValueError, "is empty"),
        (np.ones(3), TypeError, "must hold integers, but holds float64"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(llama, vocabulary, error, message):
    with pytest.raises(error, match=f"vocabulary {message}"):
        DraftModel(llama, vocabulary=vocabulary)


def test_a_vocabulary_needs_a_linear_output_and_a_target_that_has_its_tokens(llama):
    offloaded = cpu_offload(copy.deepcopy(llama), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="vocabulary needs an assistant with a linear output"):
        DraftModel(offloaded, vocabulary=[1])
    larger = small("llama", vocab_size=VOCAB_SIZE + 30)
    drafter = DraftModel(larger, vocabulary=[5, VOCAB_SIZE], padded=True)
    with pytest.raises(ValueError, match="vocabulary has the id 97, outside of the target model's"):
        llama.generate(PROMPT, candidate_generator=drafter)


# --- copies, modes


def test_copies_and_forks_share_the_weights(llama):
    blend = rs.ReferenceCopy() | DraftModel(llama)
    for copied in (copy.deepcopy(blend), blend.fork()):
        assert copied.sources[1].assistant is llama
        assert copied.sources[1]._payoff is not blend.sources[1]._payoff
    restored = pickle.loads(pickle.dumps(DraftModel(llama)))
    with call_of(restored):
        assert chain_of(restored, 2).tokens.tolist() == expected(llama, PROMPT[0].tolist(), 2)


@pytest.mark.parametrize("part", [None, "transformer.drop"])
def test_an_assistant_in_training_mode_uses_up_no_random_numbers(llama, part):
    assistant = small("gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
    trained = assistant.get_submodule(part or "").train()
    assert_lossless(llama, DraftModel(assistant), do_sample=True)
    assert trained.training


def test_an_offloaded_assistant_drafts(llama):
    assistant = cpu_offload(copy.deepcopy(llama), execution_device=torch.device("cpu"))
    stats = assert_lossless(llama, DraftModel(assistant), verification="chain")
    assert stats.accepted == stats.drafted > 15


# --- losslessness


RECURRENT = (
    *("mamba2", "qwen3_next", "lfm2", "falcon_h1", "bamba", "mamba", "falcon_mamba", "jamba"),
    *("recurrent_gemma", "rwkv"),
)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_an_assistant_of_each_architecture_drafts_its_own_text(architecture, models_by_type):
    """Its cache is right: of a chain, all that it drafts for itself is accepted."""
    model = models_by_type(architecture.model_type)
    if architecture.model_type in RECURRENT:
        with pytest.raises(ValueError, match="keeps just the keys and values"):
            DraftModel(model)
    else:
        options = {"verification": "chain", "max_draft_tokens": 4, "max_new_tokens": 16}
        stats = assert_lossless(model, DraftModel(model), **options)
        assert stats.accepted == stats.drafted > 8
