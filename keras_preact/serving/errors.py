"""The errors that clients see. Their text is sent unchanged: it names no path and
quotes no other library.
"""

from collections.abc import Mapping


class RequestError(Exception):
    """A request that cannot be answered, with a sentence for the client.

    Args:
        message: What was received and what would work.
        status: HTTP status, if it is not the class's own.
        headers: Headers of the answer.
    """

    status = 400
    #: Seconds after which the same request may succeed. `None`: unknown, or never.
    retry_after: int | None = None

    def __init__(
        self, message: str, status: int | None = None, headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.message = message
        self.status = status or self.status
        self.headers = dict(headers or {})
        if self.retry_after is not None:
            self.headers["Retry-After"] = str(self.retry_after)


class NotFound(RequestError):
    """There is no such model, version or path."""

    status = 404


class TooLarge(RequestError):
    """The body, or its content, exceeds a limit."""

    status = 413


class TooBusy(RequestError):
    """Too many requests or images at once."""

    status = 429
    retry_after = 1


class Unavailable(RequestError):
    """The request cannot be answered now, but perhaps soon."""

    status = 503
    retry_after = 1
