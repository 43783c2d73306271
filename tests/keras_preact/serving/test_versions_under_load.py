"""Versions of a model come, broken and slowly, to a server process under load: no request
fails, and every answer is that of a good version.
"""

import concurrent.futures
import contextlib
import json
import shutil
import threading

import numpy as np
import pytest

from tests.keras_preact.serving.server_process import (
    NAME,
    PATIENCE,
    PREDICT,
    SavedModel,
    Server,
    check_probabilities,
    export,
    predict_body,
    random_images,
    wait_for,
)

CLIENTS = 4


@contextlib.contextmanager
def load(server):
    """Clients that ask without a pause, each on one connection. Gives the answers of each,
    and a function that waits until each has asked and has its answer.
    """
    answers, stop = [[] for _ in range(CLIENTS)], threading.Event()

    def ask(number):
        body = predict_body(random_images(number))
        with contextlib.closing(server.connect()) as connection:
            while not stop.is_set():
                connection.request("POST", PREDICT, body)
                response = connection.getresponse()
                answers[number].append((response.status, json.loads(response.read())))

    def more():
        counts = [len(own) for own in answers]
        # The first may have been asked before.
        wait_for(lambda: all(len(own) > n + 1 for own, n in zip(answers, counts, strict=True)))

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(ask, number) for number in range(CLIENTS)]
        try:
            more()
            yield answers, more
        finally:
            stop.set()
        for client in clients:
            client.result(PATIENCE)  # raises what ended a connection


def came_from(answer, expected):
    """Return the version whose probabilities an answer has."""
    status, content = answer
    assert status == 200, content
    [row] = content["predictions"]
    distances = {version: np.abs(row["probabilities"] - p).max() for version, p in expected.items()}
    version = min(distances, key=distances.get)
    check_probabilities(content, expected[version])
    return version


@pytest.mark.process
def test_a_broken_version_changes_nothing_and_a_whole_one_takes_over(tmp_path):
    model, exported = tmp_path / "models" / NAME, tmp_path / "exported"
    export(tmp_path / "models", 1, seed=1)
    export(exported, 3, seed=3)
    broken = shutil.copytree(exported / NAME / "3", model / ".2")
    weights = next(broken.glob("variables/variables.data*"))
    weights.write_bytes(weights.read_bytes()[:-100])
    saved = {1: SavedModel(model / "1"), 3: SavedModel(exported / NAME / "3")}
    with Server(model.parent, tmp_path / "log", "--poll-seconds", 0.1) as server:
        with load(server) as (answers, more):
            broken.rename(model / "2")
            wait_for(lambda: server.states().get(2, ("",))[0] == "END")
            assert "is damaged" in server.states()[2][1]
            assert server.states()[1] == ("AVAILABLE", "")
            more()
            # Copied in place, file after file, without the rename that makes it appear at once.
            for path in sorted(p for p in (exported / NAME / "3").rglob("*") if p.is_file()):
                target = model / "3" / path.relative_to(exported / NAME / "3")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
                more()
            wait_for(lambda: server.states().get(3, ("",))[0] == "AVAILABLE")
            wait_for(lambda: server.states().get(1, ("END",))[0] == "END")
            more()
        for number, own in enumerate(answers):
            images = random_images(number)
            expected = {version: one.probabilities(images) for version, one in saved.items()}
            versions = [came_from(answer, expected) for answer in own]
            assert versions == sorted(versions)  # the old one never answers after the new one
            assert (versions[0], versions[-1]) == (1, 3)
        assert server.process.poll() is None
