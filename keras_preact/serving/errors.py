"""The errors that clients see. Their text goes out unchanged: it names no path and
quotes no other library.
"""

from collections.abc import Mapping


class RequestError(Exception):
    """A request that cannot be answered, with a sentence for the client.

    Args:
        message: What was received and what would work.
        headers: Headers of the answer.

    `retry_after`: seconds after which the same request may succeed. `None`: unknown, or
    it never will.
    """

    status = 400
    retry_after: float | None = None

    def __init__(self, message: str, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.message = message
        self.headers = dict(headers or {})


class Unauthorized(RequestError):
    """The token is missing or wrong."""

    status = 401

    def __init__(self, message: str):
        super().__init__(message, {"WWW-Authenticate": "Bearer"})


class NotFound(RequestError):
    """There is no such model, version or path."""

    status = 404


class MethodNotAllowed(RequestError):
    """The path has other methods."""

    status = 405


class Timeout(RequestError):
    """The client took too long to send its request."""

    status = 408


class TooLarge(RequestError):
    """The body, or its content, exceeds a limit."""

    status = 413


class UnsupportedEncoding(RequestError):
    """The body is compressed."""

    status = 415


class TooBusy(RequestError):
    """Too many requests or images at once."""

    status = 429
    retry_after = 1.0


class Unavailable(RequestError):
    """Nothing can answer now, but something may soon."""

    status = 503
    retry_after = 1.0


class DeadlineExceeded(Unavailable):
    """The answer did not come within the time of a request."""
