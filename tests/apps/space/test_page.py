"""The page in a real browser, with the trained default model; its looks and further controls in
`scripts/test --nightly`."""

import copy
import http.client
import runpy
import sys
import urllib.error
import urllib.request
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from hf_refspec.apps.shared.prompts import chat_inputs, user, with_document
from hf_refspec.apps.space.conversation import Conversation, Host
from hf_refspec.store.files import DatastoreError

pytest.importorskip("gradio")
playwright = pytest.importorskip("playwright.sync_api")

from hf_refspec.apps.space.page import EXAMPLES, _race, page, start  # noqa: E402

SCRIPT = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "figures" / "space.py"))
chromium, run_preset = SCRIPT["chromium"], SCRIPT["run_preset"]
NEW_TOKENS = 16  # of most answers
SECONDS = 600_000  # in milliseconds, as playwright counts


@pytest.fixture(scope="module")
def address(loaded):
    blocks = page(Host(*loaded))
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
    set_new_tokens(tab, NEW_TOKENS)
    yield tab
    tab.close()


def set_new_tokens(tab, number: int) -> None:
    if not tab.locator("#rs-new-tokens").is_visible():
        tab.get_by_role("button", name="Settings").click()
    tab.fill("#rs-new-tokens input[type=number]", str(number))
    tab.locator("#rs-new-tokens input[type=number]").press("Tab")


def send(shown, message: str) -> None:
    shown.fill("#rs-message textarea", message)
    shown.locator("#rs-message textarea").press("Enter")
    shown.get_by_text(message).nth(0).wait_for()
    shown.locator("#rs-tree svg").wait_for()


def columns(shown) -> tuple[str, str]:
    plain, drafted = (shown.locator(f".lane.{each} .text").last for each in ("plain", "drafted"))
    return plain.text_content(), drafted.text_content()


def answer(loaded, messages) -> str:
    """Plain generate()'s."""
    model, tokenizer = loaded
    inputs = chat_inputs(tokenizer, messages)
    output = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_typed_message_is_raced_and_both_texts_are_plain_generates(shown, loaded):
    document, message = "The cat sat on the mat.", "Repeat this sentence three times."
    shown.fill("#rs-document textarea", document)
    send(shown, message)
    messages = [user(with_document(document, message))]
    expected = answer(loaded, messages)
    assert columns(shown) == (expected, expected)
    assert shown.locator("#rs-document textarea").is_disabled()
    assert shown.locator(".drafted .text span.s0").count() > 0  # coloured
    color = "element => getComputedStyle(element).borderBottomColor"
    assert shown.locator(".drafted .text span.s0").first.evaluate(color) == "rgb(0, 114, 178)"
    assert shown.locator(".plain .text span[class]").count() == 0
    assert "The same text" in shown.locator(".verdict").inner_text()


def test_the_introduction_tells_of_rounding_and_links_the_documentation(byte_llama, tokenizer):
    def promise(model) -> str:
        return str(page(Host(model, tokenizer, name="org/bytes")).get_config_file()["components"])

    assert "org/bytes" in promise(byte_llama) and "rounding" not in promise(byte_llama)
    assert "docs/index.md" in promise(byte_llama)  # where setup.py says it is
    rounded = copy.deepcopy(byte_llama).to(torch.bfloat16)
    assert "within the rounding of bfloat16" in promise(rounded)


@pytest.mark.nightly
def test_the_message_box_is_in_sight_on_a_phone(shown):
    shown.set_viewport_size({"width": 390, "height": 844})
    for preset in (None, "Edit"):
        if preset is not None:
            run_preset(shown, preset)
        shown.evaluate("scrollTo(0, 0)")
        for each in ("message", "send"):
            box = shown.locator(f"#rs-{each}").bounding_box()
            assert box["y"] >= 0 and box["y"] + box["height"] <= 844


@pytest.mark.nightly
def test_a_race_on_a_phone_is_in_sight_with_the_ends_of_both_columns(shown):
    shown.set_viewport_size({"width": 390, "height": 844})
    set_new_tokens(shown, 512)  # it lasts until it is stopped
    shown.get_by_role("button", name="▶ Code:").click()
    shown.wait_for_function("""() => {
        const texts = [...document.querySelectorAll(".running .text")];
        return texts.length == 2 && texts.every(text => text.innerText.length > 9);
    }""")
    boxes = """() => [...document.querySelectorAll(".running .lane")].map(
        lane => [lane.getBoundingClientRect().top, lane.getBoundingClientRect().bottom])"""
    above = shown.locator("#rs-ask").bounding_box()["y"]
    plain, drafted = shown.evaluate(boxes)
    assert 0 <= plain[0] < plain[1] <= drafted[0] < drafted[1] <= above
    shown.click("#rs-stop")


