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
_LOAD_SECONDS = (0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics(Collector):
    """The metrics of one server, in a registry of its own. Labels take few values:
    models and versions that were loaded.

    Args:
        in_progress: Returns the number of requests in progress.
        waiting: Returns the images that wait, as `(model, version, images)`.
        available: Returns the number of available versions, as `(model, versions)`.
        replica: The name of one of several processes behind one address: a label of
            each sample, without which their counters would look like one.
    """

    def __init__(
        self,
        in_progress: Callable[[], int],
        waiting: Callable[[], Iterable[tuple[str, int, int]]],
        available: Callable[[], Iterable[tuple[str, int]]] = list,
        replica: str | None = None,
    ):
        self._waiting = waiting
        self._available = available
        self._replica = replica
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self)
        self.requests = Counter(
            "keras_preact_requests",
            "Requests answered. `api`: the operation; `model`, `version`: empty where none was "
            "reached.",
            ["api", "model", "version", "status"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            "keras_preact_request_seconds",
            "Seconds from the headers of a request to its answer.",
            ["api", "model", "version"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.batch_rows = Histogram(
            "keras_preact_batch_rows",
            "Images that the network computed at once.",
            ["model", "version"],
            buckets=_ROWS,
            registry=registry,
        )
        self.batch_seconds = Histogram(
            "keras_preact_batch_seconds",
            "Seconds that the network took for a batch.",
            ["model", "version"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.load_seconds = Histogram(
            "keras_preact_model_load_seconds",
            "Seconds that loading a version and its warm-up took.",
            ["model"],
            buckets=_LOAD_SECONDS,
            registry=registry,
        )
        self.loads = Counter(
            "keras_preact_model_loads",
            "Versions loaded, or tried in vain.",
            ["model", "outcome"],
            registry=registry,
        )
        Gauge(
            "keras_preact_requests_in_progress", "Requests in progress.", registry=registry
        ).set_function(in_progress)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Read the queues: those of models that are gone leave no series."""
        gauge = GaugeMetricFamily(
            "keras_preact_queue_images",
            "Images that wait for the network, or to be decoded.",
            labels=["model", "version"],
        )
        for model, version, images in self._waiting():
            gauge.add_metric([model, str(version)], images)
        yield gauge
        gauge = GaugeMetricFamily(
            "keras_preact_model_available_versions",
            "Versions that answer requests; 0 for a model of which none could be loaded.",
            labels=["model"],
        )
        for model, versions in self._available():
            gauge.add_metric([model], versions)
        yield gauge

    def shown(self) -> CollectorRegistry:
        """Return what to show: the registry, with a label for the replica if there is one."""
        if self._replica is None:
            return self.registry
        registry = CollectorRegistry()
        registry.register(_Labelled(self.registry, {"replica": self._replica}))
        return registry

    def count_dropped_lines(self, dropped: Callable[[], int]) -> None:
        """Show how many lines of the log nobody read in time."""
        Gauge(
            "keras_preact_log_lines_dropped",
            "Lines of the log that were dropped: what reads it is too slow.",
            registry=self.registry,
        ).set_function(dropped)


class _Labelled(Collector):
    """The metrics of a registry with more labels."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]):
        self._registry = registry
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            family.samples = [
                sample._replace(labels=sample.labels | self._labels) for sample in family.samples
            ]
            yield family


async def metrics(request: Request) -> Response:
    """Answer Prometheus."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(
        encode(request.app.state.metrics.shown()), headers={"Content-Type": content_type}
    )


routes = [Route("/metrics", metrics)]
