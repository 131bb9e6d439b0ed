import pytest

from hf_refspec.corpus.documents import open_source


@pytest.fixture
def read(tokenizer):
    def read(source, **options):
        return list(open_source(source, tokenizer, **options).documents)

    return read
