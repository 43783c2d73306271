"""Numbers that are read in the fast way are those of the JSON, and everything else is left to
the parser that knows all of JSON.
"""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_preact.serving import json_rows, tensors

SHAPE, MOST = (2, 3), 4
WRITERS = {
    "compact": lambda value: json.dumps(value, separators=(",", ":")).encode(),
    "python": lambda value: json.dumps(value).encode(),
    "indented": lambda value: json.dumps(value, indent=2).encode(),
    "tabs and returns": lambda value: json.dumps(value, indent="\t").replace("\n", "\r\n").encode(),
}


def fast(body: bytes, shape=SHAPE, most=MOST) -> np.ndarray | None:
    """Return the rows in the field `instances` of a body without other fields."""
    found = json_rows.split(body)
    if found is None or found[:2] != ({}, "instances"):
        return None
    return json_rows.read(found[2], shape, most)


def slow(body: bytes) -> np.ndarray:
    """Return the same by the parser of JSON, or raise a RequestError."""
    rows = tensors.fields(tensors.parse_json(body), ["instances"], "")["instances"]
    return tensors.from_json(rows, "images", "float32", 10**6)


def body_of(rows, write="python") -> bytes:
    return WRITERS[write]({"instances": rows})


NUMBERS = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, 255, -0.0, 1e-320, 1.5e300]),
)
ROWS = st.lists(st.tuples(*[st.tuples(*[NUMBERS] * 3)] * 2), min_size=1, max_size=MOST)


@given(rows=ROWS, write=st.sampled_from(list(WRITERS)))
def test_the_numbers_are_those_of_the_json(rows, write):
    body = body_of(rows, write)
    found = fast(body)
    assert found is not None
    assert found.shape == (len(rows), *SHAPE)
    np.testing.assert_array_equal(found, slow(body))


@given(data=st.data(), rows=ROWS, write=st.sampled_from(list(WRITERS)))
def test_a_changed_body_is_read_as_json_reads_it_or_not_at_all(data, rows, write):
    """A character or two move, vanish, appear or change."""
    body = bytearray(body_of(rows, write))
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.integers(0, len(body) - 1))
        there = body[place : place + 1]
        match data.draw(st.sampled_from(["delete", "insert", "replace", "move"])):
            case "delete":
                del body[place]
            case "insert":
                body[place:place] = data.draw(st.sampled_from([b",", b"[", b"]", b"7", b" ", b"-"]))
            case "replace":
                body[place : place + 1] = data.draw(st.sampled_from([b",", b"[", b"]", b"0", b"e"]))
            case "move":
                del body[place]
                other = data.draw(st.integers(0, len(body)))
                body[other:other] = there
    found = fast(bytes(body))
    if found is not None:
        np.testing.assert_array_equal(found, slow(bytes(body)))


ROW = "[[1,2,3],[4,5,6]]"
#: Bodies that are wrong, or right and of another kind.
OTHERS = {
    "number before its list": '{"instances": [[1[,2,3],[4,5,6]]]}',
    "number after its list": '{"instances": [[[1,2,]3,[4,5,6]]]}',
    "number after the last list": '{"instances": [[[1,2,3],[4,5,]]6]}',
    "empty first place": '{"instances": [[[,2,3],[4,5,6]]]}',
    "empty place": '{"instances": [[[1,,3],[4,5,6]]]}',
    "two numbers in a place": '{"instances": [[[1,2 3,4],[4,5,6]]]}',
    "leading zero": '{"instances": [[[01,2,3],[4,5,6]]]}',
    "no number": '{"instances": [[[1,2,e],[4,5,6]]]}',
    "two dots": '{"instances": [[[1.2.3,2,3],[4,5,6]]]}',
    "another shape": '{"instances": [[[1,2],[3,4],[5,6]]]}',
    "ragged": '{"instances": [[[1,2],[3,4,5,6]]]}',
    "deeper": f'{{"instances": [[{ROW}]]}}',
    "flat": '{"instances": [1,2,3,4,5,6]}',
    "text": '{"instances": [[[1,2,"3"],[4,5,6]]]}',
    "true": '{"instances": [[[1,2,true],[4,5,6]]]}',
    "null": '{"instances": [[[1,2,null],[4,5,6]]]}',
    "NaN": '{"instances": [[[1,2,NaN],[4,5,6]]]}',
    "named rows": f'{{"instances": [{{"images": {ROW}}}]}}',
    "more rows": f'{{"instances": [{",".join([ROW] * (MOST + 1))}]}}',
    "no row": '{"instances": []}',
    "no list": '{"instances": 0}',
    "two lists": f'{{"instances": [{ROW}], "inputs": [{ROW}]}}',
    "the same field again": f'{{"instances": [{ROW}], "instances": 0}}',
    "the same field in other letters": f'{{"instances": [{ROW}], "inst\\u0061nces": 0}}',
    "in an object": f'{{"instances": {{"images": [{ROW}]}}}}',
    "in another field": f'{{"instances": 0, "signature_name": [{ROW}]}}',
    "in a text": f'{{"a": "\\"instances\\": [{ROW}]"}}',
    "cut off": f'{{"instances": [{ROW}]',
    "more after it": f'{{"instances": [{ROW}]}}}}',
    "a list itself": f"[{ROW}]",
    "no JSON": "]instances: [",
    "nothing": "",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_bodies_are_left_to_the_parser(name):
    assert fast(OTHERS[name].encode()) is None


def test_the_memory_of_a_body_is_bounded(monkeypatch):
    text = f"[{ROW}]".encode()
    monkeypatch.setattr(tensors, "MAX_VALUE_BYTES", 6 * json_rows._COST)
    assert json_rows.read(text, SHAPE, MOST) is not None
    monkeypatch.setattr(tensors, "MAX_VALUE_BYTES", 6 * json_rows._COST - 1)
    assert json_rows.read(text, SHAPE, MOST) is None


@pytest.mark.parametrize("shape", [(4,), (1, 1, 1), (3, 1), (1, 3), (5, 4, 3)])
def test_rows_of_every_shape(shape):
    rows = np.arange(2 * math.prod(shape), dtype=float).reshape(2, *shape)
    found = fast(body_of(rows.tolist()), shape)
    np.testing.assert_array_equal(found, rows)


def test_single_numbers_are_left_to_the_parser():
    assert fast(body_of([1.5, 2.5]), ()) is None


def test_other_fields_stay():
    document, name, text = json_rows.split(
        b'{"signature_name": "features", "inputs" : [[1]], "x": 2}'
    )
    assert document == {"signature_name": "features", "x": 2}
    assert (name, text) == ("inputs", b"[[1]]")
