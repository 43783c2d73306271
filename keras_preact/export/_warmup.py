"""Write and read warm-up requests, which a server runs on a version before the first
client's request.

The file is a TFRecord of TensorFlow Serving's PredictionLog messages. They do not name
the model: a server runs them on the version that it loads.
"""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_preact.backend import tf_data

FILE = Path("assets.extra") / "tf_serving_warmup_requests"

#: Batch sizes of servers, unless an export has others.
BATCH_SIZES = (1, 2, 4, 8, 16, 32)

#: TensorFlow Serving does not load a version with more.
MAX_REQUESTS = 1000


def message() -> Any:
    """Return an empty PredictionLog.

    Raises:
        ImportError: if tensorflow-serving-api is missing.
    """
    try:
        from tensorflow_serving.apis import prediction_log_pb2
    except ImportError as error:
        raise ImportError(
            "Warm-up requests need tensorflow-serving-api: pip install 'keras-preact[tf-serving]'"
        ) from error
    return prediction_log_pb2.PredictionLog()


def write(version: Path, requests: Iterable[tuple[str, Mapping[str, np.ndarray]]]) -> None:
    """Write the warm-up file of a version that is being built.

    Args:
        version: The folder of the SavedModel.
        requests: Pairs of a signature's name and its inputs, arrays by name. Strings
            are arrays of objects. An array of equal values is stored as one value.

    Raises:
        ValueError: for more than 1000 requests. Nothing is written.
        OSError: if the file cannot be written.
        ImportError: if tensorflow-serving-api is missing.
    """
    import tensorflow as tf

    records = []
    for signature, inputs in itertools.islice(requests, MAX_REQUESTS + 1):
        log = message()
        request = log.predict_log.request
        request.model_spec.signature_name = signature
        for name, array in inputs.items():
            request.inputs[name].CopyFrom(_tensor(np.asarray(array)))
        records.append(log.SerializeToString())
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
    """Return the warm-up requests of a version, [] if it has none. Strings become
    arrays of bytes objects.

    Raises:
        ValueError: if the file is damaged, or holds other requests.
        ImportError: if tensorflow-serving-api is missing.
    """
    path = version / FILE
    if not path.exists():
        return []
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    requests = []
    records = tf_data.untuned(tf.data.TFRecordDataset(str(path)))
    try:
        for record in records.as_numpy_iterator():
            log = message()
            log.ParseFromString(record)
            if not log.HasField("predict_log"):
                raise ValueError("no Predict request")
            request = log.predict_log.request
            inputs = {name: tf.make_ndarray(value) for name, value in request.inputs.items()}
            requests.append((request.model_spec.signature_name, inputs))
    except (tf.errors.DataLossError, TypeError, ValueError, DecodeError) as error:
        raise ValueError(
            "The warm-up requests cannot be read: one is damaged, or is not a Predict request"
        ) from error
    return requests


def _tensor(array: np.ndarray) -> Any:
    """Return a TensorProto. Readers repeat the last value, so equal values are stored
    once.
    """
    import tensorflow as tf

    dtype = tf.string if array.dtype.kind in "OSU" else array.dtype
    if array.size > 1 and (array == array.flat[0]).all():
        return tf.make_tensor_proto(array.flat[0], dtype=dtype, shape=array.shape)
    return tf.make_tensor_proto(array, dtype=dtype)
