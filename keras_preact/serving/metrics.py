"""The metrics that Prometheus reads at `/metrics`."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_VERSION = ["model", "version"]


class Metrics(Collector):
    """The metrics of one server, in a registry of its own. Labels take few values:
    models and versions that were loaded.

    Args:
        waiting: Returns the images that wait, for each available version of each model:
            `{model: {version: images}}`.
        replica: The name of one of several processes behind one address: a label of
            each sample, without which their counters would look like one.
    """

    def __init__(
        self, waiting: Callable[[], dict[str, dict[int, int]]], replica: str | None = None
    ):
        self._waiting = waiting
        self._labels = {} if replica is None else {"replica": replica}
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self)
        self.requests = Counter(
            "keras_preact_requests",
            "Requests answered. `api`: the operation; `model`, `version`: empty where none was "
            "reached.",
            ["api", *_VERSION, "status"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            "keras_preact_request_seconds",
            "Seconds from the headers of a request to its answer.",
            ["api", *_VERSION],
            buckets=_SECONDS,
            registry=registry,
        )
        self.batch_rows = Histogram(
            "keras_preact_batch_rows",
            "Images that the network computed at once.",
            _VERSION,
            buckets=_ROWS,
            registry=registry,
        )
        self.batch_seconds = Histogram(
            "keras_preact_batch_seconds",
            "Seconds that the network took for a batch.",
            _VERSION,
            buckets=_SECONDS,
            registry=registry,
        )
        self.in_progress = Gauge(
            "keras_preact_requests_in_progress", "Requests in progress.", registry=registry
        )
        self.dropped_lines = Gauge(
            "keras_preact_log_lines_dropped",
            "Lines of the log that were dropped: what reads it is too slow.",
            registry=registry,
        )

    def collect(self) -> Iterable[Metric]:
        """Read the queues: those of models that are gone leave no series."""
        images = GaugeMetricFamily(
            "keras_preact_queue_images",
            "Images that wait for the network, or to be decoded.",
            labels=_VERSION,
        )
        available = GaugeMetricFamily(
            "keras_preact_model_available_versions",
            "Versions that answer requests; 0 for a model of which none could be loaded.",
            labels=["model"],
        )
        for model, versions in self._waiting().items():
            available.add_metric([model], len(versions))
            for version, waiting in versions.items():
                images.add_metric([model, str(version)], waiting)
        return [images, available]

    def shown(self, accept: str) -> Response:
        """Return the answer to a scrape."""
        families = list(self.registry.collect())
        for family in families:
            family.samples = [
                one._replace(labels=one.labels | self._labels) for one in family.samples
            ]
        registry = CollectorRegistry()
        registry.collect = lambda: families  # type: ignore[method-assign]
        encode, content_type = choose_encoder(accept)
        return Response(encode(registry), headers={"Content-Type": content_type})


async def metrics(request: Request) -> Response:
    """Answer Prometheus."""
    return request.app.state.metrics.shown(request.headers.get("accept", ""))


routes = [Route("/metrics", metrics)]
