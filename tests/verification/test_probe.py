"""The probe tells verifiers that are exact from those that are not."""

from functools import partial

import pytest
import torch

import hf_refspec as rs
from hf_refspec import DraftTree
from hf_refspec.verification import caches
from hf_refspec.verification.entries import InPlaceEntries
from hf_refspec.verification.probe import ProbedCall, probe
from hf_refspec.verification.verifier import CHAIN, TREE
from tests.helpers.architectures import small
from tests.helpers.calls import (
    GREEDY,
    PROMPT,
    Call,
    assert_lossless,
    prepared,
    random_ids,
    verified_as,
)
from tests.helpers.drafters import Noise, Prophet
from tests.helpers.own_forward import ignore_mask, move_nothing, own_forward

BATCH = {
    "input_ids": torch.cat([PROMPT, PROMPT.flip(1)]),
    "attention_mask": torch.ones((2, PROMPT.shape[1]), dtype=torch.int64),
}
small_llama = partial(small, "llama")


def first(rows: int) -> dict[str, torch.Tensor]:
    return {name: value[:rows] for name, value in BATCH.items()}


DEEP = {"num_hidden_layers": 24, "hidden_size": 64, "initializer_range": 0.05}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["llama", "olmo2", "gpt2", "qwen3_moe"])
def test_a_deep_model_in_a_short_type_gets_its_tree(model_type, dtype):
    names = {"n_layer": 24, "n_embd": 64} if model_type == "gpt2" else {}
    model = small(model_type, dtype, **DEEP, **names)
    assert (verified_as(model), verified_as(model, rows=3)) == ("tree", "tree")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba", "jamba"])
def test_a_model_that_forgets_its_state_gets_no_verifier(model_type, dtype, models_by_type):
    model = models_by_type(model_type)
    model = type(model)(model.config).to(dtype).eval()
    assert verified_as(model) == "none"


def test_a_model_that_ignores_the_mask_gets_no_tree():
    model = small_llama()
    own_forward(model, ignore_mask)
    assert verified_as(model) == "chain"
    assert verified_as(model, rows=2) == "none"


def as_float32(model, args, output):
    output.logits = output.logits.float()


@torch.no_grad()
def test_other_branches_are_compared_where_logits_are_wider_than_the_weights():
    model = small_llama(torch.bfloat16)
    own_forward(model, ignore_mask)
    model.register_forward_hook(as_float32)
    _, kwargs = prepared(model, PROMPT, max_new_tokens=3)
    assert probe(ProbedCall(TREE, model, 1, kwargs)).leak > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_inexact_verification_that_the_call_asks_for_is_an_error_with_the_numbers(dtype):
    model = small_llama(dtype)
    own_forward(model, ignore_mask)
    number = r"\d\.\de[+-]\d\d"
    leak = "" if dtype == torch.float32 else rf", and .* change them by {number}"
    refused = (
        r"`verification='tree'` is not exact on LlamaForCausalLM with this cache .* \(tree: logits "
        rf"are {number} off .* rounding alone makes {number}{leak}\)"
    )
    with pytest.raises(ValueError, match=refused):
        model.generate(PROMPT, candidate_generator=Noise(), verification="tree", **GREEDY)


def test_entries_that_are_moved_wrongly_refuse_trees(monkeypatch, caplog):
    model = small_llama()
    model.set_attn_implementation("eager")
    monkeypatch.setattr(InPlaceEntries, "keep", move_nothing)
    assert verified_as(model) == "chain"
    with pytest.raises(ValueError, match=r"`verification='tree'` is not exact .* with 2 rows"):
        model.generate(**BATCH, candidate_generator=Noise(), verification="tree", **GREEDY)
    assert_lossless(model, Noise(), BATCH)
    assert "decodes plainly" in caplog.text and "off those of single steps" in caplog.text


# --- the text


@pytest.mark.parametrize("vocab_size", [16, 30, 60])
def test_a_small_vocabulary_can_be_probed(vocab_size):
    prompt = torch.tensor([[5, 9, 12, 7, 5, 9]])
    assert verified_as(small_llama(vocab_size=vocab_size), prompt=prompt) == "tree"


@pytest.mark.parametrize("rows", [1, 2])
def test_special_tokens_at_the_lowest_ids_do_not_matter(rows):
    """After a text of them a trained model's logits are flat: rounding is all that there is."""
    model = small_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[:16] = 0
    assert verified_as(model, rows) == "tree"
    inputs = {**first(rows), "input_ids": 20 + first(rows)["input_ids"]}
    assert assert_lossless(model, 0.9, inputs).mat > 1.5


class Disturbing:
    """Disturbs the logits of the first passes over a tree."""

    def __init__(self, model, passes: int):
        self.left = passes
        own_forward(model, self)

    def __call__(self, usual, **kwargs):
        outputs = usual(**kwargs)
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 4 and self.left > 0:
            self.left -= 1
            outputs.logits += torch.randn_like(outputs.logits)
        return outputs


