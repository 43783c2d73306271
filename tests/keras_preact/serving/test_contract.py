"""The contract: what a server answers, whatever it is made of. The model is exported, and
the app runs in this process.
"""

import json
import struct

import numpy as np
import pytest

from tests.keras_preact.serving import fakes
from tests.keras_preact.serving.server_process import (
    CLASSES,
    CLASSIFY,
    NAME,
    PREDICT,
    check_probabilities,
    classify_body,
    encoded,
    random_images,
)

V1, V2 = f"/v1/models/{NAME}", f"/v2/models/{NAME}"
INFER = f"{V2}/infer"
PIXELS = random_images(0, 2)
ROWS = PIXELS.tolist()
PNG, JPEG = encoded(0), encoded(1, "JPEG")
[FILE] = json.loads(classify_body(PNG))["examples"]
TENSOR = {"name": "images", "datatype": "FP32", "shape": [2, 32, 32, 3]}
IN_JSON = TENSOR | {"data": PIXELS.ravel().tolist()}
DEEP = b'{"instances": ' + b"[" * 100_000
FLAT = b'{"instances": [' + b"[]," * 1_000_000 + b"[]]}"


@pytest.fixture(scope="module")
def server(directory):
    with fakes.in_process(directory, deadline_seconds=100) as running:
        yield running


def binary(tail, *, shape=(2, 32, 32, 3), length=None, **tensor):
    """Return a request with one binary tensor."""
    size = {"binary_data_size": len(tail) if length is None else length}
    tensor = TENSOR | {"shape": list(shape), "parameters": size} | tensor
    head = json.dumps({"inputs": [tensor]}).encode()
    return "POST", INFER, head + tail, {"Inference-Header-Content-Length": str(len(head))}


def spoiled(value):
    images = PIXELS.astype("float32")
    images[1, 0, 0, 0] = value
    return images


def post(path, body, headers=None):
    return "POST", path, body, headers or {}


def get(path, **headers):
    return "GET", path, None, headers


