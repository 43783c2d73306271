"""The files of the page, as they come over HTTP, and the policy that they come with."""

import pytest


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html"),
        ("/static/page.css", "text/css"),
        ("/static/page.js", "text/javascript"),
        ("/static/api.js", "text/javascript"),
    ],
)
def test_files_have_types_and_are_checked_again(server, path, kind):
    answer = server.ask("GET", path)
    headers = answer.headers
    assert headers["Content-Type"] == f"{kind}; charset=utf-8"
    assert headers["Cache-Control"] == "no-cache"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert b"http" not in answer.body.replace(b"http://www.w3.org/2000/svg", b"")
    again = server.ask("GET", path, headers={"If-None-Match": headers["ETag"]})
    assert (again.status, again.body, again.headers["ETag"]) == (304, b"", headers["ETag"])


@pytest.mark.parametrize("path", ["", "../webpage.py", "%2e%2e/webpage.py", "index.html.bak"])
def test_serves_nothing_else(server, path):
    assert server.ask("GET", f"/static/{path}").status == 404
