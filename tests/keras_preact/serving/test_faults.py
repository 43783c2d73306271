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

INFER = f"/v2/models/{NAME}/infer"


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
    "truncated gif": GIF[: len(GIF) // 2],
    "jpeg header alone": JPEG[:20],
    "png signature alone": PNG[:8],
    "gif signature alone": GIF[:6],
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
    "not JSON": b"{instances: [1]}",
    "not UTF-8": b'{"instances": ["\xff\xfe"]}',
    "cut off": predict_body([WELL])[:-5],
    "a list": b"[1, 2]",
    "twice": b'{"instances": [1], "instances": [2]}',
    "no key": b"{}",
    "deep": b'{"instances": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep and cut off": b'{"instances": ' + b"[" * 900_000,
    "deep objects": b'{"instances": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "many lists": b'{"instances": [' + b"[]," * 2_000_000 + b"[]]}",
    "no example": b'{"instances": []}',
    "empty example": b'{"instances": [[]]}',
    "null": b'{"instances": null}',
    "other shape": predict_body([[[[0, 0, 0]] * 31] * 32]),
    "other channels": predict_body([[[[0]] * 32] * 32]),
    "one axis less": predict_body(WELL),
    "ragged": json.dumps({"instances": [[*WELL[:31], [[0, 0]] * 32]]}).encode(),
    "text": json.dumps({"instances": [[*WELL[:31], [["0", 0, 0]] * 32]]}).encode(),
    "truth": json.dumps({"instances": [[*WELL[:31], [[True, 0, 0]] * 32]]}).encode(),
    "NaN": json.dumps({"instances": [[*WELL[:31], [[float("nan"), 0, 0]] * 32]]}).encode(),
    "infinity": json.dumps({"instances": [[*WELL[:31], [[float("inf"), 0, 0]] * 32]]}).encode(),
    "too large for float32": json.dumps(
        {"instances": [[*WELL[:31], [[1e39, 0, 0]] * 32]]}
    ).encode(),
    "too large for any float": predict_body([WELL]).replace(b"[0, 0, 0]", b"[1e999, 0, 0]", 1),
    "many digits": predict_body([WELL]).replace(b"[0, 0, 0]", b"[" + b"9" * 10_000 + b", 0, 0]", 1),
    "too many": predict_body([WELL] * 9),
    "unknown signature": b'{"signature_name": "train", "instances": [1]}',
    "unknown input": json.dumps({"instances": [{"pixels": WELL}]}).encode(),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_bodies_that_are_no_requests_are_refused(server, body):
    check_refusal(*server.post(PREDICT, body)[:2])


def tensor(data, shape=(1, 32, 32, 3), datatype="FP32"):
    """The body and headers of a request with a binary tensor."""
    about = {
        "name": "images",
        "shape": shape,
        "datatype": datatype,
        "parameters": {"binary_data_size": len(data)},
    }
    head = json.dumps({"inputs": [about]}).encode()
    return head + data, {"Inference-Header-Content-Length": str(len(head))}


IMAGE = np.zeros((1, 32, 32, 3), "float32")
TENSORS = {
    "NaN": tensor(np.where(IMAGE == 0, np.nan, 0).astype("float32").tobytes()),
    "one infinity": tensor(b"\x00\x00\x80\x7f" + IMAGE.tobytes()[4:]),
    "too few bytes": tensor(IMAGE.tobytes()[:-4]),
    "too many bytes": tensor(IMAGE.tobytes() + bytes(4)),
    "another dtype": tensor(
        IMAGE.astype("float64").tobytes(), datatype="FP64", shape=(1, 32, 32, 2)
    ),
    "unknown dtype": tensor(IMAGE.tobytes(), datatype="COMPLEX"),
    "no example": tensor(b"", shape=(0, 32, 32, 3)),
    "negative shape": tensor(IMAGE.tobytes(), shape=(-1, 32, 32, -3)),
    "enormous shape": tensor(IMAGE.tobytes(), shape=(2**40, 2**40, 32, 3)),
    "header beyond the end": (IMAGE.tobytes(), {"Inference-Header-Content-Length": "99999999"}),
    "negative header": (IMAGE.tobytes(), {"Inference-Header-Content-Length": "-1"}),
}


@pytest.mark.parametrize(("body", "headers"), TENSORS.values(), ids=TENSORS.keys())
def test_binary_tensors_that_do_not_fit_are_refused(server, body, headers):
    check_refusal(*server.post(INFER, body, headers)[:2])


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models/another:predict", 404),
        (f"/v1/models/{NAME}/versions/99:predict", 404),
        (f"/v1/models/{NAME}/versions/{'9' * 5000}:predict", 400),
        (f"/v1/models/{NAME}:train", 400),
        ("/v1/models/..%2F..%2Fetc:predict", 404),
        ("/v2/models/another/infer", 404),
        ("/nothing", 404),
    ],
)
def test_paths_that_lead_nowhere_are_refused(server, path, status):
    got, answer, _ = server.post(path, predict_body([WELL]))
    check_refusal(got, answer)
    assert got == status


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


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF"])
def test_a_small_file_of_a_huge_image_takes_no_memory(server, kind):
    """50,000 x 50,000 pixels are 7.5 GB."""
    side = 50_000
    if kind == "PNG":  # a whole one, of 1 bit a pixel
        file = io.BytesIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Image, "MAX_IMAGE_PIXELS", None)
            Image.new("1", (side, side)).save(file, "PNG")
        bomb = file.getvalue()
    elif kind == "JPEG":
        start = JPEG.index(b"\xff\xc0") + 5
        bomb = JPEG[:start] + struct.pack(">HH", side, side) + JPEG[start + 4 :]
    else:
        frame = GIF.index(b"\x2c", 13 + 3 * 256)
        bomb = (
            GIF[:6]
            + struct.pack("<HH", side, side)
            + GIF[10 : frame + 5]
            + struct.pack("<HH", side, side)
            + GIF[frame + 9 :]
        )
    server.post(CLASSIFY, classify_body(PNG))
    before = server.memory()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for status, answer, _ in pool.map(
            lambda _: server.post(CLASSIFY, classify_body(bomb, PNG)), range(16)
        ):
            check_refusal(status, answer)
            assert "50000 x 50000" in answer["error"]
    assert server.memory() - before < 150 * 2**20
