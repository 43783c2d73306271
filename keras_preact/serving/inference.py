"""What both inference APIs share: how a request is taken in, given its time and a
model, and answered.
"""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from keras_preact.serving.admission import Disconnected
from keras_preact.serving.errors import DeadlineExceeded, RequestError
from keras_preact.serving.tensors import INLINE_BYTES

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class Workers:
    """Threads that read and write large bodies; their small number bounds the memory
    that parsing takes.
    """

    def __init__(self, threads: int = 2):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="bodies")

    async def run(
        self,
        size: int,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Return what `function` does with `size` bytes, in a thread where that takes
        long.
        """
        call = functools.partial(function, *args, **kwargs)
        return (
            call()
            if size <= INLINE_BYTES
            else await asyncio.get_running_loop().run_in_executor(self._pool, call)
        )

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def inference(
    handler: Callable[Concatenate[Request, bytes, float, Arguments], Awaitable[Response]],
) -> Callable[Concatenate[Request, Arguments], Awaitable[Response]]:
    """Return the endpoint of a `handler(request, body, deadline)`, cut off at the
    deadline or when the client goes.
    """

    @functools.wraps(handler)
    async def endpoint(
        request: Request, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Response:
        state = request.app.state
        seconds = state.settings.deadline_seconds
        with state.admission.slot():
            async with state.admission.body(request) as body:
                deadline = asyncio.get_running_loop().time() + seconds
                try:
                    async with asyncio.timeout_at(deadline):
                        return await _while_connected(
                            request, handler(request, body, deadline, *args, **kwargs)
                        )
                except TimeoutError:
                    raise DeadlineExceeded(
                        f"The answer did not come within {seconds:g} seconds. Send it again later."
                    ) from None

    return endpoint


@contextlib.contextmanager
def leased(request: Request) -> Iterator[Any]:
    """Give the servable that the path of a request names; it stays loaded until the
    context ends.

    Raises:
        NotFound, Unavailable: if there is none.
    """
    name, version = request.path_params["name"], version_of(request)
    with request.app.state.repository.lease(name, version) as servable:
        # Only now: names that clients make up would be new series of the metrics.
        request.state.model, request.state.version = servable.name, servable.version
        yield servable


def version_of(request: Request) -> int | None:
    """Return the version that the path of a request names, if it does."""
    text = request.path_params.get("version")
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise RequestError("A version must be a whole number, as in versions 1 or 2.")
    return int(text)


def json_response(content: Any, status: int = 200) -> Response:
    """Return an answer of JSON; arrays of NumPy may be in it."""
    return Response(
        orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY),
        status,
        media_type="application/json",
    )


async def _while_connected(request: Request, work: Awaitable[Result]) -> Result:
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
