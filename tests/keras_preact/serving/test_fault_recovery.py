"""A server process that is overloaded, stopped or killed under load: no answer is lost
that could be given, and no client hangs.
"""

import concurrent.futures
import contextlib
import http.client
import json
import threading

import pytest

from tests.keras_preact.serving.load import Load
from tests.keras_preact.serving.server_process import (
    PATIENCE,
    PREDICT,
    Server,
    check_answers,
    check_probabilities,
    post,
    predict_body,
    random_images,
    wait_for,
)

pytestmark = pytest.mark.soak  # most tests start a server of their own


@pytest.fixture
def server(directory, tmp_path):
    with Server(directory, tmp_path / "log") as server:
        yield server


def test_sigterm_lets_every_accepted_request_finish(server, saved_model):
    """Requests are in the server's hands, each but for its last byte; those bytes come
    after the signal.
    """
    count = 40
    images = [random_images(seed, 1 + seed % 4) for seed in range(count)]
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(contextlib.closing(server.connect())) for _ in images]
        bodies = [predict_body(some) for some in images]
        for connection, body in zip(connections, bodies, strict=True):
            connection.putrequest("POST", PREDICT)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body[:-1])
        wait_for(lambda: server.in_progress() == count)
        server.terminate()
        wait_for(lambda: server.get("/v2/health/ready")[0] != 200)
        for connection, body in zip(connections, bodies, strict=True):
            connection.send(body[-1:])
        for connection, some in zip(connections, images, strict=True):
            response = connection.getresponse()
            answer = response.read()
            assert response.status == 200, answer
            check_probabilities(json.loads(answer), saved_model.probabilities(some))
    assert server.process.wait(PATIENCE) == 0, server.log()
    assert "Traceback" not in server.log()


def test_sigterm_under_load_cuts_no_answer(server, saved_model):
    with Load(server) as load:
        server.terminate()
        ends = load.ends
    assert server.process.wait(PATIENCE) == 0, server.log()
    for end, answers in zip(ends, load.answers, strict=True):
        assert not isinstance(
            end, http.client.IncompleteRead
        )  # what is over is the connection, between two answers
        while answers[-1][0] == 503:  # while it stops, a new request may be refused
            answers.pop()
    load.versions({1: saved_model})
    assert "Traceback" not in server.log()


def test_a_second_sigterm_does_not_wait_for_clients(directory, tmp_path):
    patient = ("--drain-seconds", 10 * PATIENCE, "--body-seconds", 10 * PATIENCE)
    with (
        Server(directory, tmp_path / "log", *patient) as server,
        contextlib.closing(server.connect()) as connection,
    ):
        connection.putrequest("POST", PREDICT)
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        wait_for(lambda: server.in_progress() == 1)
        server.terminate()
        wait_for(lambda: server.get("/v2/health/ready")[0] != 200)
        server.terminate()
        server.process.wait(PATIENCE)


def test_sigkill_under_load_hangs_nobody_and_another_server_takes_over(
    server, directory, saved_model, tmp_path
):
    with Load(server) as load:
        server.process.kill()
        ends = load.ends
    assert all(isinstance(end, (ConnectionError, http.client.HTTPException)) for end in ends)
    load.versions({1: saved_model})
    with Server(directory, tmp_path / "log2") as another:
        check_answers(another, saved_model)


def test_nobody_is_left_behind_by_a_short_queue(directory, tmp_path, saved_model):
    """Far more clients than places: who is sent away and comes again gets the right
    answer in the end.
    """
    clients = 48
    sent_away = []

    def client(number):
        images = random_images(number)
        with contextlib.closing(server.connect()) as connection:
            for _ in range(PATIENCE * 20):
                status, answer, headers = post(connection, PREDICT, predict_body(images))
                if status == 200:
                    return answer
                assert status == 429, answer
                sent_away.append(int(headers["Retry-After"]))
                again.wait(0.05)
        raise AssertionError("sent away for ever")

    again = threading.Event()
    with Server(directory, tmp_path / "log", "--max-queue", 2, "--max-requests", 6) as server:
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            answers = [pool.submit(client, number) for number in range(clients)]
            for number, answer in enumerate(answers):
                check_probabilities(
                    answer.result(PATIENCE), saved_model.probabilities(random_images(number))
                )
        assert all(seconds >= 1 for seconds in sent_away)
        check_answers(server, saved_model)
