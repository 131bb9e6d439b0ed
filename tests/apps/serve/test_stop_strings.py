"""A text comes out up to its first stop string, however it is cut into pieces."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from hf_refspec.apps.serve.generation import StopStrings

TEXTS = st.text("ab", max_size=20)
STRINGS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


@given(TEXTS, STRINGS)
@example("aab", ["ab"])
@example("abab", ["abb", "b"])
def test_a_text_that_comes_letter_by_letter(text, strings):
    stop, passed = StopStrings(strings), ""
    for length, letter in enumerate(text, 1):
        passed += stop.put(letter)
        ended = [each for each in strings if text[:length].endswith(each)]
        assert stop.found == bool(ended)
        if ended:
            assert passed == text[: length - max(map(len, ended))]
            return
        held = len(text[:length]) - len(passed)
        assert text.startswith(passed)
        if held:  # only what may begin one
            assert any(each.startswith(text[length - held : length]) for each in strings)
    assert passed + stop.end() == text


@given(TEXTS, STRINGS)
def test_a_text_that_comes_at_once(text, strings):
    stop = StopStrings(strings)
    passed = stop.put(text)
    places = [text.find(each) for each in strings if each in text]
    assert stop.found == bool(places)
    assert (passed if places else passed + stop.end()) == (text[: min(places)] if places else text)
