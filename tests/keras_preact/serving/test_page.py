"""The page at `/`: its files as they come over HTTP, and once in a real browser; and a page of
another site that uses the server as the documentation says.
"""

import base64
import re

import pytest

from tests import browser
from tests.keras_preact.serving import fakes
from tests.keras_preact.serving.server_process import NAME, encoded
from tests.training.calls import ROOT

EVIL = "<img src=x onerror=document.title='broken'>.png"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html"),
        ("/static/page.css", "text/css"),
        ("/static/page.js", "(text|application)/javascript"),
    ],
)
def test_files_come_with_a_policy_and_are_checked_again(server, path, kind):
    answer = server.ask("GET", path)
    headers = answer.headers
    assert re.match(kind, headers["Content-Type"])
    assert headers["Cache-Control"] == "no-cache"
    assert headers["X-Content-Type-Options"] == "nosniff"
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert b"http" not in answer.body.replace(b"http://www.w3.org/2000/svg", b"")
    for sent in ("junk", "bytes=0-1", "bytes=9-1"):
        whole = server.ask("GET", path, headers={"Range": sent})
        assert (whole.status, whole.body) == (200, answer.body)
    again = server.ask("GET", path, headers={"If-None-Match": headers["ETag"]})
    assert (again.status, again.body, again.headers["ETag"]) == (304, b"", headers["ETag"])


@pytest.mark.soak
@browser.needed
def test_shows_in_a_browser_what_the_model_answers(directory, saved_model):
    sync_api = pytest.importorskip("playwright.sync_api")
    file = encoded(1)
    with (
        fakes.serving(directory, token="a-token", max_body_bytes=500_000) as server,
        browser.opened_tab() as (tab, complaints),
    ):
        tab.goto(f"http://127.0.0.1:{server.port}/")
        field = tab.get_by_label("The server asks for a token")
        field.fill("a-token")
        field.press("Enter")
        sync_api.expect(tab.locator("#about")).to_contain_text("version 1")
        files = [
            {"name": EVIL, "mimeType": "image/png", "buffer": file},
            {"name": "long.png", "mimeType": "image/png", "buffer": bytes(600_000)},
        ]
        tab.set_input_files("#files", files)
        card, too_large = (tab.locator(".card").nth(i) for i in range(2))
        sync_api.expect(card).to_have_attribute("data-state", "answered")
        names, scores = saved_model.classes(file)
        assert card.locator(".name").all_text_contents() == names
        shown = [float(text.strip("<\xa0%")) for text in card.locator(".score").all_text_contents()]
        assert shown == pytest.approx([100 * score for score in scores], abs=0.1)
        sync_api.expect(card.locator("h3")).to_have_text(EVIL)
        sync_api.expect(too_large.locator(".what")).to_contain_text("larger than the server takes")
        assert tab.title() == "Classify images"
    assert complaints == []


@pytest.mark.soak
@browser.needed
def test_a_page_of_an_allowed_origin_classifies_a_file(directory, saved_model):
    """With the code of the documentation."""
    [code] = re.findall(r"```js\n(.*?)```", (ROOT / "docs/howto/serving.md").read_text(), re.S)
    file, answers = encoded(1), []
    with fakes.serving() as shop, browser.opened_tab() as (tab, _):
        origin = f"http://localhost:{shop.port}"
        tab.goto(f"{origin}/v2")  # unlike the page, its answers have no policy
        for allowed in (origin, "https://other.example"):
            with fakes.serving(directory, token="a-token", allowed_origins=allowed) as server:
                address = f"127.0.0.1:{server.port}/v1/models/{NAME}:"
                used = code.replace("127.0.0.1:8501/v1/models/digits:", address)
                answers += tab.evaluate(
                    f"""async ([bytes, token]) => {{
                        const file = await (await fetch("data:image/png;base64," + bytes)).blob();
                        try {{ {used} return [answer]; }} catch (error) {{ return [error.name]; }}
                    }}""",
                    [base64.b64encode(file).decode(), "a-token"],
                )
    [answer, refusal] = answers
    [[*pairs]] = answer["results"]
    names, scores = saved_model.classes(file)
    assert [name for name, _ in pairs] == names
    assert [score for _, score in pairs] == pytest.approx(scores, rel=1e-4)
    assert refusal == "TypeError"
