import pytest

from hf_refspec.retrieval.knowledge_base import KnowledgeBase
from tests.helpers.texts import TEXTS, bag_of_words


@pytest.fixture(scope="session")
def base(tmp_path_factory, tokenizer) -> KnowledgeBase:
    """400 passages with their embeddings."""
    path = tmp_path_factory.mktemp("passages") / "base"
    return KnowledgeBase.build(TEXTS, tokenizer, bag_of_words, path)
