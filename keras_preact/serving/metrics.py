"""The metrics that Prometheus reads at `/metrics`."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_VERSION = ["model", "version"]


class Metrics:
    """The metrics of one server, in a registry of their own. Labels have few values:
    models and versions that were loaded.
    """

    def __init__(self):
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "keras_preact_requests",
            "Requests answered. `api`: the operation; `model`, `version`: empty if the request "
            "reached none.",
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
            "Images per batch that the network computed.",
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
            "Lines of the log that were dropped because its reader is too slow.",
            registry=registry,
        )


class _Scrape(Collector):
    """All current metrics of an app. A model that is gone has no series for its queue."""

    def __init__(self, state: State):
        self._state = state

    def collect(self) -> Iterator[Metric]:
        repository, replica = self._state.repository, self._state.replica
        images = GaugeMetricFamily(
            "keras_preact_queue_images",
            "Images that are being decoded or computed, or that wait.",
            labels=_VERSION,
        )
        for servable in repository.servables():
            images.add_metric([servable.name, str(servable.version)], servable.in_progress)
        available = GaugeMetricFamily(
            "keras_preact_model_available_versions",
            "Versions that answer requests; 0 if no version of the model could be loaded.",
            labels=["model"],
        )
        for name in repository.names():
            available.add_metric([name], len(repository.available(name)))
        problems = GaugeMetricFamily(
            "keras_preact_model_problems",
            "Versions that should be served but fail to load or do not exist, and 1 more each if "
            "the folder or version_policy.json cannot be read, and if the folder has no versions; "
            "the log says why. `model`: empty for the folder of all models.",
            labels=["model"],
        )
        for name, number in repository.problems().items():
            problems.add_metric([name], number)
        replica_label = {} if replica is None else {"replica": replica}
        families = [*self._state.metrics.registry.collect(), images, available, problems]
        for family in families:
            family.samples = [
                one._replace(labels=one.labels | replica_label) for one in family.samples
            ]
            yield family


async def metrics(request: Request) -> Response:
    """Answer Prometheus."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    content = encode(_Scrape(request.app.state))
    return Response(content, headers={"Content-Type": content_type})


routes = [Route("/metrics", metrics)]