RAW = PIXELS.astype("<f4").tobytes()
ANSWERED = {
    "rows": post(PREDICT, {"instances": ROWS}),
    "rows by name": post(PREDICT, {"instances": [{"images": row} for row in ROWS]}),
    "columns": post(PREDICT, {"inputs": ROWS}),
    "columns by name": post(PREDICT, {"inputs": {"images": ROWS}}),
    "empty signature": post(PREDICT, {"instances": ROWS, "signature_name": ""}),
    "features": post(PREDICT, {"instances": ROWS, "signature_name": "features"}),
    "a version": post(f"{V1}/versions/1:predict", {"instances": ROWS}),
    "files": post(PREDICT, {"instances": [FILE], "signature_name": "predict_bytes"}),
    "classify files": post(CLASSIFY, classify_body(PNG, JPEG)),
    "classify pixels": post(CLASSIFY, {"examples": [{"images": row} for row in ROWS]}),
    "context": post(CLASSIFY, {"examples": [{}], "context": FILE}),
    "text/plain": post(PREDICT, {"instances": ROWS}, {"Content-Type": "text/plain"}),
    "tensor": post(INFER, {"inputs": [IN_JSON]}),
    "tensor of a version": post(f"{V2}/versions/1/infer", {"inputs": [IN_JSON]}),
    "nested tensor": post(INFER, {"inputs": [TENSOR | {"data": ROWS}]}),
    "whole numbers": post(INFER, {"inputs": [IN_JSON | {"datatype": "UINT8"}]}),
    "outputs": post(INFER, {"inputs": [IN_JSON], "outputs": [{"name": "features"}]}),
    "id": post(INFER, {"id": "mine", "inputs": [IN_JSON]}),
    "binary": binary(RAW),
    "binary bytes": binary(PIXELS.astype("u1").tobytes(), datatype="UINT8"),
    "binary halves": binary(PIXELS.astype("<f2").tobytes(), datatype="FP16"),
    "binary file": binary(
        struct.pack("<I", len(PNG)) + PNG, name="image_bytes", datatype="BYTES", shape=[1]
    ),
    **{
        path: get(path)
        for path in ("/", "/static/page.js", "/metrics", "/v1/models", V1, f"{V1}/versions/1")
    },
    **{path: get(path) for path in (f"{V1}/metadata", f"{V1}/versions/1/metadata", "/v2", V2)},
    **{path: get(path) for path in (f"{V2}/versions/1", f"{V2}/ready", f"{V2}/versions/1/ready")},
    **{path: get(path) for path in ("/v2/health/live", "/v2/health/ready")},
    "host": get("/v2", Host="localhost:8501"),
}
REFUSED = {
    "not JSON": (400, post(PREDICT, b"instances=1")),
    "cut JSON": (400, post(PREDICT, b'{"instances": [')),
    "nothing": (400, post(PREDICT, b"")),
    "a PNG file": (400, post(PREDICT, PNG)),
    "a JPEG file": (400, post(CLASSIFY, JPEG)),
    "a list": (400, post(PREDICT, b"[]")),
    "null": (400, post(INFER, b"null")),
    "UTF-16": (400, post(PREDICT, '{"instances": []}'.encode("utf-16"))),
    "NaN in JSON": (400, post(PREDICT, b'{"instances": [[[[NaN]]]]}')),
    "neither key": (400, post(PREDICT, {})),
    "both keys": (400, post(PREDICT, {"instances": ROWS, "inputs": ROWS})),
    "no rows": (400, post(PREDICT, {"instances": []})),
    "no list": (400, post(PREDICT, {"instances": 3})),
    "another shape": (400, post(PREDICT, {"instances": [[[1, 2], [3, 4]]]})),
    "ragged": (400, post(PREDICT, {"instances": [[[[1], [2]], [[3]]]]})),
    "one channel": (400, post(PREDICT, {"instances": PIXELS[..., :1].tolist()})),
    "texts": (400, post(PREDICT, {"instances": [[[["a"] * 3] * 32] * 32]})),
    "bools": (400, post(PREDICT, {"instances": [[[[True] * 3] * 32] * 32]})),
    "nulls": (400, post(PREDICT, {"instances": [[[[None] * 3] * 32] * 32]})),
    "too large for float32": (400, post(PREDICT, {"instances": [[[[1e300] * 3] * 32] * 32]})),
    "an unknown signature": (400, post(PREDICT, {"instances": ROWS, "signature_name": "x"})),
    "a signature of another type": (400, post(PREDICT, {"instances": ROWS, "signature_name": 1})),
    "files without a signature": (400, post(PREDICT, {"instances": [FILE["image_bytes"]]})),
    "another name": (400, post(PREDICT, {"instances": [{"pictures": ROWS[0]}]})),
    "no base64": (
        400,
        post(PREDICT, {"instances": [{"b64": "M!"}], "signature_name": "predict_bytes"}),
    ),
    "no image": (400, post(CLASSIFY, classify_body(b"no image"))),
    "a cut image": (400, post(CLASSIFY, classify_body(PNG, PNG[:-99]))),
    "no examples": (400, post(CLASSIFY, {"examples": []})),
    "an empty example": (400, post(CLASSIFY, {"examples": [{}]})),
    "a context that is a list": (400, post(CLASSIFY, {"examples": [FILE], "context": []})),
    "regress": (400, post(f"{V1}:regress", {})),
    "an unknown method": (400, post(f"{V1}:explain", {})),
    "too many rows": (413, post(PREDICT, {"instances": ROWS * 5})),
    "too many files": (413, post(CLASSIFY, classify_body(*[PNG] * 9))),
    "lists without end": (400, post(PREDICT, DEEP)),
    "a million lists": (400, post(PREDICT, FLAT)),
    "an unknown model": (404, post("/v1/models/nope:predict", {"instances": ROWS})),
    "version 7": (404, post(f"{V1}/versions/7:predict", {"instances": ROWS})),
    "a version that is no number": (400, get(f"{V1}/versions/x")),
    "an unknown label": (404, get(f"{V1}/labels/stable")),
    "an unknown status": (404, get("/v1/models/nope")),
    "an unknown path": (404, get("/nope")),
    "a path outside": (404, get("/static/../app.py")),
    "GET predict": (405, get(PREDICT)),
    "POST status": (405, post(V1, b"")),
    "compressed": (415, post(PREDICT, b"x", {"Content-Encoding": "gzip"})),
    "another host": (400, get("/v2", Host="evil.example")),
    "v2: no inputs": (400, post(INFER, {"inputs": []})),
    "v2: another input": (400, post(INFER, {"inputs": [IN_JSON | {"name": "x"}]})),
    "v2: twice": (400, post(INFER, {"inputs": [IN_JSON, IN_JSON]})),
    "v2: another output": (400, post(INFER, {"inputs": [IN_JSON], "outputs": [{"name": "x"}]})),
    "v2: datatype": (400, post(INFER, {"inputs": [IN_JSON | {"datatype": "FP8"}]})),
    "v2: shape": (400, post(INFER, {"inputs": [IN_JSON | {"shape": [2, 3072]}]})),
    "v2: too few values": (400, post(INFER, {"inputs": [IN_JSON | {"shape": [3, 32, 32, 3]}]})),
    "v2: no data": (400, post(INFER, {"inputs": [TENSOR]})),
    "v2: texts": (400, post(INFER, {"inputs": [IN_JSON | {"data": ["a"] * 6144}]})),
    "v2: unknown model": (404, post("/v2/models/nope/infer", {"inputs": [IN_JSON]})),
    "v2: version 7": (404, post(f"{V2}/versions/7/infer", {"inputs": [IN_JSON]})),
    "v2: unknown metadata": (404, get("/v2/models/nope")),
    "v2: unknown ready": (404, get("/v2/models/nope/ready")),
    "binary: NaN": (400, binary(spoiled(np.nan).tobytes())),
    "binary: infinity": (400, binary(spoiled(np.inf).tobytes())),
    "binary: too short": (400, binary(RAW[:-1])),
    "binary: shorter than it says": (400, binary(RAW[:-1], length=len(RAW))),
    "binary: longer than it says": (400, binary(RAW + b"x", length=len(RAW))),
    "binary: a negative size": (400, binary(RAW, length=-1)),
    "binary: shape 2^31": (400, binary(RAW, shape=[2**31, 32, 32, 3])),
    "binary: a huge shape": (400, binary(RAW, shape=[2**31 - 1] * 4)),
    "binary: a bool of 2": (400, binary(b"\2" * 6144, datatype="BOOL")),
    "binary: texts without end": (
        400,
        binary(b"\xff" * 8, name="image_bytes", datatype="BYTES", shape=[1]),
    ),
    "binary: a length that is none": (
        400,
        post(INFER, {"inputs": [IN_JSON]}, {"Inference-Header-Content-Length": "-1"}),
    ),
}


