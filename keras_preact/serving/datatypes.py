"""The Open Inference Protocol's tensors: their datatypes and their bytes."""

import struct

import numpy as np

from keras_preact.serving.errors import RequestError

TEXT = "BYTES"

#: The protocol's names of TensorFlow's.
NAMES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "string": TEXT,
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}

_LENGTH = struct.Struct("<I")


def name_of(array: np.ndarray) -> str:
    """Return the protocol's name of an array's type."""
    return TEXT if array.dtype.kind == "O" else NAMES[array.dtype.name]


def to_bytes(array: np.ndarray) -> bytes:
    """Return the values in order, little-endian; a text as the four bytes of its length
    and itself.
    """
    if array.dtype.kind != "O":
        return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    texts = (text.encode() if isinstance(text, str) else text for text in array.ravel().tolist())
    return b"".join(part for text in texts for part in (_LENGTH.pack(len(text)), text))


def from_bytes(data: memoryview, datatype: str, count: int, name: str) -> np.ndarray:
    """Return `count` values as an array of one axis.

    Raises:
        RequestError: if `data` does not hold just as many.
    """
    if datatype == TEXT:
        return _texts(data, count, name)
    dtype = np.dtype(DTYPES[datatype]).newbyteorder("<")
    if len(data) != count * dtype.itemsize:
        raise RequestError(
            f"`{name}` must have {count * dtype.itemsize} bytes, for {count} values of "
            f"{datatype}. Received: {len(data)} bytes"
        )
    if datatype == "BOOL" and any(bytes(data).translate(None, b"\0\1")):
        raise RequestError(f"`{name}` must hold bytes 0 and 1, to be BOOL.")
    return np.frombuffer(data, dtype).astype(dtype.newbyteorder("="), copy=False)


def _texts(data: memoryview, count: int, name: str) -> np.ndarray:
    texts: list[bytes] = []
    at = 0
    while at < len(data) and len(texts) < count:
        start = at + _LENGTH.size
        if start > len(data):
            break
        (length,) = _LENGTH.unpack_from(data, at)
        if start + length > len(data):
            break
        at = start + length
        texts.append(bytes(data[start:at]))
    if at != len(data) or len(texts) != count:
        raise RequestError(
            f"`{name}` must have {count} elements, each after the four bytes of its length, and "
            f"nothing more. Received: {len(data)} bytes, of which the first {at} hold "
            f"{len(texts)} elements"
        )
    array = np.empty(count, dtype=object)
    array[:] = texts
    return array
