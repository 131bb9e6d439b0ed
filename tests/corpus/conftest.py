from __future__ import annotations

import pytest

from hf_refspec.store.build.source import open_source


@pytest.fixture
def read(tokenizer):
    def read(source, **options):
        return list(open_source(source, tokenizer, 259, **options).documents)

    return read