@pytest.mark.parametrize("rows", [1, 2])
def test_a_verifier_that_is_refused_on_one_text_is_tried_on_a_second(rows):
    model = small_llama()
    disturbing = Disturbing(model, 1)
    assert verified_as(model, rows) == "tree"
    assert disturbing.left == 0
    model = small_llama()
    Disturbing(model, 100)
    assert verified_as(model, rows) == ("chain" if rows == 1 else "none")


# --- probes in the middle of a call


class Late(Prophet):
    """Begins to draft after three plain steps, as a budget that measures them does."""

    def draft(self, budget, call):
        return super().draft(budget, call) if len(self.observed) > 3 else DraftTree.empty()


def decoded_late(model, prompt=PROMPT, **options):
    """The stats of a call that must return the ids and the cache of plain decoding."""
    options["return_dict_in_generate"] = True
    return assert_lossless(model, lambda plain: Late(plain, 0.9), prompt, **options)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("length", [1, PROMPT.shape[1]])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3_moe", "gpt_neox"])
def test_a_probe_touches_nothing_of_a_call_that_has_begun(model_type, length, do_sample):
    model = small(model_type)
    stats = decoded_late(model, PROMPT[:, :length], do_sample=do_sample)
    assert stats.mat > 1.5 and stats.probe_passes == 9
    stats = decoded_late(model, do_sample=do_sample)
    assert stats.mat > 1.5 and stats.probe_passes == 0


def keep_in_order(entries, done, paths):
    """Keeps as many of the pass's first tokens as were accepted, whichever they are."""
    counts = [done.pending[i] + len(path) for i, path in enumerate(paths)]
    for row, count in zip(entries.rows, counts, strict=True):
        row.keep(row.length + count)
    entries.undo()
    return [row.length - entries.prior_length for row in entries.rows]


def refuse(usual, input_ids, **kwargs):
    """A forward that takes one token at a time."""
    if input_ids.shape[1] > 1 and caches.find_cache(kwargs).get_seq_length() > 0:
        raise NotImplementedError("one token at a time")
    return usual(input_ids=input_ids, **kwargs)


def test_a_leak_shows_before_the_first_draft_in_a_long_text():
    """New weights attend to all tokens alike: branches would change next to nothing there."""
    size = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2}
    model = small("llama", max_position_embeddings=2048, **size)
    own_forward(model, ignore_mask)
    stats = assert_lossless(model, lambda plain: Late(plain, 0.9), random_ids(1000))
    assert stats.drafted == 0 and stats.probe_passes > 4


@pytest.mark.parametrize("fault", ["mask", "keep", "raises"])
def test_a_call_that_has_begun_goes_on_plainly_where_trees_are_inexact(fault, monkeypatch):
    model = small_llama()
    if fault == "keep":
        monkeypatch.setattr(InPlaceEntries, "keep", keep_in_order)
    else:
        own_forward(model, ignore_mask if fault == "mask" else refuse)
    stats = decoded_late(model)
    assert stats.mat == 1.0 and stats.probe_passes > 0 and stats.reason


# --- findings


@torch.no_grad()
def test_a_finding_has_the_numbers(llama):
    _, kwargs = prepared(llama, PROMPT, max_new_tokens=3)
    for kind, boundary in ((TREE, None), (CHAIN, None), (CHAIN, 20)):
        finding = probe(ProbedCall(kind, llama, 1, kwargs, boundary))
        assert finding.exact and 0 < finding.error < 1e-5
        assert f"{finding.error:.1e}" in str(finding)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("rows", [1, 2])
def test_running_out_of_memory_and_an_interrupt_are_no_findings(rows, error):
    """The one in a pass over a tree, the other in the plain steps that it is compared with."""
    model = small_llama()

    def fail(usual, **kwargs):
        is_tree = kwargs.get("attention_mask", PROMPT).ndim == 4
        if is_tree if error is torch.OutOfMemoryError else kwargs["input_ids"].shape[1] == 1:
            raise error
        return usual(**kwargs)

    call = Call(model, inputs=first(rows))
    with own_forward(model, fail):
        if error is torch.OutOfMemoryError:  # plain decoding needs less
            assert "OutOfMemoryError" in call.assert_lossless(Noise()).reason
        else:
            with pytest.raises(error):
                call.generate(candidate_generator=Noise())
    assert verified_as(model, rows) == "tree"


def test_any_other_exception_of_a_model_is_a_finding(caplog):
    model = small_llama()
    own_forward(model, refuse)
    assert_lossless(model, Noise())
    assert "NotImplementedError('one token at a time')" in caplog.text


@pytest.mark.parametrize("max_draft_tokens", [0, 8])
@pytest.mark.parametrize("rows", [1, 2])
def test_models_that_checkpoint_gradients_are_decoded_plainly(rows, max_draft_tokens, caplog):
    """In training their layers run without the cache. A model that was probed before is one too."""
    model, drafting = small_llama(), {"max_draft_tokens": max_draft_tokens}
    assert_lossless(model, rs.ReferenceCopy(), first(rows), **drafting)
    model.gradient_checkpointing_enable()
    assert_lossless(model.train(), rs.ReferenceCopy(), first(rows), **drafting)
    assert "gradient checkpointing is at work" in caplog.text
