"""The files of the page, as they come over HTTP, and the policy that they come with."""

import urllib.request
from urllib.error import HTTPError

import pytest

pytest.importorskip("playwright.sync_api")
from tests.keras_preact.serving.page_api import Api, chromium, needs_browser, opened, serving


@pytest.fixture(scope="module")
def address():
    with serving(Api().app) as address:
        yield address


@needs_browser
def test_the_policy_holds_the_browser(address):
    with chromium() as browser:
        tab = opened(browser.new_page(), address)
        tab.evaluate(
            "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = "
            "1\">')"
        )
        tab.evaluate("""() => {
            const script = document.createElement("script");
            script.textContent = "window.ran = 1";
            document.body.append(script);
        }""")
        with serving(Api().app) as other:
            assert (
                tab.evaluate("url => fetch(url, {mode: 'no-cors'}).catch(String)", other)
                == "TypeError: Failed to fetch"
            )
        assert tab.evaluate("window.ran === undefined")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("", "text/html"),
        ("static/page.css", "text/css"),
        ("static/page.js", "text/javascript"),
        ("static/api.js", "text/javascript"),
    ],
)
def test_files_have_types_and_are_checked_again(address, path, kind):
    with urllib.request.urlopen(address + path) as response:
        body, headers = response.read(), response.headers
    assert headers["Content-Type"] == f"{kind}; charset=utf-8"
    assert headers["Cache-Control"] == "no-cache"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert b"http" not in body.replace(b"http://www.w3.org/2000/svg", b"")
    request = urllib.request.Request(address + path, headers={"If-None-Match": headers["ETag"]})
    with pytest.raises(HTTPError) as error:
        urllib.request.urlopen(request)
    with error.value as response:
        assert (response.code, response.read(), response.headers["ETag"]) == (
            304,
            b"",
            headers["ETag"],
        )


@pytest.mark.parametrize(
    "path", ["static/", "static/../page.py", "static/%2e%2e/page.py", "static/index.html.bak"]
)
def test_serves_nothing_else(address, path):
    with pytest.raises(HTTPError) as error:
        urllib.request.urlopen(address + path)
    with error.value as response:
        assert response.code == 404
