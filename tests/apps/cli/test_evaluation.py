"""Whether a datastore pays: what is measured, and the verdict."""

from __future__ import annotations

import pytest

from hf_refspec.apps.cli.evaluation import DEFAULT, WITH_STORE, Gain, evaluate
from hf_refspec.store.datastore import Datastore

TEXTS = ["the cat sat on the mat, the cat sat on the hat\n" * 3]


@pytest.fixture
def store(tokenizer, tmp_path) -> Datastore:
    return Datastore.build(TEXTS, tokenizer, tmp_path / "store", num_proc=1, progress=False)


def entries(*seconds: tuple[float, float]) -> list[dict]:
    """Prompts of 100 tokens each: seconds by default and with the datastore."""

    def sample(method: str, decoding: float) -> dict:
        return {
            "method": method,
            "tokens": 100,
            "prefill_seconds": 0.0,
            "decoding_seconds": decoding,
        }

    pairs = [(sample(DEFAULT, one), sample(WITH_STORE, other)) for one, other in seconds]
    return [{"samples": list(pair)} for pair in pairs]


def test_the_gain_is_that_of_all_prompts_together():
    gain = Gain.of(entries((2.0, 1.0), (1.0, 1.0)))
    assert gain.ratio == pytest.approx(1.5)
    assert (gain.low, gain.high) == pytest.approx((1.0, 2.0))


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        ([(1.2, 1.0), (1.3, 1.0), (1.25, 1.0)] * 4, "pays: 1.25x over the default drafter (1.2"),
        ([(1.0, 1.0), (1.0, 1.01), (1.01, 1.0)] * 4, "does not pay here: 1.00x"),
        ([(0.8, 1.0), (0.9, 1.0)] * 5, "does not pay here: 0.85x"),
        (
            [(2.0, 1.0), (0.6, 1.0)] * 3,
            "too few prompts to say: 1.30x over the default drafter",
        ),
        ([(1.5, 1.0)] * 4, "too few prompts to say: 1.50x over the default drafter, of 4; give"),
    ],
)
def test_the_verdict_says_no_more_than_the_spread_allows(seconds, verdict):
    assert str(Gain.of(entries(*seconds))).startswith(verdict)


def test_a_prompt_that_does_not_fit_is_left_out_and_named(byte_llama, tokenizer, store):
    length = byte_llama.config.max_position_embeddings
    prompts = {"long": [5] * length, "short": [5, 6, 7]}
    evaluation = evaluate(byte_llama, tokenizer, store, prompts, max_new_tokens=4)
    assert [reason.split()[0] for reason in evaluation.skipped] == ["long"]
    assert evaluation.gain.prompts == 1
    with pytest.raises(ValueError, match="no prompt fits into the model's context: long has"):
        evaluate(byte_llama, tokenizer, store, {"long": [5] * length}, max_new_tokens=4)
