"""The server as an ASGI application."""

import contextlib
import functools
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from keras_preact.serving import (
    loading,
    metrics,
    open_inference_api,
    tf_serving_api,
    triton_api,
    webpage,
)
from keras_preact.serving.gate import Admission, Gate
from keras_preact.serving.metrics import Metrics
from keras_preact.serving.open_inference_api import HEADER
from keras_preact.serving.repository import Repository
from keras_preact.serving.settings import Settings


def create_app(
    settings: Settings, repository: Repository | None = None, replica: str | None = None
) -> Starlette:
    """Return an ASGI application that serves the models in a directory.

    It starts and stops the repository in its lifespan. A server that stops should set
    `app.state.stopping` first: the app then says that it is not ready, and still
    answers requests.

    Args:
        settings: The server's settings.
        repository: Lends the models. Default: a `Repository` of `settings.directory`.
        replica: Name of this process if several share one address. It labels the
            metrics; without it the counters of all processes would look like one.

    Example:
        >>> app = create_app(Settings("saved_models"))  # doctest: +SKIP
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.parser = ThreadPoolExecutor(1, "parser")
        try:
            await app.state.repository.start()
            yield
        finally:
            app.state.stopping = True
            await app.state.repository.stop()
            app.state.parser.shutdown(wait=False)

    routes = [
        *tf_serving_api.routes,
        *triton_api.routes,
        *open_inference_api.routes,
        *metrics.routes,
        *webpage.routes,
    ]
    # The router tries one route after the other: most requests are for a network's outputs.
    routes.sort(key=lambda route: "POST" not in (getattr(route, "methods", None) or ()))
    app = Starlette(routes=routes, lifespan=lifespan)
    app.router.redirect_slashes = False  # a redirect would be the only answer that is not JSON
    measured = Metrics()
    # in place of Starlette's own layers, which would do the same a second time
    app.middleware_stack = Gate(app.router, settings, measured)
    if settings.allowed_origins is not None:
        # before the gate: a browser asks for permission without the token
        app.middleware_stack = CORSMiddleware(
            app.middleware_stack,
            settings.origins(),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", HEADER, "X-Request-Id"],
            expose_headers=[HEADER, "Retry-After", "X-Model-Version", "X-Request-Id"],
        )
    load = functools.partial(loading.load, metrics=measured)
    app.state.settings = settings
    app.state.repository = repository or Repository(settings, load)
    app.state.admission = Admission(settings, measured)
    app.state.metrics = measured
    app.state.replica = replica
    app.state.stopping = False
    return app
