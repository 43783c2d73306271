"""An exported model, what it should answer, and a server of it in a process."""

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.export import _check
from tests.keras_preact.export import image_files
from tests.training.calls import ROOT

NAME = "pictures"
CLASSES = [f"class {i}" for i in range(10)]
#: No client waits longer: what takes more is a hang.
PATIENCE = 120


def export(directory):
    """Export a small CIFAR model, without a check of it."""
    keras.utils.set_random_seed(0)
    model = kp.models.resnet_cifar(8, width_factor=0.25, input_shape=(32, 32, 3), mean=120, std=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_check, "compare", lambda *_: {})
        kp.export.save(model, directory / NAME, classes=CLASSES, batch_sizes=[1, 2, 4, 8])


class SavedModel:
    """What the served model should answer, computed by TensorFlow from the same files."""

    def __init__(self, path):
        import tensorflow as tf

        self.loaded = tf.saved_model.load(str(path))

    def probabilities(self, images):
        serve = self.loaded.signatures["serving_default"]
        return serve(images=images.astype("float32"))["probabilities"].numpy()

    def classes(self, file):
        import tensorflow as tf

        outputs = self.loaded.signatures["predict_bytes"](image_bytes=tf.constant([file]))
        names, scores = (outputs[name].numpy()[0] for name in ("classes", "scores"))
        return [name.decode() for name in names], scores


@contextlib.contextmanager
def run_server(directory, log, *options):
    """Run `keras-preact serve` in a process, on a free port. It is killed when the context
    ends, if it has not ended by itself.
    """
    command = [sys.executable, "-m", "training", "serve", directory, "--port", 0]
    for limit in ("header", "body", "deadline", "drain"):
        command += [f"--{limit}-seconds", PATIENCE]
    command = list(map(str, [*command, *options]))
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }
    with (
        open(log, "wb") as file,
        subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        try:
            yield Server(process, log)
        finally:
            process.kill()


class Server:
    """A server that has started."""

    def __init__(self, process, log):
        self.process, self._log = process, log
        self.port = int(wait_for(self._printed)[1])

    def _printed(self):
        assert self.process.poll() is None, self.log()
        return re.search(r"Serving at http://.*:(\d+): ", self.log())

    def log(self):
        return self._log.read_text(errors="replace")

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def get(self, path):
        """Return the status of an answer, 0 without one, and its body."""
        with contextlib.closing(self.connect()) as connection:
            try:
                connection.request("GET", path)
                response = connection.getresponse()
                return response.status, response.read()
            except ConnectionError:
                return 0, b""


def wait_for(condition):
    """Return the first true value of `condition()`."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError("what was waited for did not come")


PREDICT = f"/v1/models/{NAME}:predict"


def predict_body(images):
    return json.dumps({"instances": np.asarray(images).tolist()}).encode()


def random_images(seed, n=1):
    return np.random.default_rng(seed).integers(0, 256, (n, 32, 32, 3))


def encoded(seed, kind="PNG", size=(40, 36)):
    """A file of an image of noise."""
    return image_files.encode(image_files.noise(size[1], size[0], seed=seed), kind)


def check_probabilities(answer, expected):
    """Compare the answer of :predict with what the SavedModel gives. Batches of other
    sizes round otherwise, no more.
    """
    np.testing.assert_allclose(
        [row["probabilities"] for row in answer["predictions"]], expected, rtol=1e-4, atol=1e-6
    )
