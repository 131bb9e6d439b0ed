"""Texts that join and leave are the texts of calls of their own."""

import random
from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_refspec.generation.budget import PassCosts
from hf_refspec.generation.running_batch import RunningBatch
from hf_refspec.transformers_names import CACHE_NAME
from tests.helpers.architectures import small
from tests.helpers.calls import Alternating, ListStreamer, StopAtCall
from tests.helpers.calls import random_ids as ids
from tests.helpers.drafters import Prophet
from tests.helpers.running_texts import add, finish, generated

CACHE_NAMES = {"past_key_values", CACHE_NAME}


def random_call(rng: random.Random, shared: torch.Tensor) -> SimpleNamespace:
    """A prompt, and what makes the options of one call: some keep state."""
    own = ids(rng.randint(1, 25), rng.randrange(1000))
    prompt = torch.cat([shared, own], dim=-1) if rng.random() < 0.5 else own
    options = {"max_new_tokens": rng.randint(1, 30), "pad_token_id": 0}
    options["eos_token_id"] = rng.choice([None, 2, [5, 6, 7, 8]])
    if rng.random() < 0.2:
        options["cache_implementation"] = "static"
    options["do_sample"] = rng.random() < 0.5
    if options["do_sample"]:
        options |= {"temperature": rng.choice([0.3, 1.0]), "top_k": rng.choice([0, 5])}
    if rng.random() < 0.3:
        options["repetition_penalty"] = 1.3
    alternates, stops = rng.random() < 0.3, rng.choice([None, rng.randint(1, 20)])

    def kwargs():
        made = dict(options, input_ids=prompt)
        if alternates:
            made["logits_processor"] = LogitsProcessorList([Alternating()])
        if stops is not None:
            made["stopping_criteria"] = StoppingCriteriaList([StopAtCall(stops)])
        return made

    return SimpleNamespace(kwargs=kwargs, seed=rng.randrange(2**40), streamer=ListStreamer())


def seeded(model, call: SimpleNamespace) -> torch.Tensor:
    """The text of a call of its own."""
    torch.manual_seed(call.seed)
    return model.generate(**call.kwargs())


def run_schedule(model, seed: int, max_draft_tokens=("auto", 0, 4, 16)) -> int:
    """Lets texts join at random times; returns how many there were."""
    rng = random.Random(seed)
    batch = RunningBatch(
        model,
        max_rows=rng.randint(1, 5),
        prefill_tokens=rng.randint(2, 30),
        prefix_tokens=rng.choice([0, 50, 300]),
        max_draft_tokens=rng.choice(max_draft_tokens),
    )
    # The rows' memory grows at a length of 256.
    shared = ids(rng.choice([rng.randint(1, 40), rng.randint(225, 260)]), rng.randrange(1000))
    calls = [random_call(rng, shared) for _ in range(rng.randint(1, 7))]
    for call in calls:
        call.plain = seeded(model, call)
    waiting, texts = list(calls), []
    while waiting or len(batch):
        while waiting and rng.random() < 0.3:
            call = waiting.pop(0)
            drafter = Prophet(call.plain, rng.choice([0.0, 0.6, 1.0]))
            own = {"candidate_generator": drafter, "streamer": call.streamer}
            texts.append(batch.add(seed=call.seed, **own, **call.kwargs()))
        ended = batch.step()
        assert all(text.finished for text in ended)
    for call, text in zip(calls, texts, strict=True):
        assert text.sequences.tolist() == call.plain.tolist()
        prompt, *new = call.streamer.puts
        streamed = [*prompt[0], *(token for put in new for token in put)]
        assert streamed == text.sequences[0].tolist()
        assert text.finished and call.streamer.ended
    assert len(batch) == batch.running == 0
    return len(calls)


def schedules(counts: dict[str, int]):
    """Runs a test with the first random schedules of each type of models, and with ten times as
    many every night."""
    usual = [(name, range(count)) for name, count in counts.items()]
    further = [
        pytest.param(name, range(count, 10 * count), marks=pytest.mark.nightly)
        for name, count in counts.items()
    ]
    return pytest.mark.parametrize(("model_type", "seeds"), [*usual, *further], ids=str)


PACKED = {"llama": 8, "gpt2": 8, "qwen3_moe": 8}
IN_TURN = {"mistral": 3, "mamba2": 3, "mamba": 3, "gemma3_text": 3}  # they cannot be packed


@schedules(PACKED | IN_TURN)
def test_texts_that_join_at_random_times_are_those_of_calls_of_their_own(
    model_type, models_by_type, seeds
):
    for seed in seeds:
        run_schedule(models_by_type(model_type), seed)


@schedules({"llama": 3, "falcon": 3, "qwen3_moe": 3})
def test_passes_that_are_filled_up_decode_the_same(model_type, models_by_type, seeds, monkeypatch):
    monkeypatch.setattr(PassCosts, "cheapest", lambda self, tokens: tokens + tokens % 4)
    for seed in seeds:
        run_schedule(models_by_type(model_type), seed, max_draft_tokens=["auto"])


