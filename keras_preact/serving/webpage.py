"""The page at `/`, where a person drops images and sees their classes.

Its files lie in `static/`, are read once and served from memory. The page loads nothing
from anywhere else, and its Content Security Policy holds the browser to that. A class
or a file name that looks like HTML stays text; if not, it would not run.
"""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_STATIC = Path(__file__).with_name("static")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' blob: data:",  # previews of the images, and the page's own icon
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
_HEADERS = {
    "Content-Security-Policy": "; ".join(
        f"{directive} {sources}" for directive, sources in _POLICY.items()
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # kept, but asked about each time: a new server's page is seen at once
    "Cache-Control": "no-cache",
}


def _route(path: str, file: Path) -> Route:
    """Return the route that serves a file, or 304 to a browser that has it."""
    content = file.read_bytes()
    headers = _HEADERS | {"ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def serve(request: Request) -> Response:
        if headers["ETag"] in request.headers.get("If-None-Match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=_TYPES[file.suffix], headers=headers)

    return Route(path, serve, name=file.name)


#: The page at `/` and what it loads, at `/static/...`. None of it is secret: they are served
#: without a token.
routes = [
    _route("/", _STATIC / "index.html"),
    *(
        _route(f"/static/{file.name}", file)
        for file in sorted(_STATIC.iterdir())
        if file.suffix in (".css", ".js")
    ),
]
