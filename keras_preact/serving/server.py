"""The HTTP server: granian, in this process and its event loop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server import embed
from starlette.applications import Starlette

from keras_preact.serving.settings import Settings

#: Largest number of bytes of a request's headers.
MAX_HEAD_BYTES = 64 * 1024
#: Largest number of connections that wait to be accepted, and of open ones. With 128, up to 63 of
#: 600 simultaneous clients were cut off.
CONNECTIONS = 1024


def free_address(host: str, port: int) -> tuple[str, int]:
    """Return the numeric address of a host, and the port. For port 0 it is a free one.

    Raises:
        OSError: if no server can listen on the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without SO_REUSEPORT, which granian uses: with it, two servers would share the port.
    with socket.create_server((host, port), family=family) as probe:
        return probe.getsockname()[:2]


@contextlib.asynccontextmanager
async def running(
    app: Starlette, settings: Settings, address: tuple[str, int]
) -> AsyncIterator[None]:
    """Serve an app until the context ends. The context begins when the server accepts
    connections.

    At its end the app says at once that it is not ready, no new connection is accepted,
    and requests in progress have `settings.drain_seconds` to finish.

    Args:
        app: The result of `create_app`.
        settings: The server's settings.
        address: A result of `free_address`.
    """
    server = embed.Server(
        app,
        *address,
        interface=Interfaces.ASGINL,  # the app starts before the port is open
        # In the mode for HTTP/1 and HTTP/2, connections that send nothing would stay open.
        http=HTTPModes.http1,
        http1_settings=HTTP1Settings(
            header_read_timeout=round(1000 * settings.header_seconds),
            max_buffer_size=MAX_HEAD_BYTES,
        ),
        websockets=False,
        backlog=CONNECTIONS,
        log_enabled=False,
        log_dictconfig={"incremental": True, "handlers": {}, "loggers": {}},  # changes nothing
    )
    async with app.router.lifespan_context(app):
        serving = asyncio.create_task(server.serve())
        await _connected(address)
        yield
        app.state.stopping = True
        app.state.admission.finish_by(asyncio.get_running_loop().time() + settings.drain_seconds)
        server.stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(serving, settings.drain_seconds + 1)


async def _connected(address: tuple[str, int]) -> None:
    """Return when the port is open."""
    while True:
        with contextlib.suppress(ConnectionError):
            _, writer = await asyncio.open_connection(*address)
            writer.close()
            return
        await asyncio.sleep(0.01)
