"""The gate that every request passes: its id and token, the limits on bodies and time,
plain errors, the log.
"""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
from prometheus_client import Counter, Histogram
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keras_preact.serving.errors import (
    DeadlineExceeded,
    NotFound,
    RequestError,
    TooBusy,
    TooLarge,
    Unavailable,
)
from keras_preact.serving.metrics import Metrics
from keras_preact.serving.settings import Settings
from keras_preact.serving.tensors import described

log = logging.getLogger("keras_preact.serving")

#: Paths without a token: probes have none, and the page asks for it.
OPEN = re.compile(r"/|/static/.*|/v2/health/(live|ready)")
PROBES = re.compile(r"/v2/health/(live|ready)|/metrics")
CLIENT_GONE = 499  # as in the logs of other servers: nobody is left to get an answer
LINGER_SECONDS = 2.0
WATCH_SECONDS = 0.2
#: Work on fewer bytes takes less time than its way to a thread and back.
INLINE_BYTES = 32 * 1024

_random = random.Random()
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

Result = TypeVar("Result")


class Disconnected(Exception):
    """The client has gone: nobody waits for an answer."""


class Gate:
    """Wraps the app. Whatever happens inside, an error leaves it as JSON with a plain
    sentence.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics):
        self._app = app
        self._series: dict[tuple[str, ...], tuple[Counter, Histogram]] = {}
        self._token = settings.token
        self._open_metrics = settings.open_metrics
        self._hosts = settings.hosts()
        self._access_log = settings.access_log
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        exchange = _Exchange(scope, receive, send)
        try:
            await self._answer(scope, exchange)
        finally:
            self._record(scope, exchange, time.perf_counter() - started)
        await exchange.end()

    async def _answer(self, scope: Scope, exchange: "_Exchange") -> None:
        try:
            self._check_host(scope)
            self._check_token(scope["path"], exchange.headers.get(b"authorization", b""))
            await self._app(scope, exchange.receive, exchange.send)
            return
        except RequestError as error:
            _release(error)
            response = error_response(error)
        except HTTPException as error:
            response = error_response(_no_route(scope, error))
        except Disconnected as error:
            _release(error)
            exchange.status = CLIENT_GONE
            return
        except asyncio.CancelledError as error:  # the time to finish is over
            _release(error)
            response = error_response(Unavailable("The server is stopping."))
        except Exception as error:
            log.exception("internal error", extra={"id": exchange.id})
            _release(error)
            message = f"internal error; the log has it under {exchange.id}"
            response = error_response(RequestError(message, 500))
        if exchange.status is None:  # else half an answer is out, and the connection is closed
            await response(scope, exchange.receive, exchange.send)

    def _check_host(self, scope: Scope) -> None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1 or (not hosts and scope.get("http_version") == "1.1"):
            raise RequestError(
                f"A request of HTTP/1.1 must have one Host header. Received: {len(hosts)}"
            )
        if self._hosts is None or not hosts:
            return
        # without the port; an address of IPv6 is in brackets
        name = re.sub(r":\d*$", "", hosts[0].decode("latin-1")).strip("[]").lower()
        if name not in self._hosts:
            raise RequestError(
                f"This server answers to {', '.join(sorted(self._hosts))}. Received: "
                f"{described(name)}. Start it with --allowed-hosts to allow another name."
            )

    def _check_token(self, path: str, authorization: bytes) -> None:
        if self._token is None or OPEN.fullmatch(path):
            return
        if self._open_metrics and path == "/metrics":
            return
        scheme, _, token = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(
            token.strip(), self._token.encode()
        ):
            raise RequestError(
                "This server wants a token: the header Authorization with the word Bearer and the "
                "token.",
                401,
                {"WWW-Authenticate": "Bearer"},
            )

    def _record(self, scope: Scope, exchange: "_Exchange", seconds: float) -> None:
        status = exchange.status or 500
        state = scope.get("state", {})
        model, version = state.get("model", ""), str(state.get("version", ""))
        labels = getattr(scope.get("endpoint"), "__name__", "none"), model, version, str(status)
        if labels not in self._series:
            requests, times = self._metrics.requests, self._metrics.request_seconds
            self._series[labels] = requests.labels(*labels), times.labels(*labels[:-1])
        number, times = self._series[labels]
        number.inc()
        times.observe(seconds)
        is_probe = PROBES.fullmatch(scope["path"]) is not None
        if self._access_log == "none" or (is_probe and self._access_log != "all"):
            return
        fields = {
            "id": exchange.id,
            "method": scope["method"],
            "path": scope["path"],
            "model": model,
            "version": version,
            "status": status,
            "ms": round(seconds * 1000, 3),
            "bytes": exchange.bytes,
        }
        log.info("request", extra=fields)


def _no_route(scope: Scope, error: HTTPException) -> RequestError:
    """Return the error for what the router found no route for."""
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        message = f"This path takes {allowed}. Received: {scope['method']}"
        return RequestError(message, 405, {"Allow": allowed})
    if error.status_code == 404:
        return NotFound("Nothing is served at this path. GET /v1/models lists the models.")
    return RequestError(error.detail)


def _release(error: BaseException | None) -> None:
    """Free what an error and those before it hold through their tracebacks.

    Frames hold the body of the request, and some, also of libraries, hold the error in
    turn: such a cycle keeps the body until Python's collector runs.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class _Exchange:
    """A request and its answer, as they pass."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self.headers = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"").decode("latin-1")
        self.id = given if _ID.fullmatch(given) else f"{_random.getrandbits(128):032x}"
        self.status: int | None = None
        self.bytes = 0
        self._receive = receive
        self._send = send
        self._unread = (
            self.headers.get(b"content-length", b"0") != b"0"
            or b"transfer-encoding" in self.headers
        )
        self._ended = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._unread = message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
            if self._unread:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        else:
            self.bytes += len(message.get("body", b""))
            self._ended = not message.get("more_body", False)
            message = {**message, "more_body": self._unread or not self._ended}
        await self._send(message)

    async def end(self) -> None:
        """Complete an answer that went out before all of the request came in: take in
        the rest, for a while.

        A connection that is closed over unread bytes is reset, and the client may never
        see the answer.
        """
        if not (self._ended and self._unread):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while self._unread:
                    await self.receive()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


@dataclasses.dataclass
class _Slot:
    """A request in progress. `bytes`: those of its body."""

    bytes: int = 0


class Admission:
    """Counts requests in progress and the bytes of their bodies, and refuses those
    beyond the settings.
    """

    def __init__(self, settings: Settings):
        self._settings = settings
        self.requests = 0
        self.bytes = 0

    @contextlib.contextmanager
    def slot(self) -> Iterator["_Slot"]:
        """Count a request, and the bytes that `body` receives for it, until the context
        ends.

        Raises:
            TooBusy: for more than `max_requests`.
        """
        if self.requests >= self._settings.max_requests:
            raise TooBusy(
                f"{self.requests} requests are in progress, the most at once. Send it again later."
            )
        self.requests += 1
        slot = _Slot()
        try:
            yield slot
        finally:
            self.requests -= 1
            self.bytes -= slot.bytes

    async def body(self, request: Request, slot: "_Slot") -> bytes:
        """Receive the body of a request.

        Raises:
            RequestError: if it cannot be accepted; the rest of it is not read.
            Disconnected: if the client goes before it is complete.
        """
        self._check_headers(request)
        chunks: list[bytes] = []
        more = True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            chunk, more = message.get("body", b""), message.get("more_body", False)
            slot.bytes += len(chunk)
            self.bytes += len(chunk)
            self._check_size(slot.bytes)
            chunks.append(chunk)
        return b"".join(chunks)

    def _check_headers(self, request: Request) -> None:
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", ""):
            raise RequestError(
                "Send the body without a Content-Encoding such as gzip.",
                415,
                {"Accept-Encoding": "identity"},
            )
        length = request.headers.get("content-length", "0")
        if not length.isascii() or not length.isdecimal():
            raise RequestError("Content-Length must be a whole number.")
        self._check_size(int(length), announced=True)

    def _check_size(self, size: int, announced: bool = False) -> None:
        limit, total = self._settings.max_body_bytes, self._settings.max_pending_bytes
        if size > limit:
            received = f"one of {size} bytes" if announced else "a longer one"
            raise TooLarge(
                f"A body may have {limit} bytes. Received: {received}. Send fewer rows at once."
            )
        if self.bytes + (size if announced else 0) > total:
            raise TooBusy(
                f"The bodies of the requests in progress hold {total} bytes, the most at once. "
                "Send it again later."
            )


class Workers:
    """Threads that read and write large bodies: by default one, which limits the memory
    that parsing takes, and leaves Python's lock to the event loop between its steps.

    A body waits outside of the threads' own queue: that would hold the body of a
    request that is cancelled until a thread comes to it.
    """

    def __init__(self, threads: int = 1):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="bodies")
        self._free = asyncio.Semaphore(threads)

    async def run(self, size: int, function: Callable[..., Result], *args: Any) -> Result:
        """Return `function(*args)`, which handles `size` bytes; computed in a thread if
        that takes long.
        """
        if size <= INLINE_BYTES:
            return function(*args)
        loop = asyncio.get_running_loop()
        await self._free.acquire()
        job = self._pool.submit(function, *args)

        def free(_) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._free.release)

        job.add_done_callback(free)
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class inference:  # a decorator
    """The endpoint of a `handler(request, body, deadline)`, which ends at the deadline,
    or when the client goes.

    It is an ASGI app, since Starlette wraps functions, and has one time limit and no
    task of its own: of a request's 355 us in the event loop these took 60.
    """

    def __init__(self, handler: Callable[[Request, bytes, float], Awaitable[Response]]):
        self._handler = handler
        functools.update_wrapper(self, handler)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._respond(Request(scope, receive))
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        state = request.app.state
        settings, admission = state.settings, state.admission
        time = asyncio.get_running_loop().time
        deadline = watch = None
        with admission.slot() as slot:
            try:
                async with asyncio.timeout_at(time() + settings.body_seconds) as limit:
                    body = await admission.body(request, slot)
                    deadline = time() + settings.deadline_seconds
                    limit.reschedule(deadline)
                    watch = _Watch(request, limit)
                    return await self._handler(request, body, deadline)
            except TimeoutError:
                if deadline is None:
                    raise RequestError(
                        f"The body was not complete after {settings.body_seconds:g} seconds.", 408
                    ) from None
                if watch is not None and watch.gone:
                    raise Disconnected from None
                raise DeadlineExceeded(
                    f"The answer did not come within {settings.deadline_seconds:g} seconds. Send "
                    "it again later."
                ) from None
            finally:
                if watch is not None:
                    watch.stop()


class _Watch:
    """Ends a time limit when the client goes; looks for that after `WATCH_SECONDS`: most
    requests are answered before, and need no task.
    """

    def __init__(self, request: Request, limit: asyncio.Timeout):
        self.gone = False
        self._request = request
        self._limit = limit
        self._task: asyncio.Task | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._start)

    def stop(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _start(self) -> None:
        self._task = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if not self._limit.expired():
            self._limit.reschedule(0)  # long over: the handler is cancelled


@contextlib.contextmanager
def leased(request: Request) -> Iterator[Any]:
    """Give the servable that the path of a request names; it stays loaded until the
    context ends.

    Raises:
        NotFound, Unavailable: if there is none.
    """
    name, version = request.path_params["name"], version_of(request)
    with request.app.state.repository.lease(name, version) as servable:
        # Only now: invented names would be new series of the metrics.
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
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise RequestError("A version must be a whole number, as in versions 1 or 2.")
    return int(text)


def json_response(content: Any, status: int = 200) -> Response:
    """Return an answer of JSON, which may hold NumPy arrays."""
    return Response(
        orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY),
        status,
        media_type="application/json",
    )


def error_response(error: RequestError) -> Response:
    """Return the answer that tells a client of an error."""
    response = json_response({"error": error.message}, error.status)
    response.headers.update(error.headers)
    return response
