"""The page in a real browser, with the trained default model."""

from __future__ import annotations

import copy
import runpy
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from hf_refspec.apps.shared.loading import load
from hf_refspec.apps.shared.prompts import assistant, chat_inputs, user, with_document
from hf_refspec.apps.space.conversation import Host
from hf_refspec.apps.space.presets import PRESETS

pytest.importorskip("gradio")
playwright = pytest.importorskip("playwright.sync_api")

from hf_refspec.apps.space.page import page, start  # noqa: E402

SCRIPT = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "figures" / "space.py"))
chromium, run_preset = SCRIPT["chromium"], SCRIPT["run_preset"]
SECONDS = 60_000  # in milliseconds, as playwright counts


@pytest.fixture(scope="module")
def smollm():
    return load(device_map="cpu")


@pytest.fixture(scope="module")
def address(smollm):
    blocks = page(Host(*smollm))
    yield start(blocks)
    blocks.close(verbose=False)


@pytest.fixture(scope="module")
def browser():
    try:
        with chromium() as started:
            yield started
    except playwright.Error as error:
        if "Executable doesn't exist" not in str(error):
            raise
        pytest.skip("there is no Chromium: playwright install chromium")


@pytest.fixture
def shown(address, browser):
    """The page, with few new tokens, and in `asked` the addresses that it asks for."""
    tab = browser.new_page()
    tab.set_default_timeout(SECONDS)
    tab.asked = []
    tab.on("request", lambda request: tab.asked.append(request.url))
    tab.goto(address)
    tab.get_by_role("button", name="Settings").click()
    tab.fill("#rs-new-tokens input[type=number]", "32")
    tab.locator("#rs-new-tokens input[type=number]").press("Tab")
    yield tab
    tab.close()


def send(shown, message: str) -> None:
    shown.fill("#rs-message textarea", message)
    shown.locator("#rs-message textarea").press("Enter")
    shown.get_by_text(message).nth(0).wait_for()
    shown.locator("#rs-tree svg").wait_for()


def columns(shown) -> tuple[str, str]:
    plain, drafted = (shown.locator(f".lane.{each} .text").last for each in ("plain", "drafted"))
    return plain.text_content(), drafted.text_content()


def answer(smollm, messages) -> str:
    """Plain generate()'s."""
    model, tokenizer = smollm
    inputs = chat_inputs(tokenizer, messages)
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_typed_message_is_raced_and_both_texts_are_plain_generates(shown, smollm):
    document, message = "The cat sat on the mat.", "Repeat this sentence three times."
    shown.fill("#rs-document textarea", document)
    send(shown, message)
    messages = [user(with_document(document, message))]
    first = answer(smollm, messages)
    assert columns(shown) == (first, first)
    assert shown.locator(".drafted .text span.s0").count() > 0  # coloured
    color = "element => getComputedStyle(element).borderBottomColor"
    assert shown.locator(".drafted .text span.s0").first.evaluate(color) == "rgb(0, 114, 178)"
    assert shown.locator(".plain .text span").count() == 0
    assert "The same text" in shown.locator(".verdict").inner_text()

    # A second question in the same conversation.
    shown.fill("#rs-message textarea", "Now in capitals.")
    shown.click("#rs-send")
    shown.locator(".message").nth(1).wait_for()
    shown.locator("#rs-tree svg").wait_for(state="hidden")
    shown.locator("#rs-tree svg").wait_for()
    second = answer(smollm, [*messages, assistant(first), user("Now in capitals.")])
    assert columns(shown) == (second, second)
    assert shown.locator("#rs-document textarea").is_disabled()


def test_rounding_is_told_where_the_promise_is_made(byte_llama, tokenizer):
    def promise(model) -> str:
        return str(page(Host(model, tokenizer)).get_config_file()["components"])

    assert "rounding" not in promise(byte_llama)
    rounded = copy.deepcopy(byte_llama).to(torch.bfloat16)
    assert "within the rounding of bfloat16" in promise(rounded)


