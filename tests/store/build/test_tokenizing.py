"""Documents become tokens."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from hf_refspec.store.build import tokenizing
from hf_refspec.store.build.tokenizing import encode, load_tokenizer


def test_a_long_text_is_cut_at_line_ends(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizing, "_LONGEST_PIECE", 8)
    text = "one\ntwo\nthree-four-five-six\n\nseven\n"
    pieces = list(tokenizing._pieces(text))
    assert "".join(pieces) == text and max(map(len, pieces)) <= 8
    assert pieces[0] == "one\ntwo\n"
    backend = load_tokenizer(tokenizer.backend_tokenizer.to_str())
    lengths, tokens = encode(backend, ["", text], np.dtype(np.uint16), 65535)
    assert lengths.tolist() == [0, len(text) + 1]
    assert tokenizer.decode(tokens[:-1]) == text and tokens[-1] == 65535


def test_the_tokenizers_own_truncation_and_special_tokens_do_not_count(tokenizer):
    content = tokenizer.backend_tokenizer
    content.enable_truncation(4)
    content.enable_padding(length=9)
    try:
        backend = load_tokenizer(content.to_str())
    finally:
        content.no_truncation()
        content.no_padding()
    lengths, _ = encode(backend, ["eight chars", "a"], np.dtype(np.uint16), 65535)
    assert lengths.tolist() == [12, 2]


def test_datasets_and_torch_are_imported_only_by_those_who_use_them():
    # As the processes that tokenise run it.
    program = (
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='tokenizing'); "
        "assert not {'datasets', 'torch', 'transformers'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, tokenizing.__file__], check=True)
