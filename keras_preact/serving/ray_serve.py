"""The server as a Ray Serve application, in several processes on one machine or many,
as many as the requests ask for.

serve run keras_preact.serving.ray_serve:build directory=/shared/saved_models
max_replicas=8

Ray's proxy does not repeat a request whose replica dies: the client gets its status 500
without JSON, and may send the request again, which changes nothing on a server.
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

#: Settings of the process that listens: here that is Ray's own.
_OF_THE_LISTENER = {"host", "port", "header_seconds"}


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Replicas:
    """How many processes serve, and the resources that Ray reserves for each.

    Raises:
        ValueError: for a value that cannot work.
    """

    replicas: Annotated[int, Field(gt=0)] = option(1, "processes; with max_replicas, the fewest")
    max_replicas: int | None = option(None, "most processes that Ray starts; default: replicas")
    target_requests: Annotated[float, Field(ge=0.01)] = option(
        8.0, "average requests per process beyond which Ray starts another"
    )
    num_cpus: Annotated[float, Field(ge=0)] = option(
        1.0, "cores of each; its computations have as many threads by default"
    )
    num_gpus: Annotated[float, Field(ge=0)] = option(0.0, "GPUs of each")

    @pydantic.model_validator(mode="after")
    def _check_most(self):
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"`max_replicas` must be at least replicas={self.replicas}. Received: "
                f"max_replicas={self.max_replicas}"
            )
        return self


class ModelServer:
    """A replica: the app and its repository, made in Ray's process, where every model
    is loaded once.
    """

    def __init__(self, settings: Settings):
        self._settings = settings

    def __serve_build_asgi_app__(self):
        from keras_preact.serving.app import create_app

        # Each scrape through Ray's proxy reaches one of the replicas.
        self._repository_app = create_app(self._settings, replica=uuid.uuid4().hex[:8])
        return self._repository_app

    async def check_health(self) -> None:
        """Raise a RuntimeError if nothing can be served; Ray then starts the replica
        anew, or does not begin to use it.

        One model that fails to load beside others is no reason for that: the others
        would be lost, and it would fail again.
        """
        repository = self._repository_app.state.repository
        if not repository.servables():
            reasons = [
                f"{name} version {version.version}: {version.state}. {version.error_message}"
                for name in repository.names()
                for version in repository.status(name)
            ]
            raise RuntimeError(
                f"No model is available in {self._settings.directory}. {' '.join(reasons)}"
            )


def build(options: Mapping[str, Any]) -> serve.Application:
    """Return a Ray Serve application, for `serve.run`; the builder of one, for `serve
    run` and configuration files.

    Args:
        options: `directory`, which all machines must see under the same path, and any
            other setting of `Settings` and `Replicas` by name; strings are converted.
            `versions` may be "all". The proxy in front has Ray's own settings (`serve
            start --http-host --http-port`). The environment variable
            `KERAS_PREACT_TOKEN` holds the `token`, if it is not given.

    Raises:
        ValueError: for an unknown option, or a value that cannot work.

    Example:
        >>> from ray import serve  # doctest: +SKIP
        >>> options = {"directory": "saved_models", "replicas": 2, "num_cpus": 4}
        >>> serve.run(build(options))  # doctest: +SKIP
    """
    of_replicas = {field.name for field in dataclasses.fields(Replicas)}
    known = {field.name for field in dataclasses.fields(Settings)} - _OF_THE_LISTENER | of_replicas
    for name in options:
        _checks.lookup(dict.fromkeys(known), name, "option")
    if "directory" not in options:
        raise ValueError(
            "`directory` must be given: the folder of models. Received: "
            f"{', '.join(options) or 'nothing'}"
        )

    replicas = read(Replicas, {k: v for k, v in options.items() if k in of_replicas})
    settings = read(Settings, {k: v for k, v in options.items() if k not in of_replicas})
    settings = dataclasses.replace(
        settings,
        # replicas have working directories of their own
        directory=settings.directory.absolute(),
        # Ray's proxy listens, and the default of this setting is for a local server
        allowed_hosts=settings.allowed_hosts or "*",
        threads=settings.threads or max(1, int(replicas.num_cpus)),
    )
    number: dict[str, Any] = {"num_replicas": replicas.replicas}
    if replicas.max_replicas is not None:
        limits = {"min_replicas": replicas.replicas, "max_replicas": replicas.max_replicas}
        number = {
            "autoscaling_config": limits | {"target_ongoing_requests": replicas.target_requests}
        }
    deployment = serve.deployment(
        serve.ingress()(ModelServer),
        name="keras_preact",
        # What a replica would refuse waits for another, and as much again; the proxy refuses the
        # rest with status 503.
        max_ongoing_requests=settings.max_requests,
        max_queued_requests=settings.max_requests,
        graceful_shutdown_timeout_s=settings.deadline_seconds + settings.drain_seconds,
        ray_actor_options={"num_cpus": replicas.num_cpus, "num_gpus": replicas.num_gpus},
        **number,
    )
    return deployment.bind(settings)
