"""Warm-up requests: read with TensorFlow Serving's own messages, and by TensorFlow's
own reader of tensors.
"""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from keras_preact.export import _warmup

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="nothing of it depends on the backend"
)

PATH = "assets.extra/tf_serving_warmup_requests"


def prediction_logs(version):
    """Return the file's messages, in their official form."""
    import tensorflow as tf
    from tensorflow_serving.apis import prediction_log_pb2

    records = tf.data.TFRecordDataset(str(version / PATH)).as_numpy_iterator()
    return [prediction_log_pb2.PredictionLog.FromString(record) for record in records]


def same(ours, theirs):
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    if ours.dtype == object:
        assert ours.tolist() == theirs.tolist()
    else:  # the bits: -0.0 is not 0.0
        assert ours.tobytes() == theirs.tobytes() or np.isnan(ours).any()
        np.testing.assert_array_equal(ours, theirs)


def numbers():
    dtypes = st.sampled_from(
        ["float32", "float64", "float16", "int8", "uint8", "int32", "int64", "uint16", "bool"]
    )
    shapes = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
    varied = dtypes.flatmap(lambda dtype: arrays.arrays(dtype, shapes))
    constant = dtypes.flatmap(
        lambda dtype: st.builds(np.full, shapes, arrays.from_dtype(np.dtype(dtype)), st.just(dtype))
    )
    return varied | constant


def strings():
    def array(shape, values):
        result = np.empty(shape, object)
        result[...] = np.resize(
            np.array([*values, None], object)[:-1], shape
        )  # the None: no array of fixed length
        return result

    shapes = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)
    return st.builds(array, shapes, st.lists(st.binary(max_size=200), min_size=1, max_size=5))


REQUESTS = st.lists(
    st.tuples(
        st.text(max_size=200),
        st.dictionaries(st.text(max_size=8), numbers() | strings(), max_size=3),
    ),
    max_size=4,
)


@given(requests=REQUESTS)
@settings(max_examples=100, deadline=None)
def test_every_request_comes_back(tmp_path_factory, requests):
    import tensorflow as tf

    version = tmp_path_factory.mktemp("version")
    _warmup.write(version, iter(requests))

    logs = prediction_logs(version)
    assert len(logs) == len(requests)
    for log, (signature, inputs) in zip(logs, requests, strict=True):
        assert log.WhichOneof("log_type") == "predict_log"
        request = log.predict_log.request
        assert request.model_spec.signature_name == signature
        assert set(request.inputs) == set(inputs)
        for name, array in inputs.items():
            tensor = request.inputs[name]
            dtype = tf.string if array.dtype == object else array.dtype
            assert tensor.dtype == tf.as_dtype(dtype).as_datatype_enum
            same(
                tf.io.parse_tensor(tensor.SerializeToString(), dtype).numpy()
                if array.ndim
                else tf.make_ndarray(tensor),
                array,
            )
        # nothing else is said
        request.ClearField("inputs")
        request.model_spec.ClearField("signature_name")
        assert log == type(log).FromString(b"\x32\x04\x0a\x02\x0a\x00")

    again = _warmup.read(version)
    assert [signature for signature, _ in again] == [signature for signature, _ in requests]
    for (_, ours), (_, given_inputs) in zip(again, requests, strict=True):
        assert list(ours) == list(given_inputs)
        for name, array in given_inputs.items():
            same(ours[name], array)


def test_equal_values_take_the_room_of_one(tmp_path):
    images = np.full((32, 224, 224, 3), 127.5, "float32")
    files = np.full(64, b"\x89PNG" + bytes(1000), object)
    _warmup.write(
        tmp_path,
        [("serving_default", {"images": images}), ("predict_bytes", {"image_bytes": files})],
    )
    assert (tmp_path / PATH).stat().st_size < 1400
    [(_, first), (_, second)] = _warmup.read(tmp_path)
    same(first["images"], images)
    same(second["image_bytes"], files)


@pytest.mark.parametrize(
    "array", [np.array([0.0, -0.0]), np.array([np.nan, 0.0]), np.array([b"a", b"a\0"], object)]
)
def test_values_that_are_only_nearly_equal_are_kept(tmp_path, array):
    _warmup.write(tmp_path, [("s", {"x": array})])
    [(_, inputs)] = _warmup.read(tmp_path)
    same(inputs["x"], array)


def test_text_becomes_bytes(tmp_path):
    for array in (np.array(["é", "ab"], object), np.array(["é", "ab"])):
        _warmup.write(tmp_path, [("s", {"x": array})])
        [(_, inputs)] = _warmup.read(tmp_path)
        assert inputs["x"].tolist() == ["é".encode(), b"ab"]


def test_at_most_a_thousand(tmp_path):
    request = ("serving_default", {"images": np.zeros((1, 2), "float32")})
    _warmup.write(tmp_path / "1", [request] * 1000)
    assert len(prediction_logs(tmp_path / "1")) == len(_warmup.read(tmp_path / "1")) == 1000
    with pytest.raises(ValueError, match="at most 1000"):
        _warmup.write(tmp_path / "2", [request] * 1001)
    assert not (tmp_path / "2").exists()


def test_a_version_without_the_file(tmp_path):
    assert _warmup.read(tmp_path) == []


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / PATH).mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        _warmup.write(tmp_path, [])


def damaged(kind, record):
    """Return records, of which none is a Predict request that is whole."""
    from tensorflow_serving.apis import prediction_log_pb2

    log = prediction_log_pb2.PredictionLog()
    if kind == "another kind":
        log.classify_log.request.model_spec.name = "x"
    elif kind == "no type":
        log.predict_log.request.model_spec.signature_name = "s"
        log.predict_log.request.inputs["x"].float_val.append(1)
    return {"cut short": record[:-3], "bytes": b"\xff" * 20}.get(kind) or log.SerializeToString()


@pytest.mark.parametrize("kind", ["another kind", "no type", "empty", "cut short", "bytes"])
def test_records_of_another_kind(tmp_path, kind):
    import tensorflow as tf

    _warmup.write(tmp_path, [("s", {"x": np.arange(5.0)})])
    [record] = tf.data.TFRecordDataset(str(tmp_path / PATH)).as_numpy_iterator()
    with tf.io.TFRecordWriter(str(tmp_path / PATH)) as file:
        file.write(damaged(kind, record))
    with pytest.raises(ValueError, match="one is damaged, or is no Predict request"):
        _warmup.read(tmp_path)


def test_a_damaged_file(tmp_path):
    _warmup.write(tmp_path, [("s", {"x": np.arange(5.0)})])
    content = bytearray((tmp_path / PATH).read_bytes())
    content[20] ^= 1
    (tmp_path / PATH).write_bytes(content)
    with pytest.raises(ValueError, match="The warm-up requests cannot be read: one is damaged"):
        _warmup.read(tmp_path)
