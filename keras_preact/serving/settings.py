"""What a server can be told: one value for each option of the command."""

import math
from dataclasses import dataclass, field
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """The settings of a server; all but `directory` have defaults that fit a small
    machine.

    Args:
        directory: The folder of models: `DIRECTORY/NAME/VERSION/saved_model.pb`.
        host: The address to listen on.
        port: The port to listen on; 0 takes a free one.
        engine: What computes the networks, a name in `engines.ENGINES`.
        versions: How many of each model's versions are served, the highest first.
            `None`: all.
        poll_seconds: Seconds between two looks for new versions.
        max_batch_size: Most images that the network computes at once. `None`: the most
            that the model was exported for.
        batch_wait_ms: Milliseconds that an image waits for others, to be computed in
            one batch with them.
        batching: Whether images of different requests are computed together.
        threads: Threads of one computation. `None`: as many as there are cores.
        max_queue: Most images waiting for the network, for each version of a model.
        max_body_bytes: Largest body of a request.
        max_pending_bytes: Most bytes of bodies held at once, all requests together.
        max_requests: Most requests in progress at once.
        deadline_seconds: Seconds that an answer may take, from the last byte of the
            request.
        body_seconds: Seconds that a client has to send a body.
        header_seconds: Seconds that a client has to send a request's headers, and that
            a connection may lie idle.
        drain_seconds: Seconds that requests in progress have to finish when the server
            stops.
        token: What clients have to send as `Authorization: Bearer TOKEN`. `None`:
            everyone is served.

    Raises:
        ValueError: for a value that cannot work.
    """

    directory: Path
    host: str = "127.0.0.1"
    port: int = 8501
    engine: str = "tensorflow"
    versions: int | None = 1
    poll_seconds: float = 1.0
    max_batch_size: int | None = None
    batch_wait_ms: float = 0.0
    batching: bool = True
    threads: int | None = None
    max_queue: int = 256
    max_body_bytes: int = 32 * MIB
    max_pending_bytes: int = 256 * MIB
    max_requests: int = 256
    deadline_seconds: float = 30.0
    body_seconds: float = 15.0
    header_seconds: float = 10.0
    drain_seconds: float = 30.0
    token: str | None = field(default=None, repr=False)

    def __post_init__(self):
        for name in ("max_queue", "max_body_bytes", "max_pending_bytes", "max_requests"):
            self._check_count(name)
        for name in ("versions", "max_batch_size", "threads"):
            if getattr(self, name) is not None:
                self._check_count(name)
        for name in (
            "poll_seconds",
            "deadline_seconds",
            "body_seconds",
            "header_seconds",
            "drain_seconds",
        ):
            self._check(
                name,
                _finite(getattr(self, name)) and getattr(self, name) > 0,
                "a number of seconds above 0",
            )
        self._check(
            "batch_wait_ms",
            _finite(self.batch_wait_ms) and self.batch_wait_ms >= 0,
            "a number of milliseconds, 0 or more",
        )
        self._check(
            "port", _whole(self.port) and 0 <= self.port <= 65535, "a whole number from 0 to 65535"
        )
        self._check(
            "max_pending_bytes",
            self.max_pending_bytes >= self.max_body_bytes,
            f"at least max_body_bytes={self.max_body_bytes}",
        )
        # Headers hold printable ASCII without spaces; any other token could never be sent. It is
        # not repeated here.
        if self.token is not None and not (
            self.token and all("!" <= character <= "~" for character in self.token)
        ):
            raise ValueError(
                "`token` must be printable ASCII characters without spaces, at least one."
            )

    def _check_count(self, name: str) -> None:
        self._check(
            name, _whole(getattr(self, name)) and getattr(self, name) > 0, "a whole number above 0"
        )

    def _check(self, name: str, fits: bool, what: str) -> None:
        if not fits:
            raise ValueError(f"`{name}` must be {what}. Received: {name}={getattr(self, name)!r}")


def _whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
