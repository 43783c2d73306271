"""Warm-up requests, read with TensorFlow Serving's own messages."""

import sys

import numpy as np
import pytest

from keras_preact.export import _warmup

tf = pytest.importorskip("tensorflow")
PATH = "assets.extra/tf_serving_warmup_requests"


def prediction_logs(version):
    from tensorflow_serving.apis import prediction_log_pb2

    records = tf.data.TFRecordDataset(str(version / PATH)).as_numpy_iterator()
    return [prediction_log_pb2.PredictionLog.FromString(record) for record in records]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="float32").reshape(2, 3),
        np.full((4, 2), 7, "int64"),
        np.zeros((0, 3), "float32"),
        np.array(True),
        np.array([np.nan, 0.0]),
        np.array([b"a", b"a\0", b"\xff"], object),
        np.array([b"same", b"same"], object),
    ],
    ids=str,
)
def test_every_request_comes_back(tmp_path, array):
    _warmup.write(tmp_path, iter([("first", {"x": array}), ("second", {})]))
    first, second = prediction_logs(tmp_path)
    request = first.predict_log.request
    assert request.model_spec.signature_name == "first"
    assert not request.model_spec.name  # a server takes the version that it loads
    assert second.predict_log.request.model_spec.signature_name == "second"
    [(name, inputs), (_, nothing)] = _warmup.read(tmp_path)
    assert (name, nothing) == ("first", {})
    for found in (tf.make_ndarray(request.inputs["x"]), inputs["x"]):
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


def test_equal_values_need_the_space_of_one(tmp_path):
    images = np.full((32, 224, 224, 3), 127.5, "float32")
    files = np.full(64, b"\x89PNG" + bytes(1000), object)
    _warmup.write(tmp_path, [("first", {"images": images}), ("second", {"files": files})])
    assert (tmp_path / PATH).stat().st_size < 1400


def test_at_most_a_thousand(tmp_path):
    request = ("serving_default", {"images": np.zeros((1, 2), "float32")})
    _warmup.write(tmp_path / "1", [request] * 1000)
    assert len(prediction_logs(tmp_path / "1")) == 1000
    with pytest.raises(ValueError, match="at most 1000"):
        _warmup.write(tmp_path / "2", [request] * 1001)
    assert not (tmp_path / "2").exists()


def test_no_file(tmp_path):
    assert _warmup.read(tmp_path) == []
    (tmp_path / PATH).mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        _warmup.write(tmp_path, [])


@pytest.mark.parametrize("kind", ["another kind", "no type", "cut short", "bytes", "flipped bit"])
def test_damaged_records(tmp_path, kind):
    _warmup.write(tmp_path, [("s", {"x": np.arange(5.0)})])
    [log] = prediction_logs(tmp_path)
    record, other = log.SerializeToString(), type(log)()
    if kind == "another kind":
        other.classify_log.request.model_spec.name = "x"
    else:
        other.predict_log.request.inputs["x"].float_val.append(1)
    others = {"cut short": record[:-3], "bytes": b"\xff" * 20, "flipped bit": record}
    with tf.io.TFRecordWriter(str(tmp_path / PATH)) as file:
        file.write(others.get(kind) or other.SerializeToString())
    if kind == "flipped bit":
        content = bytearray((tmp_path / PATH).read_bytes())
        content[20] ^= 1
        (tmp_path / PATH).write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read: one is damaged"):
        _warmup.read(tmp_path)


def test_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_serving.apis", None)
    with pytest.raises(ImportError, match=r"pip install 'keras-preact\[tf-serving\]'"):
        _warmup.write(tmp_path, [("s", {})])
