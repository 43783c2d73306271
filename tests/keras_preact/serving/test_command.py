"""The command: once in a process, as a user starts it, and its errors."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from unittest import mock

import pytest

from keras_preact.export.version import VersionError
from keras_preact.serving import __main__ as command
from keras_preact.serving import app as app_module
from keras_preact.serving import server as server_module
from keras_preact.serving.repository import Repository
from tests.keras_preact.serving import fakes
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


class Ended(BaseException):
    """The end of the process, with its status."""


class Command:
    """The command in this process, for one version of one model."""

    def __init__(self, folder, monkeypatch, load):
        self._folder = folder
        self.arguments = [str(folder), "--port", "0", "--poll-seconds", "0.01"]
        self.said, self.ended = threading.Event(), threading.Event()
        self.add(7)

        def create_app(settings):
            return app_module.create_app(settings, Repository(settings, load))

        def leave(status):
            self.ended.set()
            raise Ended(status)

        monkeypatch.setattr(command, "create_app", create_app)
        monkeypatch.setattr(command, "print", lambda *_, **__: self.said.set(), raising=False)
        monkeypatch.setattr(command.os, "_exit", leave)
        for name in ("freeze", "set_threshold"):
            monkeypatch.setattr(command.gc, name, lambda *_: None)
        monkeypatch.setattr(command.threading, "Timer", mock.Mock())
        monkeypatch.setattr(command.logs, "configure", lambda dropped: mock.Mock())

    def add(self, version):
        (self._folder / "toy" / str(version)).mkdir(parents=True)
        (self._folder / "toy" / str(version) / "saved_model.pb").touch()

    def main(self):
        """Return the status with which it ends."""
        with pytest.raises(Ended) as ended:
            command.main(self.arguments)
        return ended.value.args[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_first_model_loads_ends_it_at_once(tmp_path, monkeypatch, number):
    def load(path, settings):
        os.kill(os.getpid(), number)
        ended.append(one.ended.wait(20))  # a load that does not end before the process
        raise VersionError(path, "It is broken.")

    ended = []
    one = Command(tmp_path, monkeypatch, load)
    assert one.main() == 0
    assert ended == [True]
    assert not one.said.is_set()


def test_a_signal_while_a_new_version_loads_ends_it_at_once(tmp_path, monkeypatch):
    def load(path, settings):
        if path.name == "7":
            one.add(8)
            return fakes.load(path, settings)
        assert one.said.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
        ended.append(one.ended.wait(20))
        raise VersionError(path, "It is broken.")

    ended = []
    one = Command(tmp_path, monkeypatch, load)
    assert one.main() == 0
    assert ended == [True]


@pytest.mark.parametrize("error", [OSError("no more descriptors"), None])
def test_an_http_server_that_ends_ends_the_process(tmp_path, monkeypatch, caplog, error):
    serve = server_module.embed.Server.serve

    async def ending(self):
        serving = asyncio.create_task(serve(self))
        assert await asyncio.to_thread(one.said.wait, 60)
        self.stop()
        await serving
        if error:
            raise error

    one = Command(tmp_path, monkeypatch, fakes.load)
    monkeypatch.setattr(server_module.embed.Server, "serve", ending)
    assert one.main() == 1
    assert f"the HTTP server ended ({error})" in caplog.messages[-1]


@contextlib.contextmanager
def listening(port):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        yield


@pytest.mark.parametrize("when", ["during the load", "after the check"])
def test_a_port_that_another_program_takes_meanwhile(tmp_path, monkeypatch, caplog, when):
    """Nobody is told that this server serves there."""
    with contextlib.ExitStack() as stack:
        free_address = server_module.free_address
        addresses = []

        def checked(host, port):
            addresses.append(free_address(host, port))
            if len(addresses) == 2 and when == "after the check":
                stack.enter_context(listening(port))
            return addresses[-1]

        def load(path, settings):
            if when == "during the load":
                stack.enter_context(listening(addresses[0][1]))
            return fakes.load(path, settings)

        one = Command(tmp_path, monkeypatch, load)
        monkeypatch.setattr(server_module, "free_address", checked)
        with pytest.raises(SystemExit) as ended:
            command.main(one.arguments)
    assert ended.value.code == 2
    assert not one.said.is_set()
    assert "cannot listen on 127.0.0.1 port 0: " in caplog.messages[-1]


def test_a_reserved_port_is_not_free_for_others():
    with server_module.reserved("127.0.0.1", 0) as address:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=60)
        assert server_module.free_address(*address) == address
