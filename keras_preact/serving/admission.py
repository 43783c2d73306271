"""What is taken in: so many requests at once, and so many bytes of their bodies."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from starlette.requests import Request

from keras_preact.serving.errors import (
    RequestError,
    Timeout,
    TooBusy,
    TooLarge,
    UnsupportedEncoding,
)
from keras_preact.serving.settings import Settings


class Disconnected(Exception):
    """The client is gone: nobody waits for an answer."""


class Admission:
    """Counts requests in progress and bytes held, and refuses what goes beyond the
    settings.
    """

    def __init__(self, settings: Settings):
        self._settings = settings
        self.requests = 0
        self.bytes = 0

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one of the places for requests in progress.

        Raises:
            TooBusy: if none is free.
        """
        if self.requests >= self._settings.max_requests:
            raise TooBusy(
                f"{self.requests} requests are in progress, as many as are taken at once. Send it "
                "again later."
            )
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    @contextlib.asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """Receive the body of a request and account for its bytes until the context
        ends.

        Raises:
            TooLarge, Timeout, TooBusy, UnsupportedEncoding: if it cannot be taken; what
                is left of it is not read.
            Disconnected: if the client goes before it is complete.
        """
        self._check_headers(request)
        chunks: list[bytes] = []
        held = 0
        try:
            try:
                async with asyncio.timeout(self._settings.body_seconds):
                    more = True
                    while more:
                        message = await request.receive()
                        if message["type"] == "http.disconnect":
                            raise Disconnected
                        chunk, more = message.get("body", b""), message.get("more_body", False)
                        held += len(chunk)
                        self.bytes += len(chunk)
                        self._check_size(held)
                        chunks.append(chunk)
            except TimeoutError:
                raise Timeout(
                    f"The body was not complete after {self._settings.body_seconds:g} seconds."
                ) from None
            yield b"".join(chunks)
        finally:
            self.bytes -= held

    def _check_headers(self, request: Request) -> None:
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", ""):
            raise UnsupportedEncoding(
                "The body must be sent as it is, without a Content-Encoding such as gzip."
            )
        length = request.headers.get("content-length", "0")
        if not length.isascii() or not length.isdecimal():
            raise RequestError("Content-Length must be a whole number.")
        self._check_size(int(length), announced=True)

    def _check_size(self, size: int, announced: bool = False) -> None:
        limit, total = self._settings.max_body_bytes, self._settings.max_pending_bytes
        if size > limit:
            said = f"one of {size} bytes" if announced else "a longer one"
            raise TooLarge(
                f"A body may have {limit} bytes. Received: {said}. Send fewer rows at once."
            )
        if self.bytes + (size if announced else 0) > total:
            raise TooBusy(
                f"The bodies of the requests in progress hold {total} bytes, as many as are "
                "taken. Send it again later."
            )
