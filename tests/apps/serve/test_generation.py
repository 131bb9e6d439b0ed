"""A text ends before its first stop string, however it is cut into pieces."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from hf_refspec.apps.serve.generation import StopStrings

PIECES = st.lists(st.text("ab", min_size=1, max_size=3), max_size=12)
STRINGS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


@given(PIECES, STRINGS)
@example(["a", "a", "b"], ["ab"])
@example(["a", "b", "ab"], ["abb", "b"])
def test_the_text_before_the_first_stop_string_is_passed_on_as_soon_as_it_is_known(pieces, strings):
    stop, passed, text = StopStrings(strings), "", ""
    for piece in pieces:
        passed, text = passed + stop.put(piece), text + piece
        places = [text.find(each) for each in strings if each in text]
        assert stop.found == bool(places)
        if places:
            assert passed == text[: min(places)]
            return
        held = text[len(passed) :]
        assert text == passed + held
        assert not held or any(each.startswith(held) for each in strings)
    assert passed + stop.end() == text
