"""Files that are no images, sent to a whole app with an exported model: each gets a refusal
in plain words, and the others do not notice.
"""

import json
import struct

import numpy as np
import pytest

from tests.keras_preact.export import image_files
from tests.keras_preact.serving import fakes
from tests.keras_preact.serving.server_process import (
    CLASSIFY,
    PREDICT,
    check_answers,
    classify_body,
    encoded,
)


@pytest.fixture(scope="module")
def server(directory):
    with fakes.in_process(directory, deadline_seconds=100) as running:
        yield running


def damaged(file):
    """The same file with a byte of its data inverted."""
    middle = len(file) // 2
    return file[:middle] + bytes([file[middle] ^ 0xFF]) + file[middle + 1 :]


JPEG, PNG = encoded(1, "JPEG"), encoded(1)
SIDE = 50_000  # such an image is 7.5 GB
FRAME = JPEG.index(b"\xff\xc0") + 5
FILES = {
    "no bytes": b"",
    "junk": np.random.default_rng(0).bytes(5000),
    "truncated jpeg": JPEG[: len(JPEG) // 2],
    "truncated png": PNG[: len(PNG) // 2],
    "another format": encoded(1, "GIF"),
    "png signature alone": PNG[:8],
    "damaged png": damaged(PNG),
    "no pixels": image_files.png(0, 5, 8, 2, bytes(1000)),
    "another size than its data": image_files.png(3000, 3000, 8, 2, bytes(1000)),
    "huge png": image_files.png(SIDE, SIDE, 1, 0, bytes(1 + SIDE // 8) * 1000),
    "huge jpeg": JPEG[:FRAME] + struct.pack(">HH", SIDE, SIDE) + JPEG[FRAME + 4 :],
}


@pytest.mark.parametrize("kind", FILES)
def test_files_that_are_no_images_are_refused(server, saved_model, kind):
    file = FILES[kind]
    as_rows = {"signature_name": "predict_bytes"} | json.loads(classify_body(file))
    for path, body, number in (
        (CLASSIFY, classify_body(file), 0),
        (CLASSIFY, classify_body(PNG, file, JPEG), 1),
        (PREDICT, json.dumps(as_rows).replace("examples", "instances"), 0),
    ):
        answer = server.ask("POST", path, body)
        assert (answer.status, answer.json.keys()) == (400, {"error"})
        message = answer.json["error"]
        assert f"image {number}" in message
        assert (f"{SIDE} x {SIDE} pixels" in message) == ("huge" in kind)
        for word in ("Traceback", "tensorflow", "node ", "{{", 'File "', "/tmp"):
            assert word not in message
    check_answers(server, saved_model)