def test_examples_are_offered_and_a_visitor_begins_without_a_document(shown):
    assert shown.input_value("#rs-document textarea") == ""
    assert shown.input_value("#rs-message textarea") == ""
    labels = shown.locator("#rs-presets button").all_inner_texts()
    assert labels == [f"▶ {example.name}: {example.title}" for example in EXAMPLES]


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_preset_starts_its_race_and_a_new_chat_clears_the_conversation(shown):
    run_preset(shown, "RAG")
    rag = EXAMPLES[0]
    assert shown.input_value("#rs-document textarea") == rag.document
    assert shown.locator(".message").all_inner_texts() == [rag.questions[0]]
    assert shown.input_value("#rs-message textarea") == rag.questions[1]  # is offered next
    shown.click("#rs-new")
    shown.get_by_text("Choose an example").wait_for()
    assert not shown.locator("#rs-document textarea").is_disabled()
    assert shown.input_value("#rs-document textarea") == ""  # it belongs to its example
    assert shown.locator("#rs-tree svg").is_hidden()


@pytest.mark.nightly
def test_a_visitors_own_document_stays_in_a_new_chat(shown):
    shown.fill("#rs-document textarea", "The cat sat on the mat.")
    send(shown, "Repeat this sentence.")
    shown.click("#rs-new")
    shown.get_by_text("Choose an example").wait_for()
    assert shown.input_value("#rs-document textarea") == "The cat sat on the mat."


def test_stop_ends_both_columns_and_a_preset_during_a_race_begins_anew(shown):
    stop = playwright.expect(shown.locator("#rs-stop"))
    stop.to_be_disabled()
    shown.fill("#rs-message textarea", "Write a long story.")
    shown.click("#rs-send")
    shown.locator(".lane .text:not(:empty)").first.wait_for()
    stop.to_be_enabled()
    shown.click("#rs-stop")
    shown.get_by_text("Stopped; equal so far").wait_for()
    stop.to_be_disabled()
    shown.click("#rs-new")
    playwright.expect(shown.locator(".lane")).to_have_count(0)  # and the message is empty by then
    shown.fill("#rs-message textarea", "Write a long story.")
    _send_once_the_race_is_over(shown)
    run_preset(shown, "Edit")
    assert shown.locator(".message").all_inner_texts() == [EXAMPLES[1].questions[0]]
    stop.to_be_disabled()


def _send_once_the_race_is_over(page):
    """Gradio takes no click in the moment between the last picture of a race and its end."""
    for _ in range(120):
        page.click("#rs-send")
        with suppress(playwright.TimeoutError):
            page.locator(".lane .text:not(:empty)").first.wait_for(timeout=5000)
            return
    raise AssertionError("no race begins")


def test_a_second_visitor_waits_and_begins_when_the_first_one_leaves(shown, address, browser):
    first = browser.new_page()
    first.goto(address)
    set_new_tokens(first, 512)
    first.fill("#rs-message textarea", "Write a long story.")
    first.click("#rs-send")
    first.locator(".lane .text:not(:empty)").first.wait_for()
    shown.fill("#rs-message textarea", "Hello")
    shown.click("#rs-send")
    shown.get_by_text("queue: ").wait_for()
    assert shown.locator(".lane .text").all_inner_texts() == []
    first.close()
    shown.locator(".lane .text:not(:empty)").first.wait_for()


def test_a_text_in_html_is_shown_and_never_run(shown):
    text = "<img src=x onerror=\"document.title='run'\"> ${1+1} {{1+1}} <b>bold</b>"
    send(shown, text)
    assert shown.locator(".message").inner_text() == text and shown.title() == "hf_refspec"
    assert shown.locator("#rs-chat img, #rs-chat b b").count() == 0


@pytest.mark.nightly
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
        for each in shown.locator(".figures, button:visible").all():  # nothing is cut off
            assert each.evaluate("element => element.scrollWidth <= element.clientWidth")
    allowed = (address, "data:", "blob:")
    assert shown.asked and all(url.startswith(allowed) for url in shown.asked)


def test_nothing_tells_a_path_of_this_machine(address, tmp_path, host, monkeypatch):
    paths = [sys.prefix, str(Path.home()), str(Path.cwd()), str(tmp_path.parents[1])]
    for part in ("", "config", "gradio_api/info"):
        with urllib.request.urlopen(address + part) as answer:
            text = answer.read().decode()
        assert [path for path in paths if path in text] == []

    def fail(*_):
        raise DatastoreError(f"{tmp_path} is damaged")

    monkeypatch.setattr(Conversation, "ask", fail)
    (told,) = _race(host, None, "", "abc", 8)
    assert "The datastore cannot be read" in told[1] and str(tmp_path) not in told[1]


def test_nobody_can_upload_a_file(address):
    body = (
        b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\nb\r\n--x--\r\n'
    )
    upload = urllib.request.Request(
        f"{address}gradio_api/upload", body, {"Content-Type": "multipart/form-data; boundary=x"}
    )
    with pytest.raises(urllib.error.HTTPError, match="413"):
        urllib.request.urlopen(upload)


def test_of_a_request_no_more_than_a_megabyte_is_read(address):
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=600)
    connection.putrequest("POST", "/gradio_api/queue/join")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", "30000000")
    connection.endheaders(b'{"data": ["'.ljust((1 << 20) + 1, b"x"))
    with closing(connection):
        assert connection.getresponse().status == 413
