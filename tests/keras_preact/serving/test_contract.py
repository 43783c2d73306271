"""The contract, in both APIs: a client's mistake is answered with its status and a sentence
that names nothing inside. The right answers are in the tests of each API.
"""

import base64
import dataclasses
import json
import logging
import re
import tracemalloc

import numpy as np
import pytest

from keras_preact.serving import logs, tensors
from keras_preact.serving.errors import RequestError
from tests.keras_preact.serving import fakes

V1, V2 = "/v1/models/toy", "/v2/models/toy"
PREDICT, CLASSIFY, INFER = f"{V1}:predict", f"{V1}:classify", f"{V2}/infer"
LENGTH = "Inference-Header-Content-Length"
ROW = [[[1.0], [2.0]], [[3.0], [4.0]]]
TENSOR = {"name": "images", "datatype": "FP32", "shape": [1, 2, 2, 1]}
GOOD = TENSOR | {"data": [1, 2, 3, 4]}


def check_refusal(answer, status, words=""):
    assert (answer.status, answer.headers["Content-Type"]) == (status, "application/json")
    assert answer.json.keys() == {"error"}
    text = answer.json["error"]
    assert re.search(words, text)
    assert 10 < len(text) < 1000
    assert (answer.headers["Allow"] is not None) == (status == 405)
    assert (answer.headers["Retry-After"] is not None) == (status in (429, 503))
    # The API's paths and the client's own are the only ones that a client hears of.
    rest = re.sub(r"\b(GET|POST) /\S*", "", text)
    assert not re.search(r"/|[Tt]ensor[Ff]low|[Kk]eras|Traceback|\.py|[a-z]Error\b", rest)


def b64(data: bytes) -> dict:
    return {"b64": base64.b64encode(data).decode()}


def files(*values):
    return {"instances": list(values), "signature_name": "predict_bytes"}


def last(value):
    """A request whose last pixel is this value."""
    return {"instances": [[[[1], [2]], [[3], [value]]]]}


def tensor(**changes):
    return {"inputs": [GOOD | changes]}


