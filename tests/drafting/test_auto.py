"""A datastore that was made with another tokenizer is warned of, where a tokenizer tells it."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import hf_refspec as rs
from tests.helpers.calls import GREEDY, PROMPT


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> rs.Datastore:
    """A datastore with a smaller vocabulary than the model's."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "cat": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    folder = tmp_path_factory.mktemp("stores") / "words"
    return rs.Datastore.build(["the cat the cat"], words, folder, progress=False)


@pytest.fixture
def stored(byte_llama, tokenizer, tmp_path):
    """The model loaded from a folder, with or without its tokenizer."""

    def load(with_tokenizer: bool):
        byte_llama.save_pretrained(tmp_path / "model")
        if with_tokenizer:
            tokenizer.save_pretrained(tmp_path / "model")
        return AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    return load


def warnings(caplog) -> list[str]:
    return [each for each in caplog.messages if "was made for another tokenizer" in each]


@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.parametrize("given", [False, True], ids=["beside the model", "of the call"])
def test_it_is_warned_of_once_and_changes_no_id(stored, other, tokenizer, given, blended, caplog):
    model = stored(with_tokenizer=not given)
    options = {**GREEDY, **({"tokenizer": tokenizer} if given else {})}
    plain = model.generate(PROMPT, **options)
    drafter = rs.ReferenceCopy() | other if blended else other
    for _ in range(2):
        assert model.generate(PROMPT, candidate_generator=drafter, **options).equal(plain)
    [message] = warnings(caplog)
    assert other.config.fingerprint in message and "retokenize()" in message


def test_nothing_is_said_of_its_own_tokenizer_or_where_there_is_none(
    stored, other, tokenizer, caplog, tmp_path
):
    stored(with_tokenizer=False).generate(PROMPT, candidate_generator=other, **GREEDY)
    own = rs.Datastore.build(["a text"], tokenizer, tmp_path / "store", progress=False)
    stored(with_tokenizer=True).generate(PROMPT, candidate_generator=own, **GREEDY)
    assert warnings(caplog) == []
