"""Sampled rows take the random numbers of plain decoding, whatever is accepted."""

from __future__ import annotations

import pytest
import torch
from calls import Call
from drafters import Prophets

from hf_refspec.generation import column_noise
from hf_refspec.generation.column_noise import ColumnNoise


def test_the_noise_of_columns_is_what_multinomial_draws_in_turn():
    probs = torch.rand((5, 3, 40)).softmax(dim=-1)
    torch.manual_seed(3)
    noise = ColumnNoise(3, torch.device("cpu"))
    plain = [torch.multinomial(each, num_samples=1)[:, 0].tolist() for each in probs]
    after = torch.get_rng_state()
    torch.manual_seed(99)
    order = [(row, column) for row in (2, 0, 1) for column in range(5)]
    chosen = {each: int((probs[each[1]][each[0]] / noise.of(*each, 40)).argmax()) for each in order}
    assert [[chosen[row, column] for row in range(3)] for column in range(5)] == plain
    noise.end(5)
    assert torch.equal(torch.get_rng_state(), after)


def test_columns_that_were_dropped_are_drawn_again(monkeypatch):
    torch.manual_seed(0)
    kept, dropping = (ColumnNoise(2, torch.device("cpu")) for _ in range(2))
    expected = [kept.of(0, column, 8).tolist() for column in range(6)]
    monkeypatch.setattr(column_noise, "_KEPT_BYTES", 2 * 2 * 8 * 4)  # two columns
    assert dropping.of(1, 5, 8).tolist() == kept.of(1, 5, 8).tolist()
    assert [dropping.of(0, column, 8).tolist() for column in range(6)] == expected
    assert len(dropping._kept) == 2


@pytest.fixture(scope="module")
def call(llama) -> Call:
    return Call(llama, rows=4)


SAMPLING = {
    "temperature": {"temperature": 0.8, "top_k": 0},
    "top-p": {"top_p": 0.9, "top_k": 0},
    "a processor that reads the text": {"repetition_penalty": 1.2},
    "ended rows": {"eos_token_id": list(range(20)), "pad_token_id": 0},
}


@pytest.mark.parametrize("sampling", SAMPLING)
def test_the_same_seed_gives_the_same_texts_and_random_numbers(call, sampling):
    options = {"do_sample": True, **SAMPLING[sampling]}
    torch.manual_seed(7)
    plain = call.generate(**options)
    after = torch.get_rng_state()
    drafter = Prophets(call.inputs, plain, [0.9, 0.2, 0.5, 1.0])
    torch.manual_seed(7)
    drafted = call.generate(**options, candidate_generator=drafter, max_draft_tokens=8)
    assert drafted.tolist() == plain.tolist()
    assert torch.equal(torch.get_rng_state(), after)
    assert drafter.stats.mat > 1.1


def test_probabilities_that_are_none_are_refused_as_in_plain_decoding(call):
    def broken(input_ids, scores):
        return scores.fill_(float("nan"))

    options = {"do_sample": True, "logits_processor": [broken]}
    for drafting in ({}, {"candidate_generator": call.drafter(0.9)}):
        with pytest.raises(RuntimeError, match=r"probabilit.*nan"):
            call.generate(**options, **drafting)
