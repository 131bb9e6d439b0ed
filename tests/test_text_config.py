"""What a configuration says of the decoder, wherever it stands."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlavaConfig, MambaConfig, MptConfig, ProcessorMixin

import hf_refspec as rs
from hf_refspec.text_config import context_length, text_config
from tests.helpers.texts import bag_of_words

CONFIG = LlamaConfig(max_position_embeddings=20, vocab_size=7)


def test_a_model_and_its_configuration_name_the_same_decoder(llama):
    assert text_config(llama) == text_config(llama.config) == llama.config
    assert text_config(LlavaConfig(text_config=CONFIG)).vocab_size == 7


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (CONFIG, 20),
        (LlavaConfig(text_config=CONFIG), 20),
        (MptConfig(max_seq_len=30), 30),
        (MambaConfig(), None),
    ],
)
def test_the_context_is_as_long_as_the_configuration_says(config, length):
    assert context_length(config) == length


TEXTS = ["The moon pulls the sea.", "The sea follows the moon."]


class Processor(ProcessorMixin):
    """Reads images alone, as it is called."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)

    def __call__(self, images):
        raise ValueError(f"Incorrect image source. Got {images}")


@pytest.fixture(scope="module")
def processor(tokenizer):
    return Processor(tokenizer)


def source_texts(drafter):
    drafter.begin(np.arange(3), 300)
    return [(name, [ids.tolist() for ids in texts]) for name, texts in drafter.source_texts()]


def test_drafters_read_strings_by_its_tokenizer(processor, tokenizer, tmp_path):
    for taken in (processor, tokenizer):
        sessions = rs.SessionDrafts(taken, path=tmp_path / "sessions")
        sessions.add(*TEXTS)
    assert len(sessions) == 2 and len({*map(str, source_texts(sessions))}) == 1
    copies = [source_texts(rs.ReferenceCopy(TEXTS, taken)) for taken in (processor, tokenizer)]
    assert copies[0] == copies[1]


def test_a_grammar_is_of_its_tokens(processor, tokenizer):
    scores = torch.zeros(1, len(tokenizer))
    allowed = [
        rs.GrammarDrafts(taken, regex="[a-c]+").processor()(torch.tensor([[1]]), scores)
        for taken in (processor, tokenizer)
    ]
    assert torch.equal(*allowed)


def test_a_datastore_is_made_for_its_tokenizer(processor, tokenizer, tmp_path):
    store = rs.Datastore.build(TEXTS, processor, tmp_path / "store")
    store.add(["More."], processor)
    again = store.retokenize(processor, tmp_path / "again")
    assert store.config.tokenizer == type(tokenizer).__name__
    for taken in (processor, tokenizer):
        assert rs.Datastore.from_pretrained(again.path, tokenizer=taken).documents == 3


def test_a_knowledge_base_is_made_for_its_tokenizer(processor, tokenizer, tmp_path):
    rs.KnowledgeBase.build(TEXTS, processor, bag_of_words, tmp_path / "base")
    opened = rs.KnowledgeBase(tmp_path / "base", processor)
    assert opened.tokenizer is tokenizer and opened.text(1) == TEXTS[1]


def test_what_a_model_learned_is_stored_for_its_tokenizer(
    processor, tokenizer, byte_llama, tmp_path
):
    rs.TokenRecycling.build(TEXTS, processor, byte_llama).save_pretrained(tmp_path / "a")
    table = rs.TokenRecycling.from_pretrained(tmp_path / "a", processor)
    table.save_pretrained(tmp_path / "b", processor, byte_llama)
    assert len(rs.TokenRecycling.from_pretrained(tmp_path / "b", tokenizer)) == len(table)
    knn = rs.KnnDatastore.build(TEXTS, processor, byte_llama, tmp_path / "knn")
    assert knn.config.tokenizer == type(tokenizer).__name__


@pytest.mark.parametrize("retrieves", [False, True])
def test_a_call_takes_it(processor, tokenizer, byte_llama, retrieves, tmp_path, caplog):
    drafts = {"candidate_generator": rs.Datastore.build(TEXTS, tokenizer, tmp_path / "a")}
    if retrieves:
        base = rs.KnowledgeBase.build(TEXTS, tokenizer, None, tmp_path / "b")
        retriever = rs.SparseRetriever(base)
        drafts = {"custom_generate": rs.iterative_ralm, "retriever": retriever}
    ids = tokenizer("<s>The moon", return_tensors="pt")
    options = {"stop_strings": ["\n"], "max_new_tokens": 9, **drafts}
    outputs = [
        byte_llama.generate(**ids, tokenizer=taken, **options).tolist()
        for taken in (processor, tokenizer)
    ]
    assert outputs[0] == outputs[1] and "tokenizer" not in caplog.text
