"""Whatever JSON a client sends, the answer is JSON, and never an internal error."""

import copy
import json
import re

import hypothesis
from hypothesis import strategies as st

PREDICT, CLASSIFY, INFER = (
    "/v1/models/toy:predict",
    "/v1/models/toy:classify",
    "/v2/models/toy/infer",
)
ROW = [[[1.5], [2]], [[3], [4]]]
TENSOR = {"name": "images", "datatype": "FP32", "shape": [1, 2, 2, 1], "data": [1, 2.5, 3, 4]}
FILE = {"name": "image_bytes", "datatype": "BYTES", "shape": [1], "data": [{"b64": "MQ"}]}
LOGITS = {"name": "logits", "parameters": {"binary_data": False}}
VALID = [
    (PREDICT, {"instances": [ROW, ROW]}),
    (PREDICT, {"instances": [{"images": ROW}], "signature_name": "features"}),
    (PREDICT, {"inputs": {"images": [ROW]}}),
    (PREDICT, {"instances": [{"b64": "MTI="}, "7"], "signature_name": "predict_bytes"}),
    (CLASSIFY, {"examples": [{"image_bytes": {"b64": "MTI="}}, {"image_bytes": "3"}]}),
    (CLASSIFY, {"examples": [{"images": ROW}], "context": {}}),
    (INFER, {"id": "1", "inputs": [TENSOR], "outputs": [LOGITS]}),
    (INFER, {"inputs": [TENSOR], "parameters": {"signature_name": "features"}}),
    (INFER, {"inputs": [FILE]}),
]


#: The words of the protocols: those of the requests above, and some others.
OTHERS = ["binary_data_size", "binary_data_output", "UINT8", ""]
WORDS = sorted({*OTHERS, *re.findall(r'"(.*?)"', json.dumps(VALID))})
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, -(2**63), 2**64, 10**40, 1e39, -1e308, 5e-324]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(WORDS),
    st.text(max_size=8),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


examples = hypothesis.settings(max_examples=60)


def check(server, path, body, headers=()):
    answer = server.ask("POST", path, body, headers)
    assert answer.status == 200 or 400 <= answer.status < 500, answer.body
    if answer.status != 200:
        assert answer.json.keys() == {"error"}
        assert 10 < len(answer.json["error"]) < 1500


def places(value, at=()):
    """Return the path of every value inside a document."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    return [at, *(place for key in keys for place in places(value[key], (*at, key)))]


@st.composite
def mutated(draw):
    """A request that works, but for one value that is another, missing, in a list, or
    under another name.
    """
    path, document = copy.deepcopy(draw(st.sampled_from(VALID)))
    *above, key = draw(st.sampled_from(places(document)[1:]))
    owner = document
    for step in above:
        owner = owner[step]
    match draw(st.sampled_from(["replace", "delete", "wrap", "rename"])):
        case "replace":
            owner[key] = draw(VALUES)
        case "delete":
            del owner[key]
        case "wrap":
            owner[key] = [owner[key]]
        case _ if isinstance(owner, dict):
            owner[draw(st.sampled_from(WORDS))] = owner.pop(key)
    return path, document


def test_the_requests_to_begin_with_work(server):
    for path, document in VALID:
        assert server.ask("POST", path, document).status == 200


@examples
@hypothesis.given(request=mutated())
def test_requests_with_one_mistake(server, request):
    check(server, *request)


@examples
@hypothesis.given(
    tail=st.binary(max_size=40),
    size=st.integers(-1, 40),
    datatype=st.sampled_from(["FP32", "BYTES", "FP64", "BOOL"]),
)
def test_any_binary_tensor(server, tail, size, datatype):
    name, shape = ("image_bytes", [1]) if datatype == "BYTES" else ("images", [1, 2, 2, 1])
    tensor = {"name": name, "datatype": datatype, "shape": shape}
    head = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": size}}]}).encode()
    check(server, INFER, head + tail, {"Inference-Header-Content-Length": str(len(head))})
