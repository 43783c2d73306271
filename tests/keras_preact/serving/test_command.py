"""The command, in processes of its own, with real models."""

import base64
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import json_format
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from keras_preact.serving import __main__ as command
from tests.keras_preact.serving import small_model


@contextlib.contextmanager
def started(log, *arguments, **environment):
    """Run the command until the context ends; gives the process and the port that it
    printed.
    """
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "training", "serve", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"} | environment,
        )
    with process:
        try:
            line = process.stdout.readline().decode()
            assert line, log.read_text()
            yield process, line
        finally:
            process.kill()


def ask(port, method, path, body=None, headers=()):
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    ) as connection:
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        return response.status, response.read()


def port_of(line):
    return int(re.search(r":(\d+): ", line)[1])


def test_serves_exported_models_until_it_is_told_to_stop(tmp_path):
    models, log = tmp_path / "models", tmp_path / "log"
    version = small_model.write(models / "small" / "3")
    (models / "broken" / "1").mkdir(parents=True)
    (models / "broken" / "1" / "saved_model.pb").write_bytes(b"none")
    with started(log, models, "--host", "0.0.0.0", "--port", 0, "--header-seconds", 60) as (
        process,
        line,
    ):
        port = port_of(line)
        assert line == f"Serving at http://0.0.0.0:{port}: broken (not available), small 3\n"
        status, body = ask(
            port,
            "POST",
            "/v1/models/small:predict",
            json.dumps({"instances": small_model.pixels(2).tolist()}),
        )
        assert (status, len(json.loads(body)["predictions"])) == (200, 2)
        # TensorFlow imports Keras and JAX by itself, if they are there.
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        assert "tensorflow" in mapped
        assert not re.search("optree|jaxlib", mapped)

        # TensorFlow Serving's metadata: the SignatureDefs of the SavedModel, all fields of them.
        status, body = ask(port, "GET", "/v1/models/small/metadata")
        definitions = json.loads(body)["metadata"]["signature_def"]["signature_def"]
        parsed = json_format.ParseDict(definitions["predict_bytes"], meta_graph_pb2.SignatureDef())
        assert parsed.inputs["image_bytes"].dtype == types_pb2.DT_STRING
        assert definitions["predict_bytes"]["inputs"]["image_bytes"]["tensor_shape"] == {
            "dim": [{"size": "-1", "name": ""}],
            "unknown_rank": False,
        }
        saved = saved_model_pb2.SavedModel.FromString((version / "saved_model.pb").read_bytes())
        assert parsed == saved.meta_graphs[0].signature_def["predict_bytes"]

        metrics = ask(port, "GET", "/metrics")[1].decode()
        assert re.search(
            r'^keras_preact_batch_rows_count\{model="small",version="3"\} [1-9]', metrics, re.M
        )
        assert 'keras_preact_model_loads_total{model="broken",outcome="failure"} 1.0' in metrics
        assert 'keras_preact_model_loads_total{model="small",outcome="success"} 1.0' in metrics
        assert "_created" not in metrics
        assert ask(port, "GET", "/v2/health/ready")[0] == 200  # the broken one takes nothing away
        assert ask(port, "GET", "/v2/models/broken/ready")[0] == 503
        assert 'keras_preact_model_available_versions{model="broken"} 0.0' in metrics

        # An idle connection holds nothing up.
        with socket.create_connection(("127.0.0.1", port)):
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        tried = process.stdout.read().decode()
        assert f"http://0.0.0.0:{port}/v1/models/small:classify" in tried
    written = log.read_text()
    assert (
        "Warning: no token is set: everybody who can reach 0.0.0.0 can use this server. Set one "
        "with --tok" in written
    )
    lines = [json.loads(line) for line in written.splitlines() if line.startswith("{")]
    requests = [line for line in lines if line["message"] == "request"]
    assert [(line["path"], line["status"]) for line in requests][:2] == [
        ("/v1/models/small:predict", 200),
        ("/v1/models/small/metadata", 200),
    ]
    assert any(line["level"] == "warning" and line.get("model") == "broken" for line in lines)


@pytest.mark.soak
def test_an_empty_directory_is_served_with_a_token_from_the_environment(tmp_path):
    (tmp_path / "models").mkdir()
    log = tmp_path / "log"
    with started(log, tmp_path / "models", "--port", 0, KERAS_PREACT_TOKEN="secret") as (
        process,
        line,
    ):
        port = port_of(line)
        assert line == f"Serving at http://127.0.0.1:{port}: no models yet\n"
        assert ask(port, "GET", "/v1/models")[0] == 401
        assert ask(port, "GET", "/v1/models", headers={"Authorization": "Bearer secret"}) == (
            200,
            b'{"models":[]}',
        )
        assert ask(port, "GET", "/v2/health/ready")[0] == 503
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert "Warning: no token" not in log.read_text()
    assert "Traceback" not in log.read_text()
    assert "secret" not in log.read_text()


def test_the_example_is_a_request_that_works(tmp_path):
    """A script in curl's place shows what it gets. An argument could not be as long."""
    content = bytes(range(256)) * 1000
    (tmp_path / "image.png").write_bytes(content)
    text = command.example("http://127.0.0.1:1", "small", True).removeprefix("Try: ")
    (tmp_path / "curl").write_text('#!/bin/sh\nprintf "%s\\0" "$@"; cat\n')
    (tmp_path / "curl").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TOKEN": "secret"}
    out = subprocess.run(
        ["sh", "-c", text], cwd=tmp_path, env=environment, capture_output=True, check=True
    ).stdout.decode()
    _, header, _, _, address, body = out.split("\0")
    assert header == "Authorization: Bearer secret"
    assert address == "http://127.0.0.1:1/v1/models/small:classify"
    [example] = json.loads(body)["examples"]
    assert base64.b64decode(example["image_bytes"]["b64"]) == content
    assert "Authorization" not in command.example("http://127.0.0.1:1", "small", False)


def test_openvino_that_is_not_installed_is_said_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        command.settings([str(tmp_path), "--engine", "openvino"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "pip install 'keras-preact[openvino]'" in error
    assert error.count("\n") == 1


@pytest.mark.soak
def test_stderr_that_nobody_reads_stops_nothing(tmp_path):
    reading, writing = os.pipe()
    try:
        os.set_inheritable(writing, True)
        with started(f"/dev/fd/{writing}", tmp_path, "--port", 0) as (process, line):
            port = port_of(line)
            with contextlib.closing(
                http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            ) as connection:
                for _ in range(1000):  # about 250 bytes each; the pipe takes 64 KiB
                    connection.request("GET", "/v1/models")
                    assert connection.getresponse().read() == b'{"models":[]}'
            assert ask(port, "GET", "/v2/health/live")[0] == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(
    ("host", "message"), [("127.0.0.1", "Address already in use"), ("no-such-host.invalid", "")]
)
def test_an_address_that_cannot_be_taken_is_said_in_one_line(tmp_path, capsys, host, message):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            command.main([str(tmp_path), "--host", host, "--port", str(port)])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"cannot listen on {host} port {port}: {message}" in error
    assert error.count("\n") == 1
