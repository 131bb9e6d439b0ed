"""Observations hold the verified tree and the target's logits at each of its nodes."""

import pytest
import torch

import hf_refspec as rs
from tests.helpers.calls import Call, up_to_end
from tests.helpers.drafters import Listening, Observed
from tests.helpers.pass_times import MadeUp, passes_take
from tests.helpers.trees import paths

ACCURACIES = [0.9, 0.4, 0.7]


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


@pytest.fixture(autouse=True)
def costs():
    """A node costs a twentieth of a pass, and wrong drafts may cost anything."""
    costs = MadeUp(lambda tokens: 1 + 0.05 * tokens)
    costs.allowance = 1e6
    with passes_take(costs.formula, costs):
        yield


STATIC = {"cache_implementation": "static"}
CHAIN, REPRODUCIBLE = {"verification": "chain"}, {"verification": "reproducible"}
# The type, the rows and the options of a call; what is blended has a budget of "auto".
CALLS = {
    "tree": ("llama", 1, {}),
    "tree, window": ("mistral", 1, {}),
    "tree, latent attention": ("deepseek_v3", 1, {}),
    "tree, heads repeated otherwise": ("jetmoe", 1, {}),
    "tree, some windows, eager": ("gpt_oss", 1, {}),
    "tree, 3 rows": ("llama", 3, {}),
    "tree, window, 3 rows": ("mistral", 3, {}),
    "tree, latent attention, 3 rows": ("deepseek_v3", 3, {}),
    "tree, some windows, 3 rows": ("gemma2", 3, {}),
    "tree, some windows, packed, 3 rows": ("gemma3_text", 3, {}),
    "chain": ("llama", 1, CHAIN),
    "chain, window": ("mistral", 1, CHAIN),
    "chain, 3 rows": ("gpt2", 3, CHAIN),
    "chain, running state": ("qwen3_next", 1, CHAIN),
    "chain, mamba2": ("mamba2", 1, CHAIN),
    "static": ("llama", 1, STATIC),
    "static, window": ("mistral", 1, STATIC),
    "static, some windows, 3 rows": ("gemma2", 3, STATIC),
    "chain, reproducible, window": ("mistral", 1, REPRODUCIBLE),
    "chain, reproducible, 3 rows": ("llama", 3, REPRODUCIBLE),
}
BLENDED = ["tree", "tree, 3 rows", "chain", "chain, running state"]


@pytest.mark.parametrize(
    ("kind", "blended"), [*((kind, False) for kind in CALLS), *((kind, True) for kind in BLENDED)]
)
def test_every_source_observes_the_verified_tree_and_the_logits_of_its_nodes(
    models_by_type, kind, blended
):
    model_type, rows, options = CALLS[kind]
    call, budget = Call(models_by_type(model_type), rows), "auto" if blended else 7
    listening = [
        Listening(call.inputs, call.plain, ACCURACIES, branches=2, seed=seed)
        for seed in range(1 + blended)
    ]
    drafter = rs.Blend(listening) if blended else listening[0]
    call.assert_lossless(drafter, max_draft_tokens=budget, drafting=options)
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
    assert branching == (not kind.startswith("chain"))


@pytest.mark.parametrize("rows", [1, 3])
def test_trimmed_nodes_are_not_observed(llama, rows):
    call = Call(llama, rows)
    drafter = Listening(call.inputs, call.plain, 0.9, branches=4)
    call.assert_lossless(drafter, max_draft_tokens="auto")
    check(llama, drafter.seen)
    sizes = [len(each.verified) for each in drafter.seen]
    assert 0 < sum(sizes) == drafter.stats.drafted < sum(len(tree) for _, tree in drafter.drafts)
    assert drafter.stats.mat > 1


def test_a_pass_without_a_draft_has_the_logits_of_the_root(llama):
    call = Call(llama, rows=3)
    drafter = Listening(call.inputs, call.plain, 0.9)
    call.generate(candidate_generator=drafter, max_draft_tokens=0, max_new_tokens=8)
    assert len(drafter.seen) == 3 * 8
    assert all(each.logits.shape == (1, llama.config.vocab_size) for each in drafter.seen)
    check(llama, drafter.seen)


def test_plainly_decoded_rows_are_observed_without_their_padding_and_without_logits(models_by_type):
    call = Call(models_by_type("mamba"), rows=2)
    # Of the first row alone.
    end = next(token for token in call.plain[0, 12:].tolist() if token not in call.plain[1])
    ending = Call(call.model, rows=2, eos_token_id=end, pad_token_id=0)
    drafter = Listening(call.inputs, call.plain, 0.9)
    ending.assert_lossless(drafter)
    assert all(each.logits is None and not len(each.verified) for each in drafter.seen)
    texts = [up_to_end(row[12:], [end]) for row in ending.plain]
    assert len(texts[0]) < len(texts[1]) == 32
    assert sum(len(each.tokens) for each in drafter.seen) == sum(map(len, texts))
    observed = [[*each.text, *each.tokens] for each in drafter.seen]
    for prompt, text in zip(drafter.prompts, texts, strict=True):
        assert [*prompt, *text] in observed