BAD_JSON = [
    b"",
    b'{"instances": [',
    b"[]",
    b'{"instances": [[[[NaN],[1]],[[1],[-Infinity]]]]}',
    b'{"instances": ' + b"[" * 100_000,
    b'{"a":' * 1000 + b"1" + b"}" * 1000,
    b'{"instances": [' + b"[]," * 2_000_000 + b"[]]}",
    b'{"instances": [' + b"{}," * 1_000_000 + b"{}]}",
    b'{"instances": [' + b"1," * 3_000_000 + b"1]}",
    b'{"instances": ["' + b'","' * 2_000_000 + b'"]}',
    b'{"instances": ["\\ud800"]}',
    '{"instances": []}'.encode("utf-16"),
    b'{"instances": [' + b"9" * 10_000 + b"]}",
]
LOGITS = {"name": "logits"}
TEXTS = {"name": "image_bytes", "datatype": "BYTES"}
CLASSES_OF_TEXTS = {"name": "classes", "parameters": {"classification": 1}}
FORM = b"--x\r\nContent-Disposition: form-data; name=image\r\n\r\n\x89PNG\r\n--x--\r\n"
MISTAKES = [
    *((path, body, "") for path in (PREDICT, CLASSIFY, INFER) for body in BAD_JSON),
    (PREDICT, b"\x89PNG\r\n\x1a\n123", "An image file goes into"),
    *((path, FORM, "It is a form. Send JSON.*base64") for path in (PREDICT, CLASSIFY, INFER)),
    (PREDICT, {}, "either `instances`"),
    (PREDICT, {"instances": [ROW], "inputs": [ROW]}, "either `instances`"),
    (PREDICT, {"instances": []}, "at least one row"),
    (PREDICT, {"instances": {"images": [ROW]}}, "an object with the keys"),
    (PREDICT, {"instances": [{"pictures": ROW}]}, 'with the keys "pictures"'),
    (PREDICT, {"inputs": {"images": [ROW], "more": 1}}, 'with the keys "images", "more"'),
    (PREDICT, {"instances": [ROW], "signature_name": "nope"}, "features, of_pixels, pr"),
    (PREDICT, {"instances": [ROW], "signature_name": ["features"]}, "a list of 1"),
    (PREDICT, {"instances": [[[1, 2], [3, 4]]]}, r"must have the shape \(any, 2, 2, 1\)"),
    (PREDICT, {"instances": [[[[1], [2]], [[3]]]]}, "a list of 2 and a list of 1 in axis 2"),
    (PREDICT, {"instances": [[[[1], [2]], 3]]}, "equal lengths.*a list of 2 and 3 in axis 2"),
    (PREDICT, last("4"), 'must hold numbers.*the text "4"'),
    (PREDICT, last(True), "true"),
    (PREDICT, last([4]), "a list of 1"),
    (PREDICT, last(1e300), "fit float32.*in example 0"),
    (PREDICT, last(10**4000), "infinity"),
    (PREDICT, {"instances": [b64(b"1")]}, 'add "signature_name": "predict_bytes"'),
    (PREDICT, files({"b64": "M!I"}), 'base64.*Received: the text "M!I"'),
    (PREDICT, files(7), "Received: 7"),
    (PREDICT, files("1", "x"), "image 1 is no number$"),
    *(
        (PREDICT, files("1", start + "AAAA"), "image 1 is no number. It looks like base64 in a pl")
        for start in ("iVBORw0KGgo", "/9j/", "UklGR", "data:image/png;base64,")
    ),
    (PREDICT, files({"b64": "M\u00a0I"}), "standard alphabet"),
    (CLASSIFY, {"examples": [{"image_bytes": "iVBORw0KGgo="}]}, "base64 in a plain text: send"),
    (INFER, {"inputs": [TEXTS | {"shape": [1], "data": ["/9j/4AAQ"]}]}, "base64 in a plain text"),
    (CLASSIFY, {"examples": []}, "at least one object"),
    (CLASSIFY, {"instances": [ROW]}, 'Received: an object with the keys "instances"'),
    (CLASSIFY, {"examples": [{}]}, "an empty object"),
    (CLASSIFY, {"examples": [{"image_bytes": b64(b"1")}, {"images": ROW}]}, "the same one"),
    (CLASSIFY, {"examples": [{"images": [1, 2, 3]}]}, "must have the shape"),
    (CLASSIFY, {"examples": [{"image_bytes": [[b64(b"1")]]}]}, "must have the shape"),
    (CLASSIFY, {"examples": [{"images": ROW}], "context": []}, "must be an object"),
    (CLASSIFY, {"examples": [{"images": ROW}], "signature_name": "nope"}, "signature_name"),
    (INFER, {"inputs": []}, "`inputs`: .*one tensor. Received: a list of 0"),
    (INFER, {"inputs": [GOOD, GOOD]}, "`inputs`: .*one tensor. Received: a list of 2"),
    (INFER, {"inputs": None}, "`inputs`: .*must be a list. Received: nothing"),
    (INFER, {"inputs": {}}, "`inputs`: .*must be a list. Received: an empty object"),
    (INFER, {"inputs": [7]}, "`inputs.0` must be an object. Received: 7"),
    (INFER, tensor() | {"id": 7}, "`id`: .*a text. Received: 7"),
    (INFER, tensor() | {"model_name": "bad"}, "`model_name`: .*toy, as in the path.*bad"),
    (INFER, tensor(datatype=None), "`inputs.0.datatype`: .*a text. Received: nothing"),
    (INFER, tensor(datatype="BOOL"), "`inputs.0.datatype`: .*one of INT8, .*BYTES.*BOOL"),
    (INFER, tensor(shape=[True, 2, 2, 1]), "`inputs.0.shape.0`: .*true"),
    (INFER, tensor() | {"outputs": [LOGITS, LOGITS]}, "`outputs.1.name`: .*another output"),
    (INFER, tensor() | {"outputs": ["logits"]}, "`outputs.0` must be an object"),
    (INFER, tensor(name="nope"), 'images to .*Received: the text "nope"'),
    (INFER, tensor() | {"outputs": [{"name": "nope"}]}, "nope"),
    (INFER, tensor() | {"outputs": [{"name": "features"}, {"name": "logits"}]}, "one signature"),
    (INFER, tensor() | {"parameters": {"signature_name": 7}}, "signature_name`: .*Received: 7"),
    (INFER, tensor(datatype="FP8"), "`inputs.0.datatype`: .*FP8"),
    (INFER, tensor(datatype="BYTES", data=["a"] * 4), "must hold float32"),
    (INFER, tensor(datatype="INT32", data=[0.5] * 4), "whole numbers"),
    (INFER, tensor(datatype="INT8", data=[100, 1, 2, -300]), "fit int8. Received: -300"),
    (INFER, tensor(shape=[1, 4]), r"must have the shape .* Received: \(1, 4\)"),
    (INFER, tensor(shape=[1] * 100), "`inputs.0.shape`: .*at most 32"),
    (INFER, tensor(shape=[2, 2, 2, 1]), "must have 8 values"),
    (INFER, tensor(shape=[1, *[2**31 - 1] * 3]), "must have the shape"),
    (INFER, tensor(shape=[10**30, 2, 2, 1]), "`inputs.0.shape.0`: "),
    (INFER, tensor(shape=[0, 2, 2, 1], data=[]), "`inputs.0.shape.0`: .*greater than 0"),
    (INFER, tensor(data=[1, [2]] * 2), "a list of 1"),
    (INFER, tensor(data=[1e39] * 4), "fit float32"),
    (INFER, tensor(parameters={"binary_data_size": 16}), "either `data` or.* Received: both"),
    (INFER, {"inputs": [TENSOR]}, "either `data` or.* Received: neither"),
]