def test_rows_that_draft_well_take_fewer_steps(llama):
    batch = RunningBatch(llama, max_rows=3, max_draft_tokens=4)
    plain = generated(llama, ids(12), 30)
    good = add(batch, ids(12), 30, candidate_generator=Prophet(plain, 1.0, branches=0))
    bad = add(batch, ids(12), 30, candidate_generator=Prophet(plain, 0.0))
    steps = 0
    while not good.finished:
        batch.step()
        steps += 1
    assert steps < 12 and not bad.finished and batch.running == 1
    finish(batch)
    assert good.sequences.tolist() == bad.sequences.tolist() == plain
    assert good.stats.mat > 2.5 and bad.stats.accepted == 0


def test_no_text_waits_longer_than_a_piece_of_another_prompt(llama):
    batch = RunningBatch(llama, max_rows=2, prefill_tokens=8)
    first = add(batch, ids(4), 40, candidate_generator=None)
    batch.step()
    long = add(batch, ids(80, 1), 2)
    for _ in range(9):
        before = first.sequences.shape[1]
        batch.step()
        assert first.sequences.shape[1] > before and long.sequences.shape[1] == 80
    batch.step()
    assert long.sequences.shape[1] > 80


def test_texts_wait_in_order_where_there_is_no_room(llama):
    batch = RunningBatch(llama, max_rows=2)
    texts = [add(batch, ids(4, n), 6) for n in range(5)]
    ended = []
    while len(batch):
        ended += batch.step()
        assert batch.running <= 2
    assert ended == texts


def test_a_prompt_that_is_interrupted_ends_and_the_others_go_on(llama):
    batch = RunningBatch(llama, max_rows=2)
    first = add(batch, ids(4), 20)
    batch.step()
    second = add(batch, ids(30, 1), 20, interrupted=lambda: True)
    assert batch.step() == [second]
    assert second.sequences.shape[1] == 30
    finish(batch)
    assert first.sequences.shape[1] == 24


def fails_at(length: int):
    """A stopping criterion."""

    def fail(input_ids, scores, **kwargs):
        if input_ids.shape[1] == length:
            raise RuntimeError("this criterion fails")
        return torch.zeros(len(input_ids), dtype=torch.bool)

    return StoppingCriteriaList([fail])


def test_a_pass_that_fails_ends_its_texts_and_the_next_ones_go_well(llama):
    batch = RunningBatch(llama, max_rows=1)
    failing = add(batch, ids(4), 20, stopping_criteria=fails_at(9))
    waiting = add(batch, ids(6, 1))
    with pytest.raises(RuntimeError, match="criterion fails"):
        finish(batch)
    assert failing.finished and not waiting.finished
    finish(batch)
    assert waiting.sequences.tolist() == generated(llama, ids(6, 1))


def test_a_text_that_ends_in_its_prefill_has_ended_also_where_the_pass_of_others_fails(llama):
    batch = RunningBatch(llama, max_draft_tokens=0)
    add(batch, ids(4), stopping_criteria=fails_at(8))
    for _ in range(2):
        batch.step()
    short = add(batch, ids(4, 1), 1)
    with pytest.raises(RuntimeError, match="criterion fails"):
        batch.step()
    assert short.finished and short.sequences.shape[1] == 5 and len(batch) == 0


def test_a_text_that_cannot_join_ends(llama, monkeypatch):
    def fail(*args):
        raise MemoryError

    batch = RunningBatch(llama, prefill_tokens=4)
    texts = [add(batch, ids(4, n)) for n in range(2)]
    batch.step()
    monkeypatch.setattr("hf_refspec.verification.entries.InPlaceEntries.join", fail)
    with pytest.raises(MemoryError):
        batch.step()
    assert all(text.finished for text in texts) and len(batch) == 0


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("max_rows", 0, "max_rows must be at least 1, but is 0"),
        ("max_rows", "8", "max_rows must be an int, but is '8'"),
        ("prefill_tokens", 0, "prefill_tokens must be at least 1"),
        ("prefix_tokens", -1, "prefix_tokens must be at least 0"),
        ("max_draft_tokens", 1025, "`max_draft_tokens` must be at most 1024, but is 1025"),
    ],
)
def test_options_are_checked(llama, option, value, error):
    with pytest.raises((TypeError, ValueError), match=error):
        RunningBatch(llama, **{option: value})


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"input_ids": ids(4).repeat(2, 1)}, "has 2 rows, but a text of a running batch has one"),
        ({"num_beams": 2}, "`num_beams=2`: beam search"),
        *(({name: object()}, f"`{name}` cannot be given") for name in sorted(CACHE_NAMES)),
        ({"candidate_generator": 3}, "candidate_generator"),
    ],
)
def test_what_cannot_be_decoded_is_refused_before_it_waits(llama, arguments, error):
    batch = RunningBatch(llama)
    with pytest.raises((TypeError, ValueError), match=error):
        batch.add(**{"input_ids": ids(4), **arguments})
    assert len(batch) == 0


def test_eager_attention_is_not_packed_and_right():
    model = small("llama")
    model.set_attn_implementation("eager")
    run_schedule(model, 5)


@pytest.mark.parametrize("model_type", ["blt", "gemma4_text"])
def test_rows_are_counted_where_a_config_has_no_size_for_all_layers(models_by_type, model_type):
    assert RunningBatch(models_by_type(model_type)).max_rows >= 1