def test_the_tree_of_any_step_can_be_looked_into(shown):
    run_preset(shown, "Edit")
    best = shown.locator(".step p").first.inner_text()
    assert "accepted" in best and shown.locator("#rs-tree g.accepted").count() > 0
    number = shown.locator("#rs-number input[type=number]")
    number.fill("1")
    number.press("Tab")
    shown.get_by_text("Forward pass 1 of").wait_for()
    assert "the prompt is read" in shown.locator(".step p").first.inner_text()
    assert shown.locator("#rs-tree g.accepted").count() == 0
    assert shown.locator("#rs-tree g.own").count() == 1


def test_a_preset_fills_in_its_texts_and_a_new_chat_clears_the_conversation(shown):
    run_preset(shown, "RAG")
    rag = PRESETS[0]
    assert shown.input_value("#rs-document textarea") == rag.document
    assert shown.locator(".message").all_inner_texts() == [rag.messages[0]]
    assert shown.input_value("#rs-message textarea") == rag.messages[1]  # is offered next
    shown.click("#rs-new")
    shown.get_by_text("Choose an example").wait_for()
    assert not shown.locator("#rs-document textarea").is_disabled()
    assert shown.locator("#rs-tree svg").is_hidden()


def test_errors_are_shown_on_the_page_and_the_message_stays(shown):
    shown.click("#rs-send")
    shown.get_by_role("alert").wait_for()
    assert "the message is empty" in shown.get_by_role("alert").inner_text()
    shown.fill("#rs-message textarea", "word " * 10_000)
    shown.click("#rs-send")
    shown.get_by_text("the message with its document has").wait_for()
    assert shown.input_value("#rs-message textarea").startswith("word word")
    assert shown.locator(".lane").count() == 0


def test_stop_ends_both_columns_and_a_preset_during_a_race_begins_anew(shown):
    shown.fill("#rs-message textarea", "Write a long story.")
    shown.click("#rs-send")
    shown.locator(".lane .text:not(:empty)").first.wait_for()
    shown.click("#rs-stop")
    shown.get_by_text("Stopped; the first").wait_for()
    shown.click("#rs-new")
    playwright.expect(shown.locator(".lane")).to_have_count(0)  # and the message is empty by then
    shown.fill("#rs-message textarea", "Write a long story.")
    _send_once_the_race_is_over(shown)
    shown.get_by_role("button", name="Edit", exact=True).click()
    shown.get_by_text("Choose an example").wait_for()
    assert shown.input_value("#rs-message textarea") == PRESETS[1].messages[0]
    assert shown.locator(".lane").count() == 0


def _send_once_the_race_is_over(page):
    """Gradio takes no click in the moment between the last picture of a race and its end."""
    for _ in range(12):
        page.click("#rs-send")
        with suppress(playwright.TimeoutError):
            page.locator(".lane .text:not(:empty)").first.wait_for(timeout=5000)
            return
    raise AssertionError("no race begins")


def test_a_second_visitor_waits_and_begins_when_the_first_one_leaves(shown, address, browser):
    first = browser.new_page()
    first.goto(address)
    first.fill("#rs-message textarea", "Write a long story.")
    first.click("#rs-send")
    first.locator(".lane .text:not(:empty)").first.wait_for()
    shown.fill("#rs-message textarea", "Hello")
    shown.click("#rs-send")
    shown.get_by_text("queue: 1/1").wait_for()
    assert shown.locator(".lane").count() == 0
    first.close()
    shown.locator(".lane .text:not(:empty)").first.wait_for()


def test_a_text_in_html_is_shown_and_never_run(shown):
    text = "<img src=x onerror=\"document.title='run'\"> ${1+1} {{1+1}} <b>bold</b>"
    send(shown, text)
    assert shown.locator(".message").inner_text() == text and shown.title() == "hf_refspec"
    assert shown.locator("#rs-chat img, #rs-chat b b").count() == 0


def test_nothing_is_wider_than_the_window_and_no_other_server_is_asked(shown, address):
    run_preset(shown, "Edit")
    picture = shown.locator("#rs-tree svg").bounding_box()
    assert picture["width"] > 400  # which is scrolled
    for width in (1280, 400):
        shown.set_viewport_size({"width": width, "height": 800})
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
        for each in ("chat", "message", "send", "stop", "new", "document", "tree"):
            box = shown.locator(f"#rs-{each}").bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width
    allowed = (address, "data:", "blob:")
    assert shown.asked and all(url.startswith(allowed) for url in shown.asked)
