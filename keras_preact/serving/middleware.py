"""What stands around every request: its id, its token, its errors, its line in the log."""

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keras_preact.serving.admission import Disconnected
from keras_preact.serving.errors import RequestError, Unauthorized, Unavailable
from keras_preact.serving.inference import json_response
from keras_preact.serving.metrics import Metrics

log = logging.getLogger("keras_preact.serving")

#: Open without a token: probes have none, and the page asks for it.
OPEN = re.compile(r"/|/static/.*|/v2/health/(live|ready)")
CLIENT_GONE = 499  # as in the logs of other servers: nobody was there to get an answer
LINGER_SECONDS = 2.0

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Front:
    """Wraps the app: nothing but JSON with a plain sentence leaves it on errors,
    whatever happens inside.
    """

    def __init__(self, app: ASGIApp, token: str | None, metrics: Metrics):
        self._app = app
        self._token = token
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
            _check_token(scope, self._token)
            await self._app(scope, exchange.receive, exchange.send)
            return
        except RequestError as caught:
            error = caught
        except Disconnected:
            exchange.status = CLIENT_GONE
            return
        except asyncio.CancelledError:  # the time to finish is over
            error = Unavailable("The server is stopping.")
        except Exception:
            log.exception("internal error", extra={"id": exchange.id})
            error = RequestError(f"internal error; the log has it under {exchange.id}")
            error.status = 500
        if exchange.status is None:  # else half an answer is out, and the connection is closed
            await answer_error(error)(scope, exchange.receive, exchange.send)

    def _record(self, scope: Scope, exchange: "_Exchange", seconds: float) -> None:
        status = exchange.status or 500
        state = scope.get("state", {})
        model, version = state.get("model", ""), str(state.get("version", ""))
        self._metrics.request(
            getattr(scope.get("endpoint"), "__name__", "none"), model, version, status, seconds
        )
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


def answer_error(error: RequestError, headers: Iterable[tuple[str, str]] = ()):
    """Return the response that tells of an error."""
    response = json_response({"error": error.message}, error.status)
    response.headers.update(dict(headers))
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


class _Exchange:
    """A request and its answer, as they pass."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        self.id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        self.status: int | None = None
        self.bytes = 0
        self._receive = receive
        self._send = send
        self._unread = (
            headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
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
            message = {**message, "more_body": True}
        await self._send(message)

    async def end(self) -> None:
        """Close the answer; before, take in what the client still sends, for a while.

        A connection that is closed over unread bytes is reset, and the client may never
        see the answer that was sent.
        """
        if not self._ended:
            return
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                while self._unread:
                    await self.receive()
        except TimeoutError:
            pass
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _check_token(scope: Scope, token: str | None) -> None:
    if token is None or OPEN.fullmatch(scope["path"]):
        return
    given = dict(scope["headers"]).get(b"authorization", b"")
    scheme, _, credentials = given.partition(b" ")
    if scheme.lower() != b"bearer" or not hmac.compare_digest(credentials.strip(), token.encode()):
        raise Unauthorized(
            "This server wants a token: the header Authorization with the word Bearer and the "
            "token."
        )
