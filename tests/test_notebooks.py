"""What a notebook shows of statistics, draft trees, stored folders and checks, and its bars."""

import pickle
import re
import sys
from functools import reduce
from html import unescape
from operator import or_

import pytest

import hf_refspec as rs
from hf_refspec.drafting.stats import SourceStats
from hf_refspec.model_check import ModelCheck
from hf_refspec.notebooks import COLORS, is_hidden


def test_statistics_are_a_table_with_the_sources_in_their_colours():
    stats = rs.DraftStats(sources=[SourceStats("One", 8, 3, 3), SourceStats("Two", 9, 1, 0)])
    stats.record_rows([(12, 3)])
    shown = stats._repr_html_()
    assert '<td style="text-align:left">4.00</td>' in shown  # MAT
    assert f'{COLORS[0]}">One</span>' in shown and f'{COLORS[1]}">Two</span>' in shown
    assert "8 drafted before merging, 3 accepted" in shown
    assert "12 drafted (of 17 before merging), 3 accepted" in str(stats)


@pytest.mark.parametrize("further", [[], [rs.TokenRecycling()]], ids=["alone", "a blend"])
def test_a_call_with_a_tokenizer_shows_its_text_in_the_colours_of_the_sources(
    byte_llama, tokenizer, further
):
    inputs = tokenizer("a <b> cat", return_tensors="pt")
    options = {"max_new_tokens": 40, "do_sample": False, "max_draft_tokens": 8}
    drafter = reduce(or_, further, rs.ReferenceCopy())
    ids = byte_llama.generate(**inputs, **options, candidate_generator=drafter)
    assert "<pre" not in drafter.stats._repr_html_()
    byte_llama.generate(**inputs, **options, candidate_generator=drafter, tokenizer=tokenizer)
    shown = drafter.stats._repr_html_().partition("<pre")[2].partition(">")[2]
    text = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert unescape(re.sub(r"<[^>]*>", "", shown)) == text.rstrip("\ufffd")
    assert shown.count("<span") > 1 and COLORS[0] in shown
    owners = drafter.stats.owners
    assert [owners.count(i) for i in (0, 1)][: len(drafter.sources)] == [
        source.first for source in drafter.stats.sources
    ]
    assert "<pre" not in pickle.loads(pickle.dumps(drafter.stats))._repr_html_()


def test_a_tree_is_indented_by_depth_and_each_path_stands_together():
    tree = rs.DraftTree.chain([5, 6, 7], [0.9, 0.5, 0.25])
    assert tree._repr_html_() == "<pre>root\n  5 90 %\n    6 50 %\n      7 25 %</pre>"
    assert len(rs.DraftTree.chain([1] * 3000)._repr_html_()) > 3000  # recurses nowhere


def test_a_folder_shows_its_texts_and_never_markup_of_strangers(tmp_path, tokenizer):
    about = {"corpus_name": "<b>mine</b>", "license": "mit"}
    store = rs.Datastore.build(["a text"], tokenizer, tmp_path / "store", **about)
    shown = store._repr_html_()
    assert "&lt;b&gt;mine&lt;/b&gt;" in shown and "<b>" not in shown
    assert "full form" in shown and str(store.path) in shown


def test_a_check_is_its_table():
    costs = {1: 1.0, 8: 1.5}
    check = ModelCheck("M", "float32", "cpu", "<", "tree", "tree", None, "active", 256, 0.1, costs)
    assert check._repr_html_().startswith("<pre>M, float32, cpu") and "&lt;" in check._repr_html_()


def test_bars_are_shown_in_notebooks_and_terminals_alone(monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert is_hidden(True) is None  # tqdm asks whether it writes to a terminal
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert is_hidden(True) is False and is_hidden(False)
