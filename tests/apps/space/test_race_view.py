"""What the page shows of a conversation."""

from __future__ import annotations

import re
from html import unescape

import pytest

from hf_refspec.apps.space.conversation import Conversation
from hf_refspec.apps.space.page import PRESETS, following
from hf_refspec.apps.space.views import conversation_html


def texts(html: str) -> list[str]:
    """The texts of the columns, without their colours."""
    found = re.findall(r'<div class="text">(.*?)</div>', html, re.S)
    return [unescape(re.sub(r"</?span[^>]*>", "", text)) for text in found]


def test_both_columns_show_their_texts_and_only_drafts_are_coloured(run):
    conversation = Conversation()
    first, race = run("one", conversation), run("abcabcabc", conversation)
    html = conversation_html(conversation)
    assert texts(html) == [first.drafted.text, race.plain.text, race.drafted.text]
    _, plain, drafted = html.split('<div class="lane ')[1:]
    assert '<span class="s' not in plain and '<span class="s0">' in drafted
    assert "The same text: all 40 tokens are equal." in html
    assert f"MAT {race.drafted.mat:.2f}" in html


def test_a_difference_and_a_stop_are_told(run, host):
    conversation = Conversation()
    race = run("abcabcabc", conversation)
    race.drafted.ids[7] += 1
    assert "The texts differ from token 8 on." in conversation_html(conversation)
    stopped = Conversation()
    for _ in stopped.ask(host, "abcabcabc", 40).run():
        stopped.stop()
    assert "Stopped; the first 0 tokens are equal." in conversation_html(stopped)


@pytest.mark.parametrize("text", ["<b>x</b>", "a & b", '"><script>x()</script>'])
def test_texts_are_shown_as_they_are_and_never_run(run, text):
    conversation = Conversation()
    run(text, conversation, max_new_tokens=4)
    html = conversation_html(conversation, text)
    assert text not in html and unescape(html).count(text) == 2


def test_a_preset_with_a_second_message_offers_it_after_the_first():
    offered = [following(message) for preset in PRESETS for message in preset.messages]
    later = [message for preset in PRESETS for message in preset.messages[1:]]
    assert [message for message in offered if message] == later
    assert following("nonsense") == ""
