"""An answer is printed as it comes, and each token has the colour of its source."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec import DraftTree, ReferenceCopy
from hf_refspec.apps.shared.streams import AnswerStream, LiveDrafts, Terminal, TextStream, legend
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.contract import Call, Observation, PathDrafter

# What a model may write: all but the control characters that are replaced.
TEXTS = st.text(
    st.characters(exclude_categories=["Cc", "Cs"], include_characters="\n\t"), max_size=60
) | st.text("ab \n", max_size=60)


def streamed(tokenizer, text, cuts=(), owner=None, **console):
    """What is printed of a text whose tokens come in steps that end at `cuts`."""
    printed = io.StringIO()
    stream = AnswerStream(Terminal(file=printed, **console), tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ends = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)})
    for begin, end in zip([0, *ends], ends, strict=False):
        stream.put(ids[begin:end], [owner] * (end - begin))
    stream.end()
    return printed.getvalue()


@given(TEXTS, st.lists(st.integers(0, 100), max_size=5))
def test_every_text_comes_out_as_it_is_however_it_is_cut(tokenizer, text, cuts):
    assert streamed(tokenizer, text, cuts) == text + "\n"


def test_code_stays_as_it_is_on_a_terminal_and_lines_of_a_picture_end_between_words(tokenizer):
    code = "def f():\n\n    return 1\n\tx"
    options = {"force_terminal": True, "color_system": None, "width": 20}
    assert streamed(tokenizer, code, **options) == code.expandtabs(8) + "\n"
    drawn = streamed(tokenizer, "the cat sat on the mat " * 2, record=True, **options)
    assert drawn == "the cat sat on the \nmat the cat sat on \nthe mat \n"


def test_control_characters_are_shown_and_not_obeyed(tokenizer):
    assert streamed(tokenizer, "a\x1b[31mb\x07") == "a\ufffd[31mb\ufffd\n"


@pytest.mark.parametrize(("owner", "color"), [(None, ""), (0, "\x1b[32m"), (1, "\x1b[36m")])
def test_drafted_words_have_the_colour_of_their_source(tokenizer, owner, color):
    printed = streamed(
        tokenizer, "cat", owner=owner, force_terminal=True, color_system="standard", width=40
    )
    assert printed.count(f"{color}c") == 1 and ("\x1b[" in printed) == bool(color)


def test_each_token_is_told_once_with_the_source_that_counts_it(byte_llama):
    heard: list[tuple[int, int | None]] = []
    reference = byte_llama.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=40, do_sample=False)
    drafter = LiveDrafts([ReferenceCopy(), ReferenceCopy(reference[0], include_prompt=False)])
    with drafter.heard_by(lambda *heard_now: heard.extend(zip(*heard_now, strict=True))):
        output = byte_llama.generate(
            torch.tensor([[5, 6, 7]]),
            max_new_tokens=40,
            do_sample=False,
            candidate_generator=drafter,
            max_draft_tokens=8,
        )
    assert [token for token, _ in heard] == output[0, 3:].tolist() == reference[0, 3:].tolist()
    owners = [owner for _, owner in heard]
    firsts = [source.first for source in drafter.stats.sources]
    assert [owners.count(0), owners.count(1)] == firsts
    assert min(firsts) > 0 and sum(firsts) == drafter.stats.accepted
    named = legend(drafter.stats).plain
    assert named.count("ReferenceCopy") == 2
    assert named.endswith(f"the model itself {len(heard) - sum(firsts)}")


class After(PathDrafter):
    """Drafts one token after a path of this length, and none elsewhere."""

    def __init__(self, length, token, costly=False):
        self.length = length
        self.token = token
        self.costly = costly

    def continue_path(self, path, budget, call):
        return DraftTree.chain([self.token] if len(path) == self.length else [], None)


def test_each_token_has_the_source_of_its_place():
    """The first source drafts what follows the second's token."""
    heard = []
    drafter = LiveDrafts([After(1, 5), After(0, 4, costly=True)])
    hears = drafter.heard_by(lambda *heard_now: heard.append(heard_now))
    with hears, drafter_call(drafter, [np.array([1, 2, 3])], 10):
        drafter.draft(8, Call())
        drafter.observe(Observation(np.array([4, 5, 6])))
    assert heard == [([4, 5, 6], [1, 0, None])]


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
