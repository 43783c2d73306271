"""The server as a Ray Serve application: several processes on one machine or many.
Their number follows the load.

    serve run keras_preact.serving.ray_serve:build directory=/models max_replicas=8

If a replica dies, Ray's proxy does not repeat its requests: the clients get status 500
without JSON. They may send the requests again, because a request changes nothing on a
server.
"""

import dataclasses
import uuid
from collections.abc import Mapping
from typing import Annotated, Any

from keras_preact import _checks

try:
    import pydantic
    from pydantic import Field
    from ray import serve

    from keras_preact.serving.settings import STRICT, Settings, option, read
except ImportError as error:
    raise ImportError(
        "keras_preact.serving.ray_serve needs Ray Serve: pip install 'keras-preact[ray,serving]'. "
        f"({error})"
    ) from error

#: Settings of the process that listens. Here this is Ray's proxy.
_PROXY_SETTINGS = ("host", "port", "header_seconds")


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Replicas(Settings):
    """The settings of a server, how many processes serve, and the resources that Ray
    reserves for each.

    Raises:
        ValueError: for a value that cannot work.
    """

    replicas: Annotated[int, Field(gt=0)] = option(
        1, "number of processes; with max_replicas, the smallest number"
    )
    max_replicas: Annotated[int, Field(gt=0)] | None = option(
        None, "largest number of processes that Ray starts; default: replicas"
    )
    target_requests: Annotated[float, Field(ge=0.01)] = option(
        8.0, "average requests per process beyond which Ray starts another"
    )
    num_cpus: Annotated[float, Field(ge=0)] = option(
        1.0, "cores per process; by default its computations use as many threads"
    )
    num_gpus: Annotated[float, Field(ge=0)] = option(0.0, "GPUs per process")


class ModelServer:
    """A replica: the app and its repository in a process of Ray. Every process loads
    every model once.
    """

    def __init__(self, settings: Settings):
        self._settings = settings

    def __serve_build_asgi_app__(self):
        from keras_preact.serving.app import create_app

        # Each scrape through Ray's proxy reaches only one of the replicas.
        self._repository_app = create_app(self._settings, replica=uuid.uuid4().hex[:8])
        return self._repository_app

    async def check_health(self) -> None:
        """Raise a RuntimeError if nothing can be served. Ray then restarts the replica,
        or does not start to use it.

        If one of several models fails to load, the replica is healthy: after a restart
        the model would fail again, and the others would be interrupted.
        """
        if not self._repository_app.state.repository.servables():
            raise RuntimeError(
                f"No model is available in {self._settings.directory}; the log says why."
            )


def build(options: Mapping[str, Any]) -> serve.Application:
    """Return a Ray Serve application for `serve.run`. The command `serve run` and
    configuration files name this function as a builder.

    Args:
        options: `directory`, which all machines must see under the same path, and any
            other setting of `Replicas` by name; strings are converted. `versions` may
            be "all". Ray's proxy has its own settings (`serve start --http-host
            --http-port`). The environment variable `KERAS_PREACT_TOKEN` holds the
            `token`, if it is not given.

    Raises:
        ValueError: for an unknown option, or a value that cannot work.

    Example:
        >>> from ray import serve  # doctest: +SKIP
        >>> options = {"directory": "saved_models", "replicas": 2, "num_cpus": 4}
        >>> serve.run(build(options))  # doctest: +SKIP
    """
    known = {
        one.name: one for one in dataclasses.fields(Replicas) if one.name not in _PROXY_SETTINGS
    }
    for name in options:
        _checks.lookup(known, name, "option")
    chosen = read(Replicas, options)
    settings = dataclasses.replace(
        chosen,
        # replicas have working directories of their own
        directory=chosen.directory.absolute(),
        # Ray's proxy listens, and the default of this setting is for a local server
        allowed_hosts=chosen.allowed_hosts or "*",
        threads=chosen.threads or max(1, int(chosen.num_cpus)),
    )
    deployment = serve.deployment(
        serve.ingress()(ModelServer),
        name="keras_preact",
        # A request that a replica would refuse waits for another replica. At most max_requests
        # wait; the proxy refuses further requests with status 503.
        max_ongoing_requests=settings.max_requests,
        max_queued_requests=settings.max_requests,
        graceful_shutdown_timeout_s=settings.deadline_seconds + settings.drain_seconds,
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        autoscaling_config={
            "min_replicas": settings.replicas,
            "max_replicas": settings.max_replicas or settings.replicas,
            "target_ongoing_requests": settings.target_requests,
        },
    )
    return deployment.bind(settings)
