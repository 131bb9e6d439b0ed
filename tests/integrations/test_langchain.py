"""LangChain's HuggingFacePipeline."""

import pytest
from transformers import pipeline

pytest.importorskip("langchain_core", reason="the extra `integrations` is not installed")

from langchain_community.llms import HuggingFacePipeline
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate

OPTIONS = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}


@pytest.fixture(scope="module")
def llm(trained_model, trained_tokenizer):
    given = {"model": trained_model, "tokenizer": trained_tokenizer, "device": "cpu"}
    generator = pipeline("text-generation", **given, **OPTIONS)
    return HuggingFacePipeline(pipeline=generator, batch_size=2)


def test_invoke_and_batch(llm, prompts, drafted_as_plain):
    one = drafted_as_plain(lambda: llm.invoke(prompts[0]))
    texts = drafted_as_plain(lambda: llm.batch(prompts))  # two rows, and one
    assert texts[0] == one


def test_a_stream_and_its_stop(llm, prompts, drafted_as_plain):
    options = {"max_new_tokens": 12, "do_sample": False}

    def streamed(**stop) -> list[str]:
        return list(llm.stream(prompts[0], pipeline_kwargs=options, **stop))

    parts = drafted_as_plain(streamed)
    assert len(parts) > 1
    word = "".join(parts).split()[6]
    stopped = drafted_as_plain(lambda: streamed(stop=[f"Ġ{word}"]))
    assert "".join(parts).startswith("".join(stopped).rstrip())
    assert len("".join(stopped)) < len("".join(parts))


def test_a_chain(llm, prompts, drafted_as_plain):
    chain = PromptTemplate.from_template("{text}") | llm | StrOutputParser()
    assert drafted_as_plain(lambda: chain.invoke({"text": prompts[1]}))
