"""Bad requests to a server process: each gets a refusal in plain words, and nothing
else happens.
"""

import concurrent.futures
import contextlib
import io
import json
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.keras_preact.serving.server_process import (
    CLASSIFY,
    NAME,
    PREDICT,
    Server,
    check_refusal,
    classify_body,
    encoded,
    predict_body,
    unharmed,
)


@pytest.fixture(scope="module")
def running(directory, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log"
    with Server(directory, log) as server:
        yield server


@pytest.fixture
def server(running, saved_model):
    with unharmed(running, saved_model) as server:
        yield server


def png_header(width, height):
    """A PNG whose header says this size; its data are those of no image."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


def damaged(file):
    """The same file with a byte of its data turned round."""
    middle = len(file) // 2
    return file[:middle] + bytes([file[middle] ^ 0xFF]) + file[middle + 1 :]


JPEG, PNG, GIF = encoded(1, "JPEG"), encoded(1), encoded(1, "GIF")
FILES = {
    "no bytes": b"",
    "junk": np.random.default_rng(0).bytes(5000),
    "text": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "truncated jpeg": JPEG[: len(JPEG) // 2],
    "truncated png": PNG[: len(PNG) // 2],
    "another format": GIF,
    "jpeg header alone": JPEG[:20],
    "png signature alone": PNG[:8],
    "damaged png": damaged(PNG),
    "huge": png_header(2**31 - 1, 2**31 - 1),
    "no pixels": png_header(0, 5),
    "another size than its data": png_header(3000, 3000),
}


@pytest.mark.parametrize("file", FILES.values(), ids=FILES.keys())
def test_files_that_are_no_images_are_refused(server, file):
    for path, body in (
        (CLASSIFY, classify_body(file)),
        (CLASSIFY, classify_body(PNG, file, JPEG)),
        (
            PREDICT,
            json.dumps(
                {"signature_name": "predict_bytes"} | json.loads(classify_body(file))
            ).replace("examples", "instances"),
        ),
    ):
        status, answer, _ = server.post(path, body)
        check_refusal(status, answer)
        assert status == 400


WELL = [[[0, 0, 0]] * 32] * 32
BODIES = {
    "nothing": b"",
    "not UTF-8": b'{"instances": ["\xff\xfe"]}',
    "cut off": predict_body([WELL])[:-5],
    "deep and cut off": b'{"instances": ' + b"[" * 900_000,
    "deep objects": b'{"instances": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "many lists": b'{"instances": [' + b"[]," * 2_000_000 + b"[]]}",
    "empty example": b'{"instances": [[]]}',
    "other shape": predict_body([[[[0, 0, 0]] * 31] * 32]),
    "ragged": json.dumps({"instances": [[*WELL[:31], [[0, 0]] * 32]]}).encode(),
    "text": json.dumps({"instances": [[*WELL[:31], [["0", 0, 0]] * 32]]}).encode(),
    "NaN": json.dumps({"instances": [[*WELL[:31], [[float("nan"), 0, 0]] * 32]]}).encode(),
    "too large": json.dumps({"instances": [[*WELL[:31], [[1e39, 0, 0]] * 32]]}).encode(),
    "many digits": predict_body([WELL]).replace(b"[0, 0, 0]", b"[" + b"9" * 10_000 + b", 0, 0]", 1),
    "too many": predict_body([WELL] * 9),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_bodies_that_are_no_requests_are_refused(server, body):
    check_refusal(*server.post(PREDICT, body)[:2])


IMAGE = np.zeros((1, 32, 32, 3), "float32")
TENSORS = {
    "NaN": (IMAGE + np.nan).tobytes(),
    "one infinity": b"\x00\x00\x80\x7f" + IMAGE.tobytes()[4:],
    "too few bytes": IMAGE.tobytes()[:-4],
    "too many bytes": IMAGE.tobytes() + bytes(4),
}


@pytest.mark.parametrize("data", TENSORS.values(), ids=TENSORS.keys())
def test_binary_tensors_that_do_not_fit_are_refused(server, data):
    about = {"name": "images", "shape": IMAGE.shape, "datatype": "FP32"}
    about["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps({"inputs": [about]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    check_refusal(*server.post(f"/v2/models/{NAME}/infer", head + data, headers)[:2])


def test_a_body_beyond_the_limit_is_refused(server):
    body = bytes(33 * 2**20)
    status, answer, _ = server.post(PREDICT, body)
    check_refusal(status, answer)
    assert status == 413
    pieces = (bytes(2**20) for _ in range(40))  # no length is announced
    with contextlib.closing(server.connect()) as connection, contextlib.suppress(ConnectionError):
        connection.request(
            "POST", PREDICT, pieces, encode_chunked=True, headers={"Transfer-Encoding": "chunked"}
        )
        assert connection.getresponse().status == 413


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_small_file_of_a_huge_image_takes_no_memory(server, kind):
    """50,000 x 50,000 pixels are 7.5 GB."""
    side = 50_000
    if kind == "PNG":  # a whole one, of 1 bit a pixel
        file = io.BytesIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Image, "MAX_IMAGE_PIXELS", None)
            Image.new("1", (side, side)).save(file, "PNG")
        bomb = file.getvalue()
    else:
        start = JPEG.index(b"\xff\xc0") + 5
        bomb = JPEG[:start] + struct.pack(">HH", side, side) + JPEG[start + 4 :]
    server.post(CLASSIFY, classify_body(PNG))
    before = server.memory()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for status, answer, _ in pool.map(
            lambda _: server.post(CLASSIFY, classify_body(bomb, PNG)), range(16)
        ):
            check_refusal(status, answer)
            assert "50000 x 50000" in answer["error"]
    assert server.memory() - before < 150 * 2**20
