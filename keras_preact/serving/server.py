"""The HTTP server: granian, in this process and its event loop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

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


@contextlib.contextmanager
def reserved(host: str, port: int) -> Iterator[tuple[str, int]]:
    """Keep a port until the context ends, without listening on it: models take a while to
    load. Yield the result of `free_address`.

    Raises:
        OSError: if no server can listen on the port.
    """
    address = free_address(host, port)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder:
        # The server itself may bind the port beside this socket, because this one does not listen.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(address)
        yield address


class NotListening(Exception):
    """The HTTP server cannot listen, or has ended; the message is a sentence."""


@contextlib.asynccontextmanager
async def running(
    app: Starlette, settings: Settings, address: tuple[str, int]
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve an app until the context ends. The context begins when the server accepts
    connections, and yields its task, which ends earlier only if the server fails.

    At its end the app says at once that it is not ready, no new connection is accepted,
    and requests in progress have `settings.drain_seconds` to finish.

    Args:
        app: The result of `create_app`.
        settings: The server's settings.
        address: A result of `free_address`.

    Raises:
        NotListening: if another program has taken the port meanwhile, or the server
            ends at once.
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
        try:
            free_address(*address)  # else the connection below could be another program's
        except OSError as error:
            raise NotListening(str(error.strerror or error)) from error
        serving = asyncio.create_task(server.serve())
        connected = asyncio.create_task(_connected(address))
        await asyncio.wait({serving, connected}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            connected.cancel()
            raise NotListening(f"the HTTP server ended ({serving.exception()})")
        yield serving
        app.state.stopping = True
        app.state.admission.finish_by(asyncio.get_running_loop().time() + settings.drain_seconds)
        server.stop()
        await asyncio.wait({serving}, timeout=settings.drain_seconds + 1)


async def _connected(address: tuple[str, int]) -> None:
    """Return when the port is open."""
    while True:
        with contextlib.suppress(ConnectionError):
            _, writer = await asyncio.open_connection(*address)
            writer.close()
            return
        await asyncio.sleep(0.01)
