"""Ray Serve: the options, and a deployment on a Ray of its own, asked through Ray's
HTTP proxy.
"""

import asyncio
import importlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from keras_preact.serving.settings import Settings
from tests.keras_preact.serving import server_process as client
from tests.keras_preact.serving import small_model
from tests.training.commands import ROOT, finish

MODULE = "keras_preact.serving.ray_serve"
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed (pip install 'keras-preact[ray,serving]')",
)


def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(ImportError, match=r"pip install 'keras-preact\[ray,serving\]'"):
        importlib.import_module(MODULE)


@pytest.fixture
def build():
    """Return a function that builds an application, and returns Ray's description of it
    and the settings of a replica.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own use of what pydantic will remove
        from keras_preact.serving import ray_serve

    def build(**options):
        deployment = ray_serve.build(options)._bound_deployment
        [settings] = deployment.init_args
        return deployment, settings

    return build


@needs_ray
def test_options(build, monkeypatch):
    monkeypatch.chdir("/tmp")
    monkeypatch.setenv("KERAS_PREACT_TOKEN", "secret")
    text = {
        "directory": "models",
        "replicas": "2",
        "num_cpus": "4",
        "max_requests": "7",
        "batching": "false",
        "versions": "all",
    }
    deployment, settings = build(**text, drain_seconds="3.5", deadline_seconds=2)
    assert (settings.directory, settings.max_requests, settings.batching) == (
        Path("/tmp/models"),
        7,
        False,
    )
    assert (settings.versions, settings.drain_seconds, settings.threads, settings.token) == (
        None,
        3.5,
        4,
        "secret",
    )
    assert deployment.num_replicas == 2
    assert deployment.max_ongoing_requests == deployment.max_queued_requests == 7
    assert deployment.ray_actor_options["num_cpus"] == 4
    assert deployment._deployment_config.graceful_shutdown_timeout_s == 5.5

    deployment, settings = build(
        directory=Path("/models"), max_replicas=3, target_requests=2.5, num_cpus=0.5, token="other"
    )
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (
        1,
        3,
        2.5,
    )
    assert (settings.threads, settings.token, settings.versions) == (1, "other", 1)
    assert build(directory="/models", threads=3)[1].threads == 3


@needs_ray
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "`directory` must be given: the folder of models. Received: nothing"),
        ({"directory": "m", "replica": 2}, "Unknown option. Did you mean 'replicas'"),
        ({"directory": "m", "port": 8000}, "Unknown option.*Received: option='port'"),
        (
            {"directory": "m", "replicas": 0},
            "`replicas`: .*greater than 0. Received: replicas=0",
        ),
        ({"directory": "m", "replicas": "two"}, "`replicas`: .*integer.* Received: replicas='two'"),
        (
            {"directory": "m", "replicas": 3, "max_replicas": 2},
            "at least replicas=3. Received: max_replicas=2",
        ),
        (
            {"directory": "m", "num_cpus": "-1"},
            "`num_cpus`: .*equal to 0. Received: num_cpus='-1'",
        ),
        ({"directory": "m", "target_requests": 0}, "`target_requests`: .*equal to 0.01"),
        (
            {"directory": "m", "max_queue": "0"},
            "`max_queue`: .*greater than 0. Received: max_queue='0'",
        ),
        ({"directory": "m", "versions": "newest"}, "`versions`: .*Received: versions='newest'"),
    ],
)
def test_bad_options(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


@needs_ray
def test_a_replica_with_nothing_to_serve_is_not_healthy(tmp_path, build):
    from keras_preact.serving.ray_serve import ModelServer

    async def check() -> None:
        replica = ModelServer(Settings(tmp_path))
        app = replica.__serve_build_asgi_app__()
        async with app.router.lifespan_context(app):
            await replica.check_health()

    with pytest.raises(RuntimeError, match="No model is available in"):
        asyncio.run(check())
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "saved_model.pb").write_text("no")
    with pytest.raises(RuntimeError, match=r"broken version 1: END\. .*card"):
        asyncio.run(check())
    small_model.write(tmp_path / "pictures" / "1")
    asyncio.run(check())


# Serves DIRECTORY as `serve run` does, sends the requests that stand on stdin, and prints the
# answers.
DRIVER = """
import http.client, json, sys

import ray
from ray import serve
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as call

from keras_preact.serving.ray_serve import build

temporary, directory, port = sys.argv[1:]
requests = json.load(sys.stdin)
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, _temp_dir=temporary)
try:
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(call(build, {"directory": directory, "num_cpus": "1", "drain_seconds": "5"}))
    answers = []
    for method, path, body in requests:
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=120)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answers.append((response.status, response.read().decode()))
        connection.close()
    print("ANSWERS" + json.dumps(answers))
    serve.shutdown()
finally:
    ray.shutdown()
"""


@pytest.fixture
def ray_driver(free_port):
    """Return a function that runs DRIVER and returns the answers, and end what is left
    of Ray.
    """
    temporary = Path(
        tempfile.mkdtemp(prefix="ray", dir="/tmp")
    )  # short: the names of sockets have no room for more
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # on busy cores its proxy takes longer than the 5 s that Ray waits
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "PYTHONUNBUFFERED": "1",
    }

    def run(directory: Path, requests: list) -> list:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        # stderr stands in the output: Ray's processes hold it, and would be waited for
        requests_file = temporary / "requests.json"
        requests_file.write_text(json.dumps(requests))
        with requests_file.open() as stdin:
            process = subprocess.Popen(
                [sys.executable, "-c", DRIVER, str(temporary), str(directory), str(free_port)],
                cwd=temporary,
                env=kept | settings | {"PYTHONPATH": str(ROOT)},
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            status, out, _ = finish(process, timeout=400)
        assert status == 0, out
        assert "Traceback" not in out, out
        [answers] = [
            line.removeprefix("ANSWERS") for line in out.splitlines() if line.startswith("ANSWERS")
        ]
        return json.loads(answers)

    yield run
    shutil.rmtree(temporary, ignore_errors=True)


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@needs_ray
@pytest.mark.soak
def test_ray_serves_what_the_saved_model_computes(tmp_path, ray_driver):
    version = client.export(tmp_path / "models")
    (tmp_path / "models" / "broken" / "1").mkdir(parents=True)
    (tmp_path / "models" / "broken" / "1" / "saved_model.pb").write_text("no")
    images = client.random_images(0, 3)
    predicted, state, broken, bad, unknown, metrics = ray_driver(
        tmp_path / "models",
        [
            ("POST", client.PREDICT, client.predict_body(images).decode()),
            ("GET", f"/v1/models/{client.NAME}", None),
            ("GET", "/v1/models/broken", None),
            ("POST", client.PREDICT, client.predict_body(images[:, 1:]).decode()),
            ("POST", "/v1/models/other:predict", client.predict_body(images).decode()),
            ("GET", "/metrics", None),
        ],
    )
    assert predicted[0] == 200, predicted
    client.check_probabilities(
        json.loads(predicted[1]), client.SavedModel(version).probabilities(images)
    )
    assert state[0] == broken[0] == 200
    assert [json.loads(one[1])["model_version_status"][0]["state"] for one in (state, broken)] == [
        "AVAILABLE",
        "END",
    ]
    assert (bad[0], unknown[0]) == (400, 404), (bad, unknown)
    samples = [line for line in metrics[1].splitlines() if not line.startswith("#")]
    assert samples
    assert all('replica="' in line for line in samples)
    for status, body in (bad, unknown):
        client.check_refusal(status, json.loads(body))
