"""Calls that decode plainly and say why, and what happens where a probe or a pass raises."""

import re

import pytest
import torch
from transformers import LogitsProcessor

import hf_refspec as rs
from hf_refspec.verification.caches import find_cache
from tests.helpers.architectures import small
from tests.helpers.calls import (
    Alternating,
    Call,
    ListStreamer,
    StopAtCall,
    assert_lossless,
    assert_same_entries,
    new_cache,
    random_ids,
)
from tests.helpers.drafters import Fixed, Noise
from tests.helpers.own_forward import own_forward
from tests.helpers.running_texts import finish


class Broken(RuntimeError):
    pass


def broken(model, passes: int = 0, raises=Broken):
    """Lets a model raise in forward passes over several tokens after cached ones, which plain
    decoding has only for prompts, but for the first few."""
    left = [passes]

    def forward(usual, input_ids, **kwargs):
        cache = find_cache(kwargs)
        cached = 0 if cache is None else cache.get_seq_length()
        if input_ids.shape[1] > 1 and cached:
            left[0] -= 1
            if left[0] < 0:
                raise raises("this kernel takes one token")
        return usual(input_ids=input_ids, **kwargs)

    return own_forward(model, forward)


def drawing(input_ids, scores):
    """A logits processor that draws random numbers."""
    return scores + torch.rand(scores.shape)


@pytest.mark.parametrize("raises", [Broken, torch.OutOfMemoryError])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_call_whose_probe_raises_goes_on_plainly(fresh_llama, rows, do_sample, raises, caplog):
    (plain, drafted), processors = (ListStreamer(), ListStreamer()), (Alternating(), Alternating())

    def own(number: int) -> dict:
        options = {"streamer": (plain, drafted)[number], "stopping_criteria": [StopAtCall(28)]}
        alone = {"logits_processor": [processors[number], drawing], "output_scores": True}
        return options | (alone if rows == 1 else {})

    options = {"do_sample": do_sample, "return_dict_in_generate": True}
    call = Call(fresh_llama, rows, **options, **own(0))
    with broken(fresh_llama, raises=raises):
        stats = call.assert_lossless(drafting=own(1))
    assert (plain.puts, plain.ended) == (drafted.puts, drafted.ended)
    assert processors[0].seen == processors[1].seen
    assert stats.drafted == 0 and "this kernel takes one token" in stats.reason
    plainly = "LlamaForCausalLM decodes plainly, with the same text and no speed-up"
    assert [record.message for record in caplog.records].count(f"{plainly}: {stats.reason}.") == 1


@pytest.mark.parametrize("rows", [1, 3])
def test_what_a_pass_raises_is_raised(fresh_llama, rows):
    """The first passes over several tokens are the probe's."""
    call, streamer = Call(fresh_llama, rows=rows), ListStreamer()
    drafter = call.drafter()
    with broken(fresh_llama, passes=5), pytest.raises(Broken, match="takes one token"):
        call.generate(streamer=streamer, candidate_generator=drafter, max_draft_tokens=8)
    assert not streamer.ended
    assert drafter.stats.accepted > 0
    call.assert_lossless()


