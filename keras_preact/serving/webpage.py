"""The page at `/`, where a person drops images and sees their classes.

Its files are in `static/`. The page loads nothing from anywhere else, and its Content
Security Policy makes the browser enforce this. Names of classes and files that look
like HTML are shown as text. Even if they were not, the policy would stop their scripts.
"""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' blob: data:; "  # previews of the images, and the page's own icon
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Browsers keep the files but ask each time: a new server's page appears at once.
    "Cache-Control": "no-cache",
    "Accept-Ranges": "none",
}
_FILES = StaticFiles(directory=Path(__file__).with_name("static"))


async def page(request: Request) -> Response:
    """The page, or a file that it loads; 304 if the browser has it already."""
    file = request.path_params.get("file", "index.html")
    # The files are small: each is sent as a whole. A damaged range would be refused in plain text.
    scope = request.scope
    scope["headers"] = [header for header in scope["headers"] if header[0] != b"range"]
    response = await _FILES.get_response(file, scope)
    response.headers.update(_HEADERS)
    return response


#: Nothing here is secret: the routes need no token.
routes = [Route("/", page), Route("/static/{file:path}", page)]
