"""A real browser, for tests of pages. They are skipped without one."""

import contextlib
import shutil

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
#: Milliseconds that the browser has for each step.
PATIENCE = 60_000
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")


@contextlib.contextmanager
def opened_tab():
    """Give a tab of a real browser, and an empty list of the errors of its pages, which the
    test checks.
    """
    sync_api = pytest.importorskip("playwright.sync_api")
    sync_api.expect.set_options(timeout=PATIENCE)
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    complaints = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=arguments)
        tab = browser.new_page()
        tab.set_default_timeout(PATIENCE)
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        yield tab, complaints
        browser.close()
