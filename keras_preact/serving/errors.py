"""The errors that a client is told of: their text goes out as it is, no path and no
other library's message stands in it.
"""


class RequestError(Exception):
    """A request that cannot be answered, with the sentence that says why.

    Args:
        message: What was received and what would work.
        retry_after: Seconds after which the same request may do better. `None` where it
            would not, or nobody knows.
    """

    status = 400
    retry_after: float | None = None

    def __init__(self, message: str, *, retry_after: float | None = None):
        super().__init__(message)
        self.message = message
        if retry_after is not None:
            self.retry_after = retry_after


class Unauthorized(RequestError):
    """The request has no token, or another one."""

    status = 401


class NotFound(RequestError):
    """There is no such model, version or path."""

    status = 404


class MethodNotAllowed(RequestError):
    """The path is there, but not for this method."""

    status = 405


class Timeout(RequestError):
    """The client took too long to send its request."""

    status = 408


class TooLarge(RequestError):
    """The body, or what it holds, is larger than what is taken in."""

    status = 413


class UnsupportedEncoding(RequestError):
    """The body is compressed."""

    status = 415


class TooBusy(RequestError):
    """More requests or images at once than are taken in."""

    status = 429
    retry_after = 1.0


class Unavailable(RequestError):
    """Nothing here can answer now, but something may soon."""

    status = 503
    retry_after = 1.0


class DeadlineExceeded(RequestError):
    """The answer did not come within the time that a request has."""

    status = 503
    retry_after = 1.0
