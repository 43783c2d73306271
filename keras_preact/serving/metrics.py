"""What Prometheus reads at `/metrics`."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_LOAD_SECONDS = (0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The metrics of one server, in a registry of its own. Labels take few values:
    models and versions that were loaded.

    Args:
        in_progress: Returns the number of requests in progress.
        waiting: Returns the images that wait, as `(model, version, images)`.
    """

    def __init__(
        self, in_progress: Callable[[], int], waiting: Callable[[], Iterable[tuple[str, int, int]]]
    ):
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_Waiting(waiting))
        self._requests = Counter(
            "keras_preact_requests",
            "Requests answered. `api`: what was asked for; `model`, `version`: empty where none "
            "was reached.",
            ["api", "model", "version", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "keras_preact_request_seconds",
            "Seconds from the headers of a request to its answer.",
            ["api", "model", "version"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._rows = Histogram(
            "keras_preact_batch_rows",
            "Images that the network computed at once.",
            ["model", "version"],
            buckets=_ROWS,
            registry=self.registry,
        )
        self._batch_seconds = Histogram(
            "keras_preact_batch_seconds",
            "Seconds that the network took for a batch.",
            ["model", "version"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._load_seconds = Histogram(
            "keras_preact_model_load_seconds",
            "Seconds that loading a version and its warm-up took.",
            ["model"],
            buckets=_LOAD_SECONDS,
            registry=self.registry,
        )
        self._loads = Counter(
            "keras_preact_model_loads",
            "Versions loaded, or tried in vain.",
            ["model", "outcome"],
            registry=self.registry,
        )
        Gauge(
            "keras_preact_requests_in_progress", "Requests in progress.", registry=self.registry
        ).set_function(in_progress)

    def request(self, api: str, model: str, version: str, status: int, seconds: float) -> None:
        self._requests.labels(api, model, version, str(status)).inc()
        self._seconds.labels(api, model, version).observe(seconds)

    def batch(self, model: str, version: int, rows: int, seconds: float) -> None:
        self._rows.labels(model, str(version)).observe(rows)
        self._batch_seconds.labels(model, str(version)).observe(seconds)

    def load(self, model: str, version: int, seconds: float, error: BaseException | None) -> None:
        self._loads.labels(model, "failure" if error else "success").inc()
        if not error:
            self._load_seconds.labels(model).observe(seconds)


class _Waiting(Collector):
    """Reads the queues when asked: those of models that are gone leave no series
    behind.
    """

    def __init__(self, waiting: Callable[[], Iterable[tuple[str, int, int]]]):
        self._waiting = waiting

    def collect(self):
        gauge = GaugeMetricFamily(
            "keras_preact_queue_images",
            "Images that wait for the network, or to be decoded.",
            labels=["model", "version"],
        )
        for model, version, images in self._waiting():
            gauge.add_metric([model, str(version)], images)
        yield gauge


async def metrics(request: Request) -> Response:
    """Answer Prometheus."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(
        encode(request.app.state.metrics.registry), headers={"Content-Type": content_type}
    )


routes = [Route("/metrics", metrics)]