#: What would change the answer, and is not served: (path, the request, the parameter or field).
NOT_SERVED = [
    (PREDICT, {"signature": "features"}, 'The request may have.* not the text "signature"'),
    (PREDICT, {"instances": [ROW], "output_filter": ["logits"]}, '"output_filter"'),
    (PREDICT, {"instances": [ROW], "examples": []}, '"examples"'),
    (PREDICT, {"instances": [ROW], "signature_name": 0}, "must be one of.* Received: 0"),
    (PREDICT, {"instances": [ROW], "signature_name": []}, "a list of 0"),
    (CLASSIFY, {"examples": [{"images": ROW}], "top_k": 3}, '"top_k"'),
    (INFER, tensor() | {"model": "toy"}, '"model"'),
    (INFER, tensor(data_type="FP32"), '`inputs.0` may have.* not the text "data_type"'),
    (INFER, tensor() | {"outputs": [LOGITS | {"datatype": "FP16"}]}, '`outputs.0`.*"datatype"'),
    *(
        (INFER, tensor() | {"parameters": {name: 3}}, f"parameters.{name}`.* no state")
        for name in ("sequence_id", "sequence_start", "sequence_end")
    ),
    (INFER, tensor() | {"parameters": {"sequence_id": "a"}}, 'Received: the text "a"'),
    (INFER, tensor() | {"parameters": {"signature": "x"}}, '`parameters`.* not the text "signatu'),
    (INFER, tensor() | {"parameters": []}, "`parameters` must be an object. Received: a list"),
    (INFER, tensor() | {"parameters": {"binary_data": True}}, '"binary_data"'),
    (INFER, tensor() | {"parameters": {"binary_data_output": 1}}, "`.*_output`: .*true or false"),
    (INFER, tensor(parameters={"classification": 3}), '`inputs.0.parameters`.*"classification"'),
    *(
        (INFER, body, f"s.0.parameters.{name}`: .*no memory.* Received: [1t]")
        for name in ("region", "byte_size", "offset")
        for name, value in [(f"shared_memory_{name}", "r" if name == "region" else 1)]
        for body in (
            tensor(parameters={name: value}, data=None),
            tensor() | {"outputs": [LOGITS | {"parameters": {name: value}}]},
        )
    ),
    *(
        (
            INFER,
            tensor() | {"outputs": [LOGITS | {"parameters": {"classification": value}}]},
            f"`outputs.0.parameters.classification`: .* Received: {value}",
        )
        for value in (-1, 1.5)
    ),
    (
        INFER,
        {"inputs": [TEXTS | {"shape": [1], "data": ["1"]}]}
        | {"outputs": [{"name": "scores"}, CLASSES_OF_TEXTS]},
        "`outputs.1.parameters.classification`: .*numbers. Received: classes",
    ),
]
MISTAKES += NOT_SERVED

