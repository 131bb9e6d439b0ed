"""A datastore that was made with another tokenizer is warned of, where a tokenizer tells it."""

import pytest
from transformers import AutoModelForCausalLM

import hf_refspec as rs
from tests.helpers.byte_model import word_tokenizer
from tests.helpers.calls import GREEDY, PROMPT, assert_lossless


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> rs.Datastore:
    """A datastore with a smaller vocabulary than the model's."""
    words = word_tokenizer(["<unk>", "the", "cat"])
    folder = tmp_path_factory.mktemp("stores") / "words"
    return rs.Datastore.build(["the cat the cat"], words, folder, progress=False)


@pytest.fixture
def stored(byte_llama, model_folder, tmp_path):
    """Loads the model from a folder, with or without its tokenizer."""

    def load(with_tokenizer: bool):
        byte_llama.save_pretrained(tmp_path / "model")
        folder = model_folder if with_tokenizer else tmp_path / "model"
        return AutoModelForCausalLM.from_pretrained(folder)

    return load


def warnings(caplog) -> list[str]:
    return [each for each in caplog.messages if "was made for another tokenizer" in each]


@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.parametrize("given", [False, True], ids=["beside the model", "of the call"])
def test_it_is_warned_of_once_and_changes_no_id(stored, other, tokenizer, given, blended, caplog):
    model = stored(with_tokenizer=not given)
    for _ in range(2):
        drafter = rs.ReferenceCopy() | other if blended else other
        assert_lossless(model, drafter, **({"tokenizer": tokenizer} if given else {}))
    [message] = warnings(caplog)
    assert other.config.fingerprint in message and "retokenize()" in message


def test_nothing_is_said_of_its_own_tokenizer_or_where_there_is_none(
    stored, other, tokenizer, caplog, tmp_path
):
    stored(with_tokenizer=False).generate(PROMPT, candidate_generator=other, **GREEDY)
    own = rs.Datastore.build(["a text"], tokenizer, tmp_path / "store", progress=False)
    stored(with_tokenizer=True).generate(PROMPT, candidate_generator=own, **GREEDY)
    assert warnings(caplog) == []
