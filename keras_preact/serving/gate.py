"""The gate that every request passes: it checks hosts and tokens, limits bodies and
time, turns errors into JSON, and logs the requests.
"""

import asyncio
import contextlib
import functools
import hmac
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import orjson
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keras_preact.export.version import HIGHEST, number_of
from keras_preact.serving.batching import Outputs
from keras_preact.serving.errors import NotFound, RequestError, TooBusy, TooLarge, Unavailable
from keras_preact.serving.metrics import Metrics
from keras_preact.serving.servable import Servable
from keras_preact.serving.settings import Settings
from keras_preact.serving.tensors import Call, shortened

log = logging.getLogger("keras_preact.serving")

#: Paths of health probes. They need neither a token nor a host: a kubelet sends the address of the
#: pod, and HAProxy nothing.
HEALTH = re.compile(r"/v2/health/(live|ready)")
#: Paths that need no token, with those: the page asks the user for it.
OPEN = re.compile(rf"/|/static/.*|{HEALTH.pattern}")
#: Paths that are not logged by default: probes and scrapes.
PROBES = re.compile(rf"{HEALTH.pattern}|/metrics")
#: Work on fewer bytes takes about a millisecond at most. In a thread it would take half as long
#: again, because both threads wait for Python's lock.
INLINE_BYTES = 128 * 1024
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Gate:
    """Wraps the app. Every error inside is answered with JSON that holds a plain
    sentence.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics):
        self._app = app
        self._settings = settings
        self._hosts = settings.hosts()
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        headers = Headers(scope=scope)
        received = headers.get("x-request-id", "")
        request_id = received if _ID.fullmatch(received) else f"{random.getrandbits(128):032x}"
        start: Message = {}

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(b"x-request-id", request_id.encode())]
                # TensorFlow Serving's JSON has no place for the version
                if "version" in scope.get("state", {}):
                    added.append((b"x-model-version", str(scope["state"]["version"]).encode()))
                message["headers"] = [*message["headers"], *added]
                start.update(message)
            await send(message)

        try:
            self._check(scope, headers)
            await self._app(scope, receive, sending)
        except Exception as error:
            response = self._refusal(scope, error, request_id)
            _forget_frames(error)
            if not start:
                await response(scope, receive, sending)
        self._record(scope, request_id, start, time.perf_counter() - began)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Check the host that the request is for, and its token."""
        token, path = self._settings.token, scope["path"]
        is_open_metrics = self._settings.open_metrics and path == "/metrics"
        self._check_host(scope, headers, HEALTH.fullmatch(path) is None and not is_open_metrics)
        if token is None or OPEN.fullmatch(path) or is_open_metrics:
            return
        sent = headers.get("authorization", "")
        scheme, _, value = sent.encode().partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(value.strip(), token.encode()):
            raise RequestError(
                "This server needs a token. Send it in the header 'Authorization: Bearer TOKEN'. "
                f"Received: {'another value' if sent else 'no such header'}",
                401,
                {"WWW-Authenticate": "Bearer"},
            )

    def _check_host(self, scope: Scope, headers: Headers, is_needed: bool) -> None:
        # The HTTP server adds an empty header to a request without one.
        hosts = [host for host in headers.getlist("host") if host.strip()]
        is_missing = is_needed and not hosts and scope["http_version"] == "1.1"
        if len(hosts) > 1 or is_missing:
            raise RequestError(
                f"An HTTP/1.1 request must have one Host header. Received: {len(hosts)}"
            )
        if self._hosts is None or not hosts or not is_needed:
            return
        # without the port; an IPv6 address is in brackets
        host = re.sub(r":\d*$", "", hosts[0]).strip("[]").lower()
        if host not in self._hosts:
            raise RequestError(
                f"This server answers to {', '.join(sorted(self._hosts))}. Received: "
                f"{shortened(host)!r}. Start it with --allowed-hosts to allow another name."
            )

    def _refusal(self, scope: Scope, error: Exception, request_id: str) -> Response:
        method = scope["method"]
        if isinstance(error, HTTPException) and error.status_code == 404:
            error = NotFound(
                "Nothing is served at this path. GET /v1/models lists the models. Received: "
                f"{method} {shortened(scope['path'])}"
            )
        elif isinstance(error, HTTPException) and error.status_code == 405:
            headers = error.headers or {}
            allowed = headers.get("Allow", "another method")
            error = RequestError(f"This path takes {allowed}. Received: {method}", 405, headers)
        elif isinstance(error, ClientDisconnect):
            error = RequestError(
                "The body ended before it was complete, or its chunks are damaged. Send it again."
            )
        elif not isinstance(error, RequestError):
            log.error("internal error", exc_info=error, extra={"id": request_id})
            error = RequestError(
                "The server failed to answer this request. Its log says why, under the id "
                f"{request_id}.",
                500,
            )
        return json_response({"error": error.message}, error.status, error.headers)

    def _record(self, scope: Scope, request_id: str, start: Message, seconds: float) -> None:
        state, status = scope.get("state", {}), start.get("status", 500)
        model, version = state.get("model", ""), str(state.get("version", ""))
        labels = getattr(scope.get("endpoint"), "__name__", "none"), model, version
        self._metrics.requests.labels(*labels, str(status)).inc()
        self._metrics.request_seconds.labels(*labels).observe(seconds)
        is_probe = PROBES.fullmatch(scope["path"]) is not None
        access_log = self._settings.access_log
        if access_log == "none" or (is_probe and access_log != "all"):
            return
        fields = {
            "id": request_id,
            "method": scope["method"],
            "path": scope["path"],
            "model": model,
            "version": version,
            "status": status,
            "ms": round(seconds * 1000, 3),
            # from the header: the HTTP server itself sends the page's files
            "bytes": int(Headers(raw=start.get("headers", [])).get("content-length", 0)),
        }
        log.info("request", extra=fields)


