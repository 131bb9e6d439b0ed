"""The texts of tokens as they come are, put together, the text of all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.apps.shared.text_stream import TextStream


def pieces(tokenizer, ids) -> list[str]:
    stream = TextStream(tokenizer)
    return [*map(stream.put, ids), stream.end()]


@given(st.lists(st.integers(0, 258), max_size=40))
def test_tokens_that_are_no_text_come_out_as_the_tokenizer_has_them(tokenizer, ids):
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_character_comes_with_its_last_token(tokenizer):
    ids = tokenizer("a🙂", add_special_tokens=False)["input_ids"]
    assert pieces(tokenizer, ids) == ["a", "", "", "", "🙂", ""]
    assert pieces(tokenizer, ids[:-1]) == ["a", "", "", "", "\ufffd"]
