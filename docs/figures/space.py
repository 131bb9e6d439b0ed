"""Takes a picture of the page after an answer: `screenshot OUT.png`.

It needs playwright, and Chromium: the system's, or the one of `playwright install chromium`.
"""

from __future__ import annotations

import shutil
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from .app import load_host
from .page import page, start

_SECONDS = 300  # that an answer may take
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium.

    Raises:
        playwright.sync_api.Error: If there is none.
    """
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    with sync_playwright() as playwright:
        # Its sandbox does not work for root, and the page shows nobody else's texts.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def run_preset(shown: Page, label: str) -> None:
    """Fills in a preset, sends it, and waits for the end of the race."""
    shown.get_by_role("button", name=label, exact=True).click()
    shown.wait_for_function("document.querySelector('#rs-message textarea').value")
    shown.click("#rs-send")
    shown.locator("#rs-tree svg").wait_for(timeout=1000 * _SECONDS)


def main() -> None:
    """Serves the page with the default model, runs a preset, and writes the picture."""
    parser = ArgumentParser(prog="python -m hf_refspec.apps.space.screenshot", description=__doc__)
    parser.add_argument("out", type=Path, help="the picture, a PNG file")
    parser.add_argument("--width", type=int, default=1280, help="of the window, in pixels")
    parser.add_argument("--preset", default="RAG", help="the label of its button")
    parser.add_argument("--dark", action="store_true", help="in the dark mode")
    args = parser.parse_args()
    blocks = page(load_host())
    _, address, _ = start(blocks)
    with chromium() as browser:
        shown = browser.new_page(
            viewport={"width": args.width, "height": 800},
            color_scheme="dark" if args.dark else "light",
        )
        shown.goto(address)
        run_preset(shown, args.preset)
        shown.screenshot(path=args.out, full_page=True)
    blocks.close(verbose=False)


if __name__ == "__main__":
    main()