@pytest.mark.parametrize("room", [None, 64])
@pytest.mark.parametrize("model_type", ["llama", "falcon"])
def test_a_given_cache_goes_on_after_a_probe_that_fails(model_type, room):
    model = small(model_type)
    call = Call(model, rows=1, max_new_tokens=24)
    caches = [new_cache(model, room) for _ in range(2)]
    plain = call.generate(past_key_values=caches[0])
    options = {"candidate_generator": call.drafter(), "max_draft_tokens": 4}
    with broken(model):
        assert call.generate(past_key_values=caches[1], **options).equal(plain)
    assert "this kernel takes one token" in options["candidate_generator"].stats.reason
    assert_same_entries(caches[1], caches[0], torch.ones(1, plain.shape[1] - 1))


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
def test_what_the_calls_own_objects_raise_ends_it(fresh_llama, raised):
    class Ending(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            if self.calls == 4:
                raise raised("enough")
            return scores

    processor = Ending()
    with pytest.raises(raised, match="enough"):
        Call(fresh_llama, rows=1).generate(
            candidate_generator=Noise(), logits_processor=[processor]
        )
    assert processor.calls == 4


@pytest.mark.parametrize("passes", [0, 5])  # the probe's come first
def test_an_interrupted_pass_ends_the_call(fresh_llama, passes):
    call = Call(fresh_llama, rows=1)
    with broken(fresh_llama, passes, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        call.generate(candidate_generator=Noise(), max_draft_tokens=4)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize(
    ("part", "fullgraph", "most"),
    [("forward", True, 3), ("forward", False, 3), ("layer", True, 3), ("model", True, 8)],
)
def test_the_first_call_of_a_compiled_model_has_the_ids_of_plain_decoding(
    fresh_llama, part, fullgraph, most, attached
):
    call, graphs = Call(fresh_llama, rows=1, max_new_tokens=12), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiling = {"backend": backend, "fullgraph": fullgraph}
    if part == "forward":
        fresh_llama.forward = torch.compile(fresh_llama.forward, **compiling)
    else:
        compiled = fresh_llama if part == "model" else fresh_llama.model.layers[0]
        compiled.compile(**compiling)
    if attached:
        with rs.attach(fresh_llama, max_draft_tokens=4):
            assert call.generate().equal(call.plain)
    else:
        call.assert_lossless(rs.ReferenceCopy(), max_draft_tokens=4)
    assert 0 < len(graphs) <= most


REASONS = {
    "EncoderRepetitionPenalty": {"encoder_repetition_penalty": 1.5, "num_return_sequences": 2},
    "UnbatchedClassifierFreeGuidance": {"guidance_scale": 1.5},
    "`output_attentions=True`": {"output_attentions": True},
}


@pytest.mark.parametrize("reason", REASONS)
def test_arguments_with_which_drafts_could_change_the_text(fresh_llama, reason):
    call = Call(fresh_llama, rows=4, do_sample=True, **REASONS[reason])
    assert reason in call.assert_lossless(Noise()).reason


def test_attentions_that_are_not_returned_still_reach_the_model():
    model, asked = small("falcon"), []  # its recording hooks are never removed

    def record(_, args, kwargs):
        asked.append(kwargs.get("output_attentions"))

    call = Call(model, rows=1, output_attentions=True)
    record.only_reads = True
    with model.register_forward_pre_hook(record, with_kwargs=True):
        call.assert_lossless(Noise())
        batch = rs.RunningBatch(model)
        text = batch.add(**call.options)
        finish(batch)
    assert text.sequences.tolist() == call.plain.tolist()
    assert asked and all(asked)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_window_of_right_padding_in_a_static_cache(rows):
    model = small("mistral")
    model.set_attn_implementation("eager")
    window = model.config.sliding_window
    ids = random_ids(3 * window * rows).reshape(rows, -1)
    mask = torch.ones_like(ids)
    mask[-1, -window - 3 :] = 0
    options = {"cache_implementation": "static", "max_new_tokens": 8, "disable_compile": True}
    inputs = {"input_ids": ids, "attention_mask": mask}
    assert "padded on the right" in assert_lossless(model, Noise(), inputs, **options).reason


# --- why nothing is drafted


def test_drafts_leave_no_reason(llama):
    stats = assert_lossless(llama, Noise())
    assert stats.drafted and (stats.reason, stats.verification) == (None, "tree")


@pytest.mark.parametrize(
    ("model_type", "drafter", "nodes", "rows", "reason"),
    [
        ("llama", Fixed(), 4, 1, "^the drafter found nothing to draft$"),
        ("llama", Noise(), 0, 1, "^`max_draft_tokens=0`$"),
        ("minimax", Noise(), 4, 1, "its cache"),
        # Not that several tokens have other logits.
        ("bloom", Noise(), 4, 2, "^its attention .* rows .*pass one prompt at a time$"),
    ],
)
def test_the_reason_is_what_kept_the_call_from_drafting(
    models_by_type, model_type, drafter, nodes, rows, reason
):
    call = Call(models_by_type(model_type), rows, max_new_tokens=8)
    stats = call.assert_lossless(drafter, max_draft_tokens=nodes)
    assert stats.drafted == 0 and re.search(reason, stats.reason)
    assert f"; nothing drafted: {stats.reason[:20]}" in str(stats)


def test_an_inexact_probe_with_its_differences(caplog):
    stats = assert_lossless(small("mamba"), Noise())
    assert (stats.drafted, stats.verification) == (0, "none")
    assert "several tokens in one pass have other logits than one after another" in stats.reason
    assert "off those of single steps" in stats.reason
    plainly = "MambaForCausalLM decodes plainly, with the same text and no speed-up"
    assert f"{plainly}: {stats.reason}" in caplog.text


def test_a_model_that_cannot_read_all_ids_of_its_head_is_told_how_it_could(fresh_llama):
    known = fresh_llama.lm_head.out_features
    fresh_llama.lm_head = torch.nn.Linear(fresh_llama.config.hidden_size, known + 9, bias=False)
    unread = list(range(known, known + 9))
    stats = assert_lossless(fresh_llama, Noise(), suppress_tokens=unread)
    assert stats.drafted == 0
    assert f"call `model.resize_token_embeddings({known + 9})`" in stats.reason
