"""Takes a picture of the page after an answer: python docs/figures/space.py OUT.png

It needs playwright, and Chromium: the system's, or the one of `playwright install chromium`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, sync_playwright

from hf_refspec.apps.space.page import load_host, page, start

SECONDS = 300  # for an answer
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium; playwright raises its own error if there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        # Its sandbox does not work for root, and the page shows nobody else's texts.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def run_preset(shown: Page, label: str) -> None:
    """Chooses a preset, and waits for the end of its race."""
    shown.get_by_role("button", name=f"▶ {label}:").click()
    shown.locator("#rs-tree svg").wait_for(state="hidden")
    shown.locator("#rs-tree svg").wait_for(timeout=1000 * SECONDS)


def main() -> None:
    """Serves the page with the default model, runs a preset, and writes the picture."""
    [out] = sys.argv[1:]
    blocks = page(load_host())
    address = start(blocks)
    with chromium() as browser:
        shown = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
        shown.goto(address)
        run_preset(shown, "RAG")
        shown.screenshot(path=out, full_page=True)
    blocks.close(verbose=False)


if __name__ == "__main__":
    main()
