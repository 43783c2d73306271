"""Read the numbers of a request without a list for every pixel and row of an image.

Most requests hold one list of rows of the same shape. Its brackets and commas are compared
with those of that shape, and then its numbers are read as one flat list. Whatever is not
exactly such a list is left to `tensors.parse_json`, which also says what is wrong with it.
"""

import functools
import math
import re
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from keras_preact.serving import tensors
from keras_preact.serving.errors import RequestError

#: Name of a field and its colon, before a list that is its value.
_FIELD = re.compile(rb'"([a-z_]+)"[ \t\r\n]*:[ \t\r\n]*\Z')
#: Text that replaces the list. No client knows it, so no other field holds it.
_PLACE = secrets.token_hex(8)
_SPACES = b" \t\r\n"
_OF_NUMBERS = b"0123456789+-.eE"
#: Write every character of a number as 0, and brackets as spaces.
_AS_ZEROS = bytes.maketrans(_OF_NUMBERS, b"0" * len(_OF_NUMBERS))
_WITHOUT_BRACKETS = bytes.maketrans(b"[]", b"  ")
#: Memory for each number in a flat list and in the array, in bytes.
_COST = 40


def split(body: bytes) -> tuple[dict[str, Any], str, bytes] | None:
    """Return the JSON object of a body without its only field that holds lists, the name of
    that field, and its JSON. None if it is no such object.
    """
    start, end = body.find(b"["), body.rfind(b"]") + 1
    field = _FIELD.search(body[max(0, start - 100) : max(0, start)])
    if field is None or end <= start:
        return None
    name = field[1].decode()
    try:
        document = tensors.parse_json(b'%b"%b"%b' % (body[:start], _PLACE.encode(), body[end:]))
    except RequestError:
        return None
    return (document, name, body[start:end]) if document.pop(name, None) == _PLACE else None


def read(text: bytes, shape: Sequence[int], most: int) -> np.ndarray | None:
    """Return the numbers of a JSON list of rows, float64 `(n, *shape)`. None if it is
    anything else, or longer.

    Args:
        text: The list.
        shape: Shape of each row.
        most: Largest number of rows.
    """
    row = _row(tuple(shape))
    count, rest = divmod(text.count(b"[") - 1, row.count(b"[")) if row else (0, 1)
    size = count * math.prod(shape)
    if rest or not 1 <= count <= most or size * _COST > tensors.MAX_VALUE_BYTES:
        return None
    zeros = text.translate(_AS_ZEROS, _SPACES)
    if zeros.translate(None, b"0") != b"[%b]" % b",".join([row] * count):
        return None
    # `[1[,2]]` has these brackets and commas, and so have others in which a number is outside of
    # the list that lacks it
    characters = np.frombuffer(zeros, np.uint8)
    first = characters[np.flatnonzero(characters[:-1] == ord("[")) + 1]
    last = characters[np.flatnonzero(characters[1:] == ord("]"))]
    if (first == ord(",")).any() or (first == ord("]")).any() or (last == ord(",")).any():
        return None
    try:
        numbers = orjson.loads(b"[%b]" % text.translate(_WITHOUT_BRACKETS))
    except orjson.JSONDecodeError:  # a number is missing or wrong
        return None
    return np.fromiter(numbers, np.float64, size).reshape(count, *shape)


@functools.lru_cache(maxsize=8)
def _row(shape: tuple[int, ...]) -> bytes:
    """Return the brackets and commas of a row in JSON; nothing for a single number."""
    row = b""
    for length in reversed(shape):
        row = b"[%b]" % b",".join([row] * length)
    return row
