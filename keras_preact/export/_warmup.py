"""Warm-up requests: what a server runs on a version before the first client's request,
in TensorFlow Serving's file.

A TFRecord of PredictionLog messages. TensorFlow has no code for them, and the few
fields that it takes are encoded here: PredictionLog.predict_log (6), PredictLog.request
(1), PredictRequest.model_spec (1) and .inputs (2), a map, whose entries are messages of
key (1) and value (2), and ModelSpec.signature_name (3). The model's name is left out: a
server runs the requests on the version that it loads, whatever its name.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

FILE = Path("assets.extra") / "tf_serving_warmup_requests"

#: Numbers of images that servers put requests together to, where an export names no others.
BATCH_SIZES = (1, 2, 4, 8, 16, 32)

#: TensorFlow Serving does not load a version with more.
MAX_REQUESTS = 1000


def write(version: Path, requests: Iterable[tuple[str, Mapping[str, np.ndarray]]]) -> None:
    """Write the warm-up file of a version that is being built.

    Args:
        version: The folder of the SavedModel.
        requests: Pairs of a signature's name and its inputs, arrays by name; strings as
            arrays of objects. An array of equal values takes the room of one.

    Raises:
        ValueError: for more than 1000 requests; nothing is written.
        OSError: if the file cannot be written.
    """
    import tensorflow as tf

    records = [
        _encode(signature, inputs)
        for signature, inputs in itertools.islice(requests, MAX_REQUESTS + 1)
    ]
    if len(records) > MAX_REQUESTS:
        raise ValueError(
            f"`requests` must hold at most {MAX_REQUESTS}: TensorFlow Serving loads no more. "
            "Received: more"
        )
    path = version / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tf.io.TFRecordWriter(str(path)) as file:
            for record in records:
                file.write(record)
    except tf.errors.OpError as error:
        raise OSError(error.message) from error


def read(version: Path) -> list[tuple[str, dict[str, np.ndarray]]]:
    """Return the warm-up requests of a version, [] if it has none; strings are arrays
    of objects, which are bytes.

    Raises:
        ValueError: if the file is damaged, or holds other than requests of this kind.
    """
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    path = version / FILE
    if not path.exists():
        return []
    try:
        return [
            _decode(record) for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
        ]
    except (tf.errors.DataLossError, LookupError, TypeError, ValueError, DecodeError) as error:
        raise ValueError(
            "The warm-up requests cannot be read: one is damaged, or is no Predict request"
        ) from error


def _encode(signature: str, inputs: Mapping[str, np.ndarray]) -> bytes:
    entries = [
        _field(2, _field(1, name.encode()) + _field(2, _tensor(array)))
        for name, array in inputs.items()
    ]
    request = _field(1, _field(3, signature.encode())) + b"".join(entries)
    return _field(6, _field(1, request))


def _decode(record: bytes) -> tuple[str, dict[str, np.ndarray]]:
    import tensorflow as tf

    [log] = _fields(record)[6]
    [request] = _fields(log)[1]
    fields = _fields(request)
    [spec] = fields[1]
    [signature] = _fields(spec)[3]
    inputs = {}
    for entry in map(_fields, fields.get(2, [])):
        [name], [value] = entry[1], entry[2]
        tensor = tf.make_tensor_proto(0)
        tensor.ParseFromString(value)
        inputs[name.decode()] = tf.make_ndarray(tensor)
    return signature.decode(), inputs


def _tensor(array: np.ndarray) -> bytes:
    """Return a TensorProto. A reader fills up from the last value that is there: of
    equal values, one is enough.
    """
    import tensorflow as tf

    array = np.asarray(array)
    if array.size > 1 and _constant(array):
        return tf.make_tensor_proto(
            array.flat[0], dtype=array.dtype, shape=array.shape
        ).SerializeToString()
    return tf.make_tensor_proto(
        array, dtype=tf.string if array.dtype == object else None
    ).SerializeToString()


def _constant(array: np.ndarray) -> bool:
    if array.dtype == object:
        return all(value == array.flat[0] for value in array.flat)
    values = np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8)  # the bits: 0.0 equals -0.0
    return bool((values == values[0]).all())


def _field(number: int, content: bytes) -> bytes:
    """Return a field of a message that has a length: bytes, a string or a message."""
    return bytes([number << 3 | 2, *_varint(len(content))]) + content


def _varint(value: int) -> Iterator[int]:
    """Give seven bits a byte, the lowest first; the eighth says that more come."""
    while value > 127:
        yield value & 127 | 128
        value >>= 7
    yield value


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Return the fields of a message, all of which have a length, by number."""
    fields: dict[int, list[bytes]] = {}
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(message):
        number, wire_type = divmod(varint(), 8)
        length = varint()
        if wire_type != 2 or length > len(message) - position:
            raise ValueError("cut short, or not a field with a length")
        fields.setdefault(number, []).append(message[position : position + length])
        position += length
    return fields
