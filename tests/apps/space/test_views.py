"""What the page shows of a conversation, and of the draft tree of one forward pass."""

import re
from html import unescape
from itertools import combinations
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.apps.space.conversation import Conversation, RacePass
from hf_refspec.apps.space.page import EXAMPLES, following
from hf_refspec.apps.space.views import conversation_html, pass_html, tree_html
from hf_refspec.drafting.tree import DraftTree


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
    assert '<span class="s' not in plain and '<span class="s0"' in drafted
    assert "title=" not in plain
    title = 'title="prompt, document 0, from token '
    assert (title in drafted) == any(span.source == "prompt" for span in race.copied)
    assert "The same text: 40 tokens, all equal." in html
    assert f"MAT {race.drafted.mat:.2f}" in html


def test_a_speed_up_is_provisional_while_the_race_runs(host):
    conversation = Conversation()
    race = conversation.ask(host, "abcabcabc", 20)
    running = race.run()
    while not race.speedup:
        next(running)
    html = conversation_html(conversation)
    assert f"So far {race.speedup:.1f}x the speed" in html and "lanes running" in html
    for _ in running:
        pass
    html = conversation_html(conversation)
    assert f"equal. {race.speedup:.2f}x the speed" in html
    assert "So far" not in html and "running" not in html


def test_a_difference_and_a_stop_are_told(run, host):
    conversation = Conversation()
    race = run("abcabcabc", conversation)
    race.drafted.ids[7] += 1
    assert "The texts differ from token 8 on." in conversation_html(conversation)
    del race.drafted.ids[7:]  # as if it had ended there
    assert "The texts differ from token 8 on." in conversation_html(conversation)
    stopped = Conversation()
    for _ in stopped.ask(host, "abcabcabc", 40).run():
        stopped.stop()
    assert "Stopped; equal so far: 0 tokens." in conversation_html(stopped)


@pytest.mark.parametrize("text", ["<b>x</b>", "a & b", '"><script>x()</script>'])
def test_texts_are_shown_as_they_are_and_never_run(run, text):
    conversation = Conversation()
    run(text, conversation, max_new_tokens=4)
    html = conversation_html(conversation, text)
    assert text not in html and unescape(html).count(text) == 2


def test_a_preset_with_a_second_message_offers_it_after_the_first():
    offered = [following(message) for preset in EXAMPLES for message in preset.questions]
    later = [message for preset in EXAMPLES for message in preset.questions[1:]]
    assert [message for message in offered if message] == later
    assert following("nonsense") == ""


@st.composite
def steps(draw) -> RacePass:
    size = draw(st.integers(0, 12))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    tokens = [10 + node for node in range(size)]
    probs: list[float] = []
    for parent in parents:
        probs.append(draw(st.floats(0, 1)) * (probs[parent] if parent >= 0 else 1))
    path, node = [], draw(st.integers(-1, size - 1))
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    arrays = np.array(tokens, np.int64), np.array(parents, np.int32), np.array(probs, np.float32)
    tree = DraftTree(*arrays)
    return RacePass([*reversed(path), 9], [*(0 for _ in path), None], tree)


def drawn(step: RacePass, tokenizer) -> ElementTree.Element:
    return ElementTree.fromstring(tree_html(step, "x", ["ReferenceCopy"], tokenizer))


@given(step=steps())
def test_all_nodes_are_drawn_apart_from_each_other_and_the_path_is_straight(step, tokenizer):
    picture = drawn(step, tokenizer)
    boxes = []
    for group in picture.iter("g"):
        rect = group.find("rect")
        x, y, width, height = (float(rect.get(a)) for a in ("x", "y", "width", "height"))
        boxes.append((group.get("class").split()[0], x, y, x + width, y + height))
    kinds = [box[0] for box in boxes]
    assert kinds.count("root") == kinds.count("own") == 1
    assert kinds.count("accepted") == len(step.tokens) - 1
    assert kinds.count("rejected") == len(step.tree) - len(step.tokens) + 1
    for (_, x1, y1, x2, y2), (_, x3, y3, x4, y4) in combinations(boxes, 2):
        assert x2 <= x3 or x4 <= x1 or y2 <= y3 or y4 <= y1
    assert len({box[2] for box in boxes if box[0] != "rejected"}) == 1
    size = picture.find("svg")
    assert all(box[3] <= float(size.get("width")) for box in boxes)
    assert all(box[4] <= float(size.get("height")) for box in boxes)


def test_tokens_are_shown_as_text_with_visible_spaces(tokenizer):
    tokens = tokenizer("< \n\t\x1b&").input_ids
    step = RacePass([tokens[0], tokens[-1]], [0, None], DraftTree.chain(tokens[:-1]))
    texts = [text.text for text in drawn(step, tokenizer).iter("text") if text.text]
    assert texts == ["x", "<", "100", "&", "·", "100", "⏎", "100", "⇥", "100", "\ufffd", "100"]


def test_a_step_says_what_was_verified(tokenizer, run):
    race = run("abcabcabc")
    numbers = range(1, len(race.passes) + 1)
    htmls = [pass_html(i, race.passes, race.sources, tokenizer) for i in numbers]
    assert "the prompt is read" in htmls[0]
    verified = [int(n) for html in htmls for n in re.findall(r"(\d+) draft tokens? verified", html)]
    assert sum(verified) == sum(len(step.tree) for step in race.passes)
