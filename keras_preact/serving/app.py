"""The server as an ASGI application."""

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator

from starlette.applications import Starlette
from starlette.types import ASGIApp

from keras_preact.serving import loading, metrics, open_inference_api, tf_serving_api, webpage
from keras_preact.serving.gate import Admission, Gate, Workers, inference
from keras_preact.serving.metrics import Metrics
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
        replica: The name of this process among several behind one address, for the
            metrics.

    Example:
        >>> app = create_app(Settings("saved_models"))  # doctest: +SKIP
        >>> uvicorn.run(app, port=8501)  # doctest: +SKIP
    """
    admission = Admission(settings)
    measured = Metrics(
        lambda: admission.requests,
        lambda: _waiting(app.state.repository),
        lambda: _available(app.state.repository),
        replica,
    )
    if repository is None:
        repository = Repository(settings, functools.partial(loading.load, metrics=measured))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.workers = Workers()
        try:
            await app.state.repository.start()
            yield
        finally:
            app.state.stopping = True
            await app.state.repository.stop()
            app.state.workers.close()

    routes = [
        *tf_serving_api.routes,
        *open_inference_api.routes,
        *metrics.routes,
        *webpage.routes,
    ]
    # The router tries one after the other, and no two match the same path.
    routes.sort(key=lambda route: not isinstance(getattr(route, "endpoint", None), inference))
    app = _App(lambda router: Gate(router, settings, measured), routes, lifespan)
    app.router.redirect_slashes = False  # a redirect would be the only answer that is not JSON
    app.state.settings = settings
    app.state.repository = repository
    app.state.admission = admission
    app.state.metrics = measured
    app.state.stopping = False
    return app


class _App(Starlette):
    """Starlette's router with a gate around it in place of its own layers, which would
    do what the gate does a second time.
    """

    def __init__(self, gate: Callable[[ASGIApp], ASGIApp], routes, lifespan):
        self._gate = gate
        super().__init__(routes=routes, lifespan=lifespan)

    def build_middleware_stack(self) -> ASGIApp:
        return self._gate(self.router)


def _waiting(repository: Repository) -> Iterator[tuple[str, int, int]]:
    for name in repository.names():
        for version in repository.available(name):
            with repository.lease(name, version) as one:
                yield name, version, one.waiting


def _available(repository: Repository) -> Iterator[tuple[str, int]]:
    for name in repository.names():
        yield name, len(repository.available(name))