#: What is not there, switched off, or does not change the answer.
IGNORED = [
    (PREDICT, {"instances": [ROW]}, {"signature_name": None, "inputs": None}),
    (PREDICT, {"inputs": [ROW]}, {"signature_name": "", "instances": None, "other": None}),
    (CLASSIFY, {"examples": [{"images": ROW}]}, {"context": None, "signature_name": None}),
    (INFER, tensor(), {"id": None, "parameters": None, "outputs": None, "other": None}),
    (INFER, tensor(), {"parameters": {}, "outputs": []}),
    (INFER, tensor(), {"model_name": "toy"}),  # KServe's client sends it
    (INFER, tensor(), tensor(parameters=None, other=None)),
    (INFER, tensor(), tensor(parameters={"binary_data_size": None, "content_type": "np"})),
    (INFER, tensor(), {"parameters": {"priority": 1, "timeout": 7, "headers": {"a": "b"}}}),
    (INFER, tensor(), {"parameters": {"signature_name": None, "binary_data_output": None}}),
    (INFER, tensor(), {"parameters": {"sequence_id": 0, "sequence_start": False}}),
    (INFER, tensor(), {"parameters": {"sequence_id": "", "sequence_end": None}}),
    (
        INFER,
        tensor() | {"outputs": [LOGITS]},
        {"outputs": [LOGITS | {"parameters": {"classification": 0, "binary_data": None}}]},
    ),
    (INFER, tensor() | {"outputs": [LOGITS]}, {"outputs": [LOGITS | {"parameters": None}]}),
]


@pytest.mark.parametrize(("path", "body", "more"), IGNORED, ids=range(len(IGNORED)))
def test_what_does_not_change_an_answer(server, path, body, more):
    expected = server.ask("POST", path, body)
    answer = server.ask("POST", path, body | more)
    assert (answer.status, answer.body) == (expected.status, expected.body) == (200, expected.body)


