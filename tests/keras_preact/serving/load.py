"""Clients that ask a server process without a pause."""

import concurrent.futures
import contextlib
import http.client
import threading

import numpy as np

from tests.keras_preact.serving.server_process import (
    PATIENCE,
    PREDICT,
    check_probabilities,
    post,
    predict_body,
    random_images,
    wait_for,
)

CLIENTS = 8


class Load:
    """Clients that ask and ask, each on one connection, until they are told to stop or
    the server is gone.

    `answers` of each client: `(status, answer)` in their order; `ends`: what ended its
    connection, None if it was told.
    """

    def __init__(self, server):
        self._server = server
        self._stop = threading.Event()
        self.images = [random_images(seed, 1 + seed % 4) for seed in range(CLIENTS)]
        self.answers = [[] for _ in range(CLIENTS)]

    def __enter__(self):
        self._pool = concurrent.futures.ThreadPoolExecutor(CLIENTS)
        self._clients = [self._pool.submit(self._ask, number) for number in range(CLIENTS)]
        self.wait_for_more()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._pool.shutdown()

    def wait_for_more(self, answers=3):
        """Wait until every client got so many answers more."""
        counts = [len(some) + answers for some in self.answers]
        wait_for(
            lambda: all(
                len(some) >= count for some, count in zip(self.answers, counts, strict=True)
            )
        )

    @property
    def ends(self):
        return [client.result(PATIENCE) for client in self._clients]

    def _ask(self, number):
        body = predict_body(self.images[number])
        with contextlib.closing(self._server.connect()) as connection:
            while not self._stop.is_set():
                try:
                    self.answers[number].append(post(connection, PREDICT, body)[:2])
                except (ConnectionError, http.client.HTTPException) as error:
                    return error

    def versions(self, saved_models):
        """Return which version gave each answer of each client, in order. Every answer
        must be one of them.
        """
        found = []
        for images, answers in zip(self.images, self.answers, strict=True):
            expected = {
                version: model.probabilities(images) for version, model in saved_models.items()
            }
            found.append([])
            for status, answer in answers:
                assert status == 200, answer
                got = np.array([row["probabilities"] for row in answer["predictions"]])
                version = min(expected, key=lambda one: np.abs(got - expected[one]).max())
                check_probabilities(answer, expected[version])
                found[-1].append(version)
        return found
