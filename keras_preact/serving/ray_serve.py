"""The server as a Ray Serve application, in several processes on one machine or many,
as many as the requests ask for.

serve run keras_preact.serving.ray_serve:build directory=/shared/saved_models
max_replicas=8
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from keras_preact import _checks
from keras_preact.serving.settings import Settings

try:
    import pydantic
    from ray import serve
except ImportError as error:
    message = f"keras_preact.serving.ray_serve needs Ray Serve: pip install 'keras-preact[ray,serving]'. ({error})"
    raise ImportError(message) from error

T = TypeVar("T")

#: Settings of the process that listens, which is Ray's own here.
_OF_THE_LISTENER = {"host", "port", "header_seconds"}


@dataclasses.dataclass(frozen=True)
class Replicas:
    """How many processes serve, and what Ray reserves for each.

    Args:
        replicas: How many there are; with `max_replicas`, the least.
        max_replicas: The most that Ray starts. `None`: it starts no more than
            `replicas`.
        target_requests: Requests in progress for each replica, on average, beyond which
            Ray starts another.
        num_cpus: Cores of each. Its computations have as many threads, unless `threads`
            is set.
        num_gpus: GPUs of each.

    Raises:
        ValueError: for a value that cannot work.
    """

    replicas: int = 1
    max_replicas: int | None = None
    target_requests: float = 8.0
    num_cpus: float = 1.0
    num_gpus: float = 0.0

    def __post_init__(self):
        _checks.positive_int(self.replicas, "replicas")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"`max_replicas` must be at least replicas={self.replicas}. Received: "
                f"max_replicas={self.max_replicas}"
            )
        for name, least in (("target_requests", 0.01), ("num_cpus", 0), ("num_gpus", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"`{name}` must be at least {least}. Received: {name}={getattr(self, name)}"
                )


class ModelServer:
    """A replica: the app and its repository, made in Ray's process, where every model
    is loaded once.
    """

    def __init__(self, settings: Settings):
        self._settings = settings

    def __serve_build_asgi_app__(self):
        from keras_preact.serving.app import create_app

        self._repository_app = create_app(self._settings)
        return self._repository_app

    async def check_health(self) -> None:
        """Raise a RuntimeError if nothing can be served; Ray then starts the replica
        anew, or does not begin to use it.

        One model that fails to load beside others is no reason for that: the others
        would be lost, and it would fail again.
        """
        repository = self._repository_app.state.repository
        found = [
            (name, version) for name in repository.names() for version in repository.status(name)
        ]
        if not any(version.state == "AVAILABLE" for _, version in found):
            reasons = [
                f"{name} version {version.version}: {version.state}. {version.error_message}"
                for name, version in found
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
        >>> serve.run(build({"directory": "saved_models", "replicas": 2, "num_cpus": 4}))  # doctest: +SKIP
    """
    given = dict(options)
    if given.get("versions") == "all":
        given["versions"] = None
    if token := os.environ.get("KERAS_PREACT_TOKEN", "").strip():
        given.setdefault("token", token)
    of_replicas = {field.name for field in dataclasses.fields(Replicas)}
    known = {field.name for field in dataclasses.fields(Settings)} - _OF_THE_LISTENER | of_replicas
    for name in given:
        _checks.lookup(dict.fromkeys(known), name, "option")
    if "directory" not in given:
        raise ValueError(
            "`directory` must be given: the folder of models. Received: "
            f"{', '.join(given) or 'nothing'}"
        )

    replicas = _convert(
        Replicas, {name: value for name, value in given.items() if name in of_replicas}
    )
    settings = _convert(
        Settings, {name: value for name, value in given.items() if name not in of_replicas}
    )
    settings = dataclasses.replace(
        settings,
        directory=Path(
            os.path.abspath(settings.directory)
        ),  # replicas have working directories of their own
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


def _convert(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return `cls(**values)`; values that came as text get the types that it names."""
    try:
        return pydantic.TypeAdapter(cls).validate_python(values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        if "error" in first.get("ctx", {}):  # from the class's own check
            raise ValueError(str(first["ctx"]["error"])) from None
        name = first["loc"][0]
        raise ValueError(f"`{name}`: {first['msg']}. Received: {name}={first['input']!r}") from None