@pytest.mark.parametrize(("path", "body", "words"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_in_json(server, path, body, words):
    check_refusal(server.ask("POST", path, body), 400, words)


NAN = b"\0\0\xc0\x7f" * 4


@pytest.mark.parametrize(
    ("datatype", "size", "tail", "words"),
    [
        ("FP32", 15, bytes(15), "must have 16 bytes"),
        ("FP32", 16, bytes(15), "16 for 15 bytes"),
        ("FP32", 16, bytes(17), "16 for 17 bytes"),
        ("FP32", -1, bytes(16), "binary_data_size"),
        ("FP32", 16, NAN, "finite"),
        ("BYTES", 8, b"\xff" * 8, "4 elements.* Received: 8 bytes"),
        ("BYTES", 20, bytes(20), "4 elements.* Received: 20 bytes"),
    ],
)
def test_mistakes_in_binary_tensors(server, datatype, size, tail, words):
    given = TENSOR | {"datatype": datatype, "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [given]}).encode()
    answer = server.ask("POST", INFER, head + tail, {LENGTH: str(len(head))})
    check_refusal(answer, 400, words)


@pytest.mark.parametrize("length", ["-1", "x", "1" * 30, "100000", "\xb2"])
def test_a_length_of_the_json_that_is_none(server, length):
    answer = server.ask("POST", INFER, {"inputs": [GOOD]}, {LENGTH: length})
    check_refusal(answer, 400, rf"Received: {length} for a body of \d+ bytes")


NOWHERE = {
    (404, "GET"): [
        *("/nope", "/v1", "/v1/models/nope", "/v1/models/nope/metadata", "/v2/models/nope"),
        *(
            f"{V1}/versions/8",
            f"{V1}/versions/{2**63 - 1}",
            f"{V1}/labels/canary",
            "/v1/models/" + "x" * 20_000,
        ),
        *(f"/static/{name}" for name in ("", "../app.py", "%2e%2e/app.py", "x.js")),
    ],
    (404, "POST"): [
        *("/v1/models/nope:predict", "/v1/models/nope:classify", "/v2/models/nope/infer"),
        *(f"{V1}/versions/8:predict", f"{V2}/versions/8/infer"),
        *("/v1/models/..%2F..%2Fetc:predict", f"{V1}:regress"),
    ],
    (400, "GET"): [f"{V1}/versions/{version}" for version in ("x", "-1", 2**63, "1" * 9999)],
    (405, "GET"): [PREDICT, CLASSIFY, INFER],
    (405, "PATCH"): ["/", "/metrics", "/v2", "/v1/models", V1, V2],
    (503, "GET"): ["/v1/models/bad/metadata", "/v2/models/bad"],
    (503, "POST"): ["/v1/models/bad:predict", "/v1/models/bad:classify", "/v2/models/bad/infer"],
}


WORDS = {
    400: "must be a whole number.* Received: '",
    404: r"(Nothing is served.* Received: (GET|POST) /|(Unknown|Model|labels).* Received: [v'])",
    405: "This path takes .*(GET|POST).* Received: (GET|PATCH)",
    503: "Model 'bad' is not available.* GET /v1/models/bad says why. Received: no version",
}


@pytest.mark.parametrize(("status", "method"), NOWHERE)
def test_paths_that_lead_nowhere(server, status, method):
    for path in NOWHERE[status, method]:
        answer = server.ask(method, path, {} if method == "POST" else None)
        check_refusal(answer, status, WORDS[status])


ROWS = "at most 8 examples. Received: "
VALUES = "may have at most {} values here. Received: "
#: For each list that a request can hold: one with too many items, the status, and the refusal.
TOO_MANY = [
    (PREDICT, {"instances": [ROW] * 9}, 413, ROWS + "9"),
    (PREDICT, {"inputs": [ROW] * 9}, 413, ROWS + "9"),
    (PREDICT, {"inputs": {"images": [0] * 10**6}}, 413, ROWS + "1000000"),
    (PREDICT, {"instances": [[0] * 10**6]}, 400, VALUES.format(32) + "1000000 values or lists"),
    (PREDICT, {"instances": [[[0] * 10**6] * 2]}, 400, VALUES.format(32) + "2000000 values"),
    (PREDICT, files("1", *"2" * 8), 413, ROWS + "9"),
    (PREDICT, files(["1"] * 10**5), 400, VALUES.format(8) + "100000 values"),
    (CLASSIFY, {"examples": [{"images": ROW}] * 9}, 413, ROWS + "9"),
    (CLASSIFY, {"examples": [{}] * 16_000, "context": {"images": ROW}}, 413, ROWS + "16000"),
    (CLASSIFY, {"examples": [{"images": [0] * 10**6}]}, 400, VALUES.format(32) + "1000000"),
    (CLASSIFY, {"examples": [{}] * 8, "context": {"images": [0] * 10**6}}, 400, "at most 32 val"),
    (
        CLASSIFY,
        {"examples": [{}] * 8, "context": dict.fromkeys(map(str, range(10**5)))},
        400,
        "one",
    ),
    (CLASSIFY, {"examples": [dict.fromkeys(map(str, range(10**4)))] * 8}, 400, "must hold one val"),
    (INFER, {"inputs": [GOOD] * 10**4}, 400, "exactly one tensor. Received: a list of 10000"),
    (INFER, tensor() | {"outputs": [LOGITS] * 10**5}, 400, "`outputs`: .*at most 3 items"),
    (INFER, tensor(shape=[2] * 10**6), 400, "`inputs.0.shape`: .*at most 32"),
    (INFER, tensor(shape=[9, 2, 2, 1], data=[1] * 36), 413, ROWS + "9"),
    (INFER, tensor(data=[0] * 10**6), 400, VALUES.format(4) + "1000000 values"),
    (INFER, tensor(data=[[0] * 1000] * 1000), 400, VALUES.format(4) + "1000 values or lists"),
    (INFER, {"inputs": [TEXTS | {"shape": [9], "data": ["1"] * 9}]}, 413, ROWS + "9"),
    (INFER, {"inputs": [TEXTS | {"shape": [1], "data": ["1"] * 10**5}]}, 400, VALUES.format(1)),
    (INFER, tensor() | {"id": "x" * 10**6}, 400, "`id`: .*at most 1000 characters"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), TOO_MANY, ids=range(len(TOO_MANY)))
def test_too_much_of_everything_is_refused_before_it_is_put_together(
    server, path, body, status, words, monkeypatch
):
    """No array is made, no text is decoded, no image is computed."""
    body = json.dumps(body).encode()

    def no_work(*_, **__):
        raise AssertionError("work before the limits")

    monkeypatch.setattr(tensors.np, "array", no_work)
    monkeypatch.setattr(tensors, "_to_bytes", no_work)
    monkeypatch.setattr(server.servable.batcher, "submit", no_work)
    tracemalloc.start()
    try:
        answer = server.ask("POST", path, body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    check_refusal(answer, status, words)
    assert peak < len(body) + 100 * 2**20


@pytest.mark.parametrize("datatype", ["BYTES", "UINT8"])
def test_too_much_of_a_binary_tensor(server, datatype):
    size = {"binary_data_size": 4 * 10**6}
    given = TENSOR | {"datatype": datatype, "shape": [10**6], "parameters": size}
    for name in ("images", "image_bytes"):
        head = json.dumps({"inputs": [given | {"name": name}]}).encode()
        body = head + bytes(4 * 10**6)
        check_refusal(server.ask("POST", INFER, body, {LENGTH: str(len(head))}), 413, ROWS)


def test_encodings(server):
    for encoding in ("gzip", "br"):
        answer = server.ask("POST", PREDICT, {}, {"Content-Encoding": encoding})
        check_refusal(answer, 415, f"Content-Encoding. Received: {encoding}")


ENDLESS = ([3e38] * 4, [99.0, 1.0, 1.0, 1.0])  # the sum overflows, a sound input gives NaN


@pytest.mark.parametrize("values", ENDLESS, ids=["input", "network"])
@pytest.mark.parametrize(
    ("path", "request_"),
    [
        (PREDICT, lambda row: {"instances": [ROW, row]}),
        (PREDICT, lambda row: {"inputs": [ROW, row]}),
        (PREDICT, lambda row: {"instances": [ROW, row], "signature_name": "of_pixels"}),
        (CLASSIFY, lambda row: {"examples": [{"images": ROW}, {"images": row}]}),
        *(
            (INFER, lambda row, more=more: tensor(shape=[2, 2, 2, 1], data=[ROW, row]) | more)
            for more in (
                {},
                {"outputs": [LOGITS]},
                {"parameters": {"binary_data_output": True}},
                {"parameters": {"signature_name": "features"}},
            )
        ),
    ],
)
def test_outputs_that_are_not_finite(server, path, request_, values, caplog):
    """They are an error, and the client's only if its input has impossible values."""
    row = [[[values[0]], [values[1]]], [[values[2]], [values[3]]]]
    answer = server.ask("POST", path, request_(row))
    logged = [one for one in caplog.records if "not finite" in one.getMessage()]
    body = json.dumps(request_(row))
    if values[0] == 99:
        check_refusal(answer, 500, "not finite numbers for example 1. Its input is in the usual")
        assert [one.levelname for one in logged] == ["ERROR"]
    elif "features" in body or "of_pixels" in body:
        assert answer.status == 200  # these are the values themselves
    else:
        check_refusal(answer, 400, "not finite .* example 1. `images` has values from 3e.38 to")
        assert not logged


def test_scores_of_files_that_are_not_finite(server):
    body = {"examples": [{"image_bytes": b64(b"1")}, {"image_bytes": b64(b"99")}]}
    check_refusal(server.ask("POST", CLASSIFY, body), 500, "`probabilities` .* example 1")
    file = {"name": "image_bytes", "datatype": "BYTES", "shape": [1], "data": ["99"]}
    check_refusal(server.ask("POST", INFER, {"inputs": [file]}), 500, "for example 0")


EVIL = [[[666.0], [2.0]], [[3.0], [4.0]]]  # on which the network raises
EVIL_FILE = {"image_bytes": "668"}  # on which the decoder raises


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PREDICT, {"instances": [EVIL]}),
        (CLASSIFY, {"examples": [{"images": EVIL}]}),
        (INFER, tensor(data=[666, 1, 1, 1])),
        (PREDICT, files("1", EVIL_FILE)),
        (CLASSIFY, {"examples": [EVIL_FILE]}),
        (INFER, {"inputs": [TEXTS | {"shape": [1], "data": ["668"]}]}),
    ],
)
def test_only_the_log_tells_of_an_internal_error(server, path, body, caplog):
    answer = server.ask("POST", path, body)
    [record] = [one for one in caplog.records if one.exc_info]
    check_refusal(answer, 500, f"failed to answer.* log says why, under the id {record.id}")
    assert record.id == answer.headers["X-Request-ID"]
    assert "secret" in logs.JsonFormatter().format(record)
    assert record.levelno == logging.ERROR


TOKENS = tensors.TensorSpec("tokens", "int32", (None, 2))


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "uint64"])
def test_whole_numbers_of_every_type_are_tokens(dtype):
    found = TOKENS.check(np.array([[1, 2], [3, 100]], dtype))
    assert (found.tolist(), found.dtype) == ([[1, 2], [3, 100]], "int32")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.ones((1, 2), "float32"), "`tokens` must hold int32. Received: float32"),
        (np.array([[1, 2**31]]), "fit int32. Received: numbers from 1 to 2147483648"),
        (np.array([[-(2**31) - 1, 0]]), "fit int32. Received: numbers from -2147483649 to 0"),
        (np.array([[0, 2**64 - 1]], "uint64"), "from 0 to 18446744073709551615"),
        (np.array([["a", "b"]], object), "`tokens` must hold int32. Received: texts"),
    ],
)
def test_what_is_no_token(value, words):
    with pytest.raises(RequestError, match=words):
        TOKENS.check(value)


@pytest.mark.parametrize(("token", "is_known"), [(0, True), (19, True), (20, False), (-1, False)])
def test_tokens_outside_the_vocabulary(token, is_known):
    """TensorFlow takes -1 for the last one, and OpenVINO 20 for any."""
    spec = dataclasses.replace(TOKENS, vocabulary=20)
    if is_known:
        assert spec.check(np.array([[3, token]])).tolist() == [[3, token]]
        return
    with pytest.raises(RequestError, match=r"must hold tokens from 0 to 19\. Received: numbers"):
        spec.check(np.array([[3, token]]))


def test_no_token_is_to_blame_for_outputs_that_are_not_finite():
    assert TOKENS.excess(np.array([3, 100_000])) is None
    assert "from 3 to 1e+05 there" in fakes.IMAGES.excess(np.array([3, 100_000]))


def test_tokens_in_json():
    assert tensors.from_json([[1, 2]], "tokens", "int32", 2).tolist() == [[1, 2]]
    for value in (1.5, 2**31):
        with pytest.raises(RequestError, match=f"Received: {value}"):
            tensors.from_json([[1, value]], "tokens", "int32", 2)
