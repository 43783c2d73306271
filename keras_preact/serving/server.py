"""The HTTP server in this process: listens, stops when told to, loses no request that
it began.
"""

import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from keras_preact.serving.protocol import Protocol
from keras_preact.serving.settings import Settings


def bind(host: str, port: int) -> socket.socket:
    """Take a port; nobody can connect before the server listens there.

    Raises:
        OSError: if it cannot be taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


class Server(uvicorn.Server):
    """Serves an app on a bound socket until SIGTERM or SIGINT.

    Then the app says at once that it is not ready, no connection is taken any more, and
    requests in progress have `settings.drain_seconds` to finish. A second signal ends
    those too.

    Args:
        app: As `create_app` returns it.
        settings: What the server is told.
        ready: Called once, when the server takes connections.
        stopping: Called once, when it is told to stop.
    """

    def __init__(
        self,
        app: Starlette,
        settings: Settings,
        ready: Callable[[], None] = lambda: None,
        stopping: Callable[[], None] = lambda: None,
    ):
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            # asyncio takes so many in a row, and logs as many errors where file descriptors run out
            backlog=128,
            timeout_keep_alive=settings.header_seconds,  # type: ignore[arg-type]  # it counts seconds, whole or not
            timeout_graceful_shutdown=settings.drain_seconds,  # type: ignore[arg-type]
        )
        super().__init__(config)
        self._app = app
        self._ready = ready
        self._stopping = stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop. Unlike uvicorn's own, it does not have the signal end the
        process with an error afterwards.
        """
        self._app.state.stopping = True
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        self._stopping()
