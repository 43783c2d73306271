"""Versions of a model come, broken and slowly, to a server under load: no request fails,
and no old version answers after a new one.
"""

import concurrent.futures
import contextlib
import shutil
import threading

import numpy as np

from tests.keras_preact.serving import fakes
from tests.keras_preact.serving.server_process import NAME, PATIENCE, random_images, wait_for

CLIENTS = 4


@contextlib.contextmanager
def load(server, images):
    """Clients that ask without a pause. Gives the answers of each, and a function that
    waits until each has asked and has its answer.
    """
    answers, stop = [[] for _ in range(CLIENTS)], threading.Event()
    tensor = {"name": "images", "datatype": "FP32", "shape": images.shape}
    body = {"inputs": [tensor | {"data": images.ravel().tolist()}]}

    def ask(own):
        while not stop.is_set():
            own.append(server.ask("POST", f"/v2/models/{NAME}/infer", body))

    def more():
        counts = [len(own) for own in answers]
        # The first may have been asked before.
        wait_for(lambda: all(len(own) > n + 1 for own, n in zip(answers, counts, strict=True)))

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(ask, own) for own in answers]
        try:
            more()
            yield answers, more
        finally:
            stop.set()
        for client in clients:
            client.result(PATIENCE)  # raises what ended a connection


def test_a_broken_version_changes_nothing_and_a_whole_one_takes_over(
    version, saved_model, tmp_path
):
    model = tmp_path / "models" / NAME
    shutil.copytree(version, model / "1")
    broken = shutil.copytree(version, model / ".2")
    weights = next(broken.glob("variables/variables.data*"))
    weights.write_bytes(weights.read_bytes()[:-100])
    images = random_images(0)
    with fakes.serving(model.parent, poll_seconds=0.1) as server:
        repository = server.app.state.repository

        def states():
            return {one.version: one.state for one in repository.status(NAME)}

        with load(server, images) as (answers, more):
            broken.rename(model / "2")
            wait_for(lambda: states() == {1: "AVAILABLE", 2: "END"})
            more()
            # Copied in place, file after file, without the rename that makes it appear at once.
            for path in sorted(path for path in version.rglob("*") if path.is_file()):
                target = model / "3" / path.relative_to(version)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
                more()
            wait_for(lambda: states().get(3) == "AVAILABLE" and states().get(1) in ("END", None))
            more()
    wanted = saved_model.probabilities(images)[0]
    for own in answers:
        assert {answer.status for answer in own} == {200}
        versions = [int(answer.json["model_version"]) for answer in own]
        assert versions == sorted(versions)
        assert (versions[0], versions[-1]) == (1, 3)
        for answer in own:
            found = {one["name"]: one["data"] for one in answer.json["outputs"]}
            np.testing.assert_allclose(found["probabilities"], wanted, rtol=1e-4, atol=1e-6)
