"""Ray Serve: the options, and a deployment on a Ray of its own, asked through Ray's
HTTP proxy.
"""

import asyncio
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from keras_preact.serving.settings import Settings
from tests.keras_preact.serving import server_process as client
from tests.training.calls import ROOT, finish

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
def ray_serve():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own use of what pydantic will remove
        return importlib.import_module(MODULE)


@needs_ray
def test_options(ray_serve, monkeypatch):
    monkeypatch.setenv("KERAS_PREACT_TOKEN", "secret")
    text = {"replicas": "2", "num_cpus": "4", "max_requests": "7", "versions": "all"}
    deployment = ray_serve.build({"directory": "models"} | text)._bound_deployment
    [settings] = deployment.init_args
    assert (settings.directory, settings.max_requests) == (Path("models").absolute(), 7)
    assert (settings.versions, settings.threads, settings.token) == (None, 4, "secret")
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 2)
    assert deployment.max_ongoing_requests == deployment.max_queued_requests == 7
    assert deployment.ray_actor_options["num_cpus"] == 4
    options = {"directory": "/models", "max_replicas": 3, "num_cpus": 0.5, "token": "other"}
    deployment = ray_serve.build(options)._bound_deployment
    [settings] = deployment.init_args
    assert deployment._deployment_config.autoscaling_config.max_replicas == 3
    assert (settings.threads, settings.token, settings.versions) == (1, "other", 1)


@needs_ray
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 2}, "`directory`: "),
        ({"directory": "m", "port": 1}, "Unknown option"),
        ({"directory": "m", "replica": 2}, "Unknown option. Did you mean 'replicas'"),
        ({"directory": "m", "replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"directory": "m", "max_replicas": 0}, "`max_replicas` must be greater than 0"),
    ],
)
def test_bad_options(ray_serve, options, message):
    with pytest.raises(ValueError, match=message):
        ray_serve.build(options)


@needs_ray
def test_a_replica_with_nothing_to_serve_is_not_healthy(directory, tmp_path, ray_serve):
    async def check() -> None:
        replica = ray_serve.ModelServer(Settings(tmp_path))
        app = replica.__serve_build_asgi_app__()
        async with app.router.lifespan_context(app):
            await replica.check_health()

    with pytest.raises(RuntimeError, match="No model is available in"):
        asyncio.run(check())
    (tmp_path / client.NAME).symlink_to(directory / client.NAME)
    asyncio.run(check())


# Serves the models of a directory as `serve run` does, and prints the status of an answer and the
# answer.
DRIVER = """
import socket, sys, urllib.request

import ray
from ray import serve

from keras_preact.serving.ray_serve import build

temporary, directory, path, body = sys.argv[1:]
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, _temp_dir=temporary)
try:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build({"directory": directory, "num_cpus": "1", "drain_seconds": "5"}))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", body.encode()) as answer:
        print("ANSWER" + answer.read().decode())
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert b'replica="' in answer.read()
    serve.shutdown()
finally:
    ray.shutdown()
"""


@needs_ray
@pytest.mark.soak
def test_ray_serves_what_the_saved_model_computes(directory, saved_model):
    images = client.random_images(0)
    environment = {name: value for name, value in os.environ.items() if "RAY_" not in name} | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # on busy cores its proxy takes longer than the 5 s that Ray waits
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "PYTHONPATH": str(ROOT),
    }
    # short: the names of sockets have no room for more
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as temporary:
        body = client.predict_body(images).decode()
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, temporary, str(directory), client.PREDICT, body],
            cwd=temporary,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # which Ray's processes hold, and would be waited for
            text=True,
        )
        status, out, _ = finish(process, timeout=280)
    assert status == 0, out
    [line] = [line for line in out.splitlines() if line.startswith("ANSWER")]
    answer = json.loads(line.removeprefix("ANSWER"))
    client.check_probabilities(answer, saved_model.probabilities(images))
