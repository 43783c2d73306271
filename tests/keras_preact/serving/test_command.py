"""The command: once in a process, as a user starts it, and its errors."""

import contextlib
import json
import socket

import pytest

from keras_preact.serving import __main__ as command
from tests.keras_preact.serving.server_process import (
    NAME,
    PATIENCE,
    PREDICT,
    check_probabilities,
    predict_body,
    random_images,
    run_server,
    wait_for,
)


@pytest.mark.process
def test_serves_until_sigterm_and_finishes_every_accepted_request(directory, saved_model, tmp_path):
    """The last bytes of the requests come after the signal."""
    models, images = tmp_path / "models", [random_images(seed, 1 + seed % 4) for seed in range(20)]
    models.mkdir()
    (models / NAME).symlink_to(directory / NAME)
    (models / "broken" / "1").mkdir(parents=True)
    (models / "broken" / "1" / "saved_model.pb").write_bytes(b"none")
    with run_server(models, tmp_path / "log") as server, contextlib.ExitStack() as stack:
        assert f": broken (not available), {NAME} 1\n" in server.log()
        assert server.get("/v2/health/ready")[0] == 200  # the broken one takes nothing away
        assert server.get("/v2/models/broken/ready")[0] == 503
        connections = [stack.enter_context(contextlib.closing(server.connect())) for _ in images]
        bodies = [predict_body(some) for some in images]
        for connection, body in zip(connections, bodies, strict=True):
            connection.putrequest("POST", PREDICT)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body[:-1])
        count = f"keras_preact_requests_in_progress {len(images):.1f}".encode()
        wait_for(lambda: count in server.get("/metrics")[1])
        server.process.terminate()
        wait_for(lambda: server.get("/v2/health/ready")[0] != 200)
        for connection, body in zip(connections, bodies, strict=True):
            connection.send(body[-1:])
        for connection, some in zip(connections, images, strict=True):
            response = connection.getresponse()
            answer = json.loads(response.read())
            assert response.status == 200, answer
            check_probabilities(answer, saved_model.probabilities(some))
        assert server.process.wait(PATIENCE) == 0, server.log()
        lines = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    logged = {(line["path"], line["status"]) for line in lines if line["message"] == "request"}
    assert ("/v2/models/broken/ready", 503) in logged
    assert any(line["level"] == "warning" and line.get("model") == "broken" for line in lines)
    assert "Traceback" not in server.log()


def test_an_address_that_cannot_be_taken_is_said_in_one_line(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            command.main([str(tmp_path), "--port", str(port)])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1 port {port}: " in error
    assert error.count("\n") == 1