def _forget_frames(error: BaseException | None) -> None:
    """Remove the frames from an error and its causes. They hold the request's body, and some
    of them hold the error: such a cycle would keep the body until Python's garbage collector
    runs.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:  # errors may cause each other
        seen.append(error)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class Admission:
    """Counts requests in progress and the bytes of their bodies, and refuses requests
    beyond the limits of the settings.
    """

    def __init__(self, settings: Settings, metrics: Metrics):
        self._settings = settings
        self._end = float("inf")
        self._limits: set[asyncio.Timeout] = set()
        self.bytes = 0
        metrics.in_progress.set_function(lambda: self.requests)

    @property
    def requests(self) -> int:
        return len(self._limits)

    def finish_by(self, end: float) -> None:
        """Cancel every request that is in progress at `end`, a time of the event loop."""
        self._end = end
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(min(end, limit.when() or end))

    @contextlib.asynccontextmanager
    async def admit(self, request: Request):
        """Yield the body of a request, and cancel the code in the context at the
        request's deadline.

        Raises:
            RequestError: if the request cannot be accepted, or takes too long to arrive
                or to be answered. The remaining body is not read.
        """
        settings, now = self._settings, asyncio.get_running_loop().time
        if self.requests >= settings.max_requests:
            raise TooBusy(
                f"{self.requests} requests are in progress, which is the limit. Send this one "
                "again later."
            )
        chunks: list[bytes] = []
        size, reading = 0, True
        limit = asyncio.timeout_at(min(self._end, now() + settings.body_seconds))
        self._limits.add(limit)
        try:
            async with limit:
                self._check(request)
                async for chunk in request.stream():
                    size += len(chunk)
                    self.bytes += len(chunk)
                    self._check_size(size)
                    chunks.append(chunk)
                body, reading = b"".join(chunks), False
                chunks.clear()
                limit.reschedule(min(self._end, now() + settings.deadline_seconds))
                yield body
        except TimeoutError:
            if limit.when() == self._end:
                raise Unavailable(
                    "The server is stopping and cannot finish this request. Send it again later."
                ) from None
            if reading:
                raise RequestError(
                    f"The body was not complete after {settings.body_seconds:g} seconds. "
                    f"Received: {size} bytes. Send it faster, or send fewer rows at once.",
                    408,
                ) from None
            raise Unavailable(
                f"The answer did not come within {settings.deadline_seconds:g} seconds. Send the "
                "request again later."
            ) from None
        finally:
            self._limits.discard(limit)
            self.bytes -= size

    def _check(self, request: Request) -> None:
        # The HTTP server undoes chunks, and takes any other coding for a part of the body.
        codings = ", ".join(request.headers.getlist("transfer-encoding")).strip().lower()
        if codings not in ("chunked", ""):
            raise RequestError(
                "Send the body without a Transfer-Encoding, or chunked. Received: "
                f"{shortened(codings)}",
                501,
            )
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", ""):
            raise RequestError(
                f"Send the body without a Content-Encoding. Received: {shortened(encoding)}", 415
            )
        length = int(request.headers.get("content-length", 0))  # the HTTP server checked it
        self._check_size(length, length)

    def _check_size(self, size: int, more: int = 0) -> None:
        """Check the size of a body; `more` of its bytes are not counted yet."""
        limit, total = self._settings.max_body_bytes, self._settings.max_pending_bytes
        if size > limit:
            raise TooLarge(
                f"A body may have at most {limit} bytes. Received: at least {size} bytes. Send "
                "fewer rows at once."
            )
        if self.bytes + more > total:
            raise TooBusy(
                f"The bodies of all requests in progress may have at most {total} bytes. With "
                f"this one they have {self.bytes + more} bytes. Send this request again later."
            )


def inference(parse: Callable[[Request, bytes, Servable], Call]):
    """Return a decorator that makes an endpoint of `write(servable, call, outputs)`.

    Large requests and answers are read and written in a thread. There is only one such
    thread, which limits the memory that it needs.

    Args:
        parse: Function that reads a request: `parse(request, body, servable)`. It
            refuses what is too much before it does any work.
    """

    def decorator(write: Callable[[Servable, Call, Outputs], Response]):
        @functools.wraps(write)
        async def endpoint(request: Request) -> Response:
            async with request.app.state.admission.admit(request) as body:
                with leased(request) as servable:
                    call = await in_thread(request, len(body), parse, request, body, servable)
                    outputs = await servable.predict(call.signature, call.array)
                size = sum(array.nbytes for array in outputs.values())
                return await in_thread(request, size, write, servable, call, outputs)

        return endpoint

    return decorator


async def in_thread(request: Request, size: int, function: Callable, *arguments: Any) -> Any:
    """Return `function(*arguments)`, in a thread if it handles many bytes (`size`)."""
    if size <= INLINE_BYTES:
        return function(*arguments)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(request.app.state.parser, function, *arguments)


@contextlib.contextmanager
def leased(request: Request) -> Iterator[Servable]:
    """Yield the servable that the path of a request names. It stays loaded until the
    context ends.

    Raises:
        NotFound, Unavailable: if there is no such servable.
    """
    name, version = request.path_params["name"], version_of(request)
    with request.app.state.repository.lease(name, version) as servable:
        # Only now: otherwise unknown names would add series to the metrics.
        request.state.model, request.state.version = servable.name, servable.version
        yield servable


def version_of(request: Request) -> int | None:
    """Return the version that the path of a request names by number or label, if any."""
    label = request.path_params.get("label")
    if label is not None:
        return request.app.state.repository.labelled(request.path_params["name"], label)
    text = request.path_params.get("version")
    if text is None:
        return None
    version = number_of(text)
    if version is None:
        raise RequestError(
            f"A version must be a whole number, such as 1 or 2, at most {HIGHEST}. Received: "
            f"{shortened(text)!r}"
        )
    return version


def json_response(content: Any, status: int = 200, headers: Any = None) -> Response:
    """Return a JSON answer. The content may hold NumPy arrays."""
    return Response(as_json(content), status, headers, media_type="application/json")


def as_json(content: Any) -> bytes:
    """Return JSON of a value that may hold NumPy arrays."""
    # orjson itself writes contiguous arrays of numbers
    return orjson.dumps(content, np.ndarray.tolist, orjson.OPT_SERIALIZE_NUMPY)
