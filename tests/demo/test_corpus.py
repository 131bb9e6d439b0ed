"""The demo's text: held-out files and edits are the same on every machine."""

from __future__ import annotations

import ast

import pytest

from hf_refspec.demo import corpus


def test_a_tenth_of_the_library_is_held_out():
    training, heldout = set(corpus.training_files()), set(corpus.heldout_files())
    assert not training & heldout
    assert training | heldout == set(corpus.library_files())
    assert 0.05 < len(heldout) / len(training | heldout) < 0.15


def test_blocks_of_a_module_join_to_the_module():
    source = "import os\n\n\ndef f(x):\n    return x\n\n\nclass A:\n    pass\n"
    blocks = corpus.top_level_blocks(source)
    assert "".join(blocks) == source
    assert len(blocks) == 3
    assert corpus.top_level_blocks("def broken(:\n") == []


def test_a_rename_touches_whole_words_only():
    piece = "def size(n):\n    sized = n\n    return size(n) + sized\n"
    assert corpus.renamable_identifiers(piece) == ["n", "size", "sized"]
    renamed = corpus.rename(piece, "size", "width")
    assert renamed == "def width(n):\n    sized = n\n    return width(n) + sized\n"
    assert corpus.rename_prompt(piece, "size", "width").endswith("# Edit: rename size to width\n")


@pytest.mark.parametrize("path", corpus.heldout_files()[:10], ids=lambda path: path.name)
def test_blocks_of_library_files_parse(path):
    for block in corpus.top_level_blocks(corpus.read_source(path)):
        ast.parse(block)
