"""More than a server process takes in at once: who is sent away comes again, and is
served.
"""

import concurrent.futures
import contextlib
import json
import threading

import pytest

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

pytestmark = pytest.mark.slow  # most tests start a server of their own


def test_what_is_beyond_the_limits_is_sent_away_and_served_later(directory, tmp_path, saved_model):
    """All places are taken by requests without their last byte: the next one hears when
    to come again.
    """
    places, body = 4, predict_body(random_images(0))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            Server(
                directory, tmp_path / "log", "--max-requests", places, "--body-seconds", PATIENCE
            )
        )
        held = [stack.enter_context(contextlib.closing(server.connect())) for _ in range(places)]
        for connection in held:
            connection.putrequest("POST", PREDICT)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body[:-1])
        wait_for(lambda: server.in_progress() == places)
        status, answer, headers = server.post(PREDICT, body)
        assert (status, answer.keys()) == (429, {"error"})
        assert int(headers["Retry-After"]) >= 1
        assert server.get("/v2/health/ready")[0] == 200
        for connection in held:
            connection.send(body[-1:])
            response = connection.getresponse()
            answer = json.loads(response.read())
            assert response.status == 200, answer
            check_probabilities(answer, saved_model.probabilities(random_images(0)))
        check_answers(server, saved_model)


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
