"""JSON of a request: parsed strictly, within bounds."""

import json
from typing import Any

import orjson

from keras_preact.serving.errors import RequestError

# Lists and objects cost far more memory and time than their two characters: without a bound, 30 MB
# of "[]," stop the server for seconds. An image of 224 x 224 pixels written as nested lists has
# 50,000.
MAX_CONTAINERS = 1_000_000


def parse(body: bytes | memoryview) -> dict[str, Any]:
    """Return the object that `body` holds.

    Raises:
        RequestError: if it is not JSON (NaN and Infinity are not), not an object, has a
            key twice, or too many lists.
    """
    body = bytes(body)
    if not body.strip():
        raise RequestError("The request has no body; a JSON object was expected.")
    containers = body.count(b"[") + body.count(b"{")
    if containers > MAX_CONTAINERS:
        raise RequestError(
            f"The JSON holds {containers} lists and objects; at most {MAX_CONTAINERS} are taken. "
            "Send fewer rows at once, encoded images as base64, or binary tensors of the Open "
            "Inference Protocol."
        )
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(
            f"The body is not JSON as RFC 8259 has it (UTF-8, no NaN, no Infinity): {error}."
        ) from None
    if not isinstance(document, dict):
        raise RequestError(f"The body must be a JSON object. Received: {described(document)}")
    # The parser keeps the last of two equal keys. As a rule no text holds a colon, and then
    # counting them finds a key lost.
    if body.count(b":") != _count_keys(document):
        _refuse_duplicates(body)
    return document


def described(value: Any) -> str:
    """Return words for a JSON value, short whatever it is."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {json.dumps(value if len(value) <= 40 else value[:37] + '...')}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        keys = [json.dumps(key if len(key) <= 40 else key[:37] + "...") for key in list(value)[:5]]
        return (
            f"an object with the keys {', '.join(keys)}{', ...' if len(value) > 5 else ''}"
            if value
            else "an empty object"
        )
    return f"the number {value!r}"


def _count_keys(document: dict) -> int:
    count = 0
    pending: list[dict | list] = [document]
    while pending:
        container = pending.pop()
        if isinstance(container, dict):
            count += len(container)
            container = list(container.values())
        if not {list, dict}.isdisjoint(map(type, container)):
            pending.extend(item for item in container if isinstance(item, list | dict))
    return count


def _refuse_duplicates(body: bytes) -> None:
    def once(pairs: list[tuple[str, Any]]) -> None:
        keys = set()
        for key, _ in pairs:
            if key in keys:
                raise RequestError(
                    f"A JSON object may hold each key once. Received: {described(key)} twice"
                )
            keys.add(key)

    try:
        json.loads(body, object_pairs_hook=once, parse_int=len, parse_float=len)
    except RecursionError:
        raise RequestError("The JSON is nested too deeply.") from None
