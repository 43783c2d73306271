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

#: Bytes of a request's headers.
MAX_HEAD_BYTES = 64 * 1024
#: Connections that wait to be accepted, and most that are open. Of 600 clients at once, 128 places
#: cut off up to 63.
CONNECTIONS = 1024


def free_address(host: str, port: int) -> tuple[str, int]:
    """Return the numeric address of a host, and the port, or a free one for 0.

    Raises:
        OSError: if it cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without SO_REUSEPORT, as granian has it: two servers would share the port.
    with socket.create_server((host, port), family=family) as probe:
        return probe.getsockname()[:2]


@contextlib.asynccontextmanager
async def running(
    app: Starlette, settings: Settings, address: tuple[str, int]
) -> AsyncIterator[None]:
    """Serve an app until the context ends; it begins when connections are accepted.

    At the end the app says at once that it is not ready, no connection is accepted any
    more, and requests in progress have `settings.drain_seconds` to finish.

    Args:
        app: The result of `create_app`.
        settings: The server's settings.
        address: A result of `free_address`.
    """
    server = embed.Server(
        app,
        *address,
        interface=Interfaces.ASGINL,  # the app starts before the port is open
        # In the mode for both versions, connections that send nothing would stay open.
        http=HTTPModes.http1,
        http1_settings=HTTP1Settings(
            header_read_timeout=round(1000 * settings.header_seconds),
            max_buffer_size=MAX_HEAD_BYTES,
        ),
        websockets=False,
        backlog=CONNECTIONS,
        log_enabled=False,
        log_dictconfig={"incremental": True, "handlers": {}, "loggers": {}},  # keep the process's
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
