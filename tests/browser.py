"""A real browser."""

import contextlib
import shutil
from collections.abc import Iterator

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needed = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")
#: Milliseconds that the browser has for each step.
PATIENCE = 60_000


@contextlib.contextmanager
def opened_tab(**options) -> Iterator[tuple]:
    """Give a tab with these options of Playwright, and a list of the errors of its pages,
    which the test checks.
    """
    sync_api = pytest.importorskip("playwright.sync_api")
    sync_api.expect.set_options(timeout=PATIENCE)
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    complaints: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=arguments)
        tab = browser.new_page(**options)
        tab.set_default_timeout(PATIENCE)
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        yield tab, complaints
        browser.close()