@pytest.mark.parametrize("case", ANSWERED)
def test_answers(server, case):
    answer = server.ask(*ANSWERED[case])
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(server, case):
    """A client's mistake is never status 500, and the answer names nothing inside."""
    status, request = REFUSED[case]
    answer = server.ask(*request)
    assert (answer.status, answer.headers["Content-Type"]) == (status, "application/json")
    text = answer.json["error"]
    assert 10 < len(text) < 1000
    for word in ("Traceback", "tensorflow", "node ", "{{", 'File "', "/tmp", ".py"):
        assert word not in text


def test_numbers(server, saved_model):
    wanted = saved_model.probabilities(PIXELS)
    check_probabilities(server.ask(*ANSWERED["rows"]).json, wanted)
    columns = server.ask(*ANSWERED["columns"]).json["outputs"]["probabilities"]
    np.testing.assert_allclose(columns, wanted, rtol=1e-4, atol=1e-6)
    for case in ("tensor", "binary", "binary bytes", "binary halves", "whole numbers"):
        found = {one["name"]: one for one in server.ask(*ANSWERED[case]).json["outputs"]}
        one = found["probabilities"]
        assert (one["datatype"], one["shape"]) == ("FP32", [2, 10])
        np.testing.assert_allclose(one["data"], wanted.ravel(), rtol=1e-3, atol=1e-5)


def test_classes(server, saved_model):
    names, scores = saved_model.classes(PNG)
    first, _ = server.ask(*ANSWERED["classify files"]).json["results"]
    assert [name for name, _ in first] == names
    np.testing.assert_allclose([score for _, score in first], scores, rtol=1e-4, atol=1e-6)
    [row] = server.ask(*ANSWERED["files"]).json["predictions"]
    assert (row["classes"], set(CLASSES) >= set(names)) == (names, True)
