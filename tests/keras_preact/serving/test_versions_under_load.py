"""Versions of an exported model come, broken and slowly, to a server that is asked all
the time: no request fails, and no old version answers after a new one.
"""

import shutil

import numpy as np

from tests.keras_preact.serving import fakes
from tests.keras_preact.serving.server_process import NAME, random_images, wait_for


def test_a_broken_version_changes_nothing_and_a_whole_one_takes_over(
    version, saved_model, tmp_path
):
    model, images, versions = tmp_path / "models" / NAME, random_images(0), []
    shutil.copytree(version, model / "1")
    broken = shutil.copytree(version, model / ".2")
    weights = next(broken.glob("variables/variables.data*"))
    weights.write_bytes(weights.read_bytes()[:-100])
    tensor = {"name": "images", "datatype": "FP32", "shape": images.shape}
    body = {"inputs": [tensor | {"data": images.ravel().tolist()}]}
    wanted = saved_model.probabilities(images)[0]
    with fakes.serving(model.parent, poll_seconds=0.1) as server:
        repository = server.app.state.repository

        def ask():
            """Ask once, and return the states of the versions."""
            answer = server.ask("POST", f"/v2/models/{NAME}/infer", body).json
            found = {one["name"]: one["data"] for one in answer["outputs"]}
            np.testing.assert_allclose(found["probabilities"], wanted, rtol=1e-4, atol=1e-6)
            versions.append(int(answer["model_version"]))
            return {one.version: one.state for one in repository.status(NAME)}

        broken.rename(model / "2")
        wait_for(lambda: ask() == {1: "AVAILABLE", 2: "END"})
        # Copied in place, file after file, without the rename that makes it appear at once.
        for path in sorted(path for path in version.rglob("*") if path.is_file()):
            target = model / "3" / path.relative_to(version)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
            ask()
        wait_for(lambda: ask().get(3) == "AVAILABLE")
        ask()
    assert versions == sorted(versions)
    assert {*versions} == {1, 3}
