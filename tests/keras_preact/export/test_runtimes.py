"""`kp.export.save_onnx` and `save_litert`: what ONNX Runtime and LiteRT make of the
files, and what failures leave behind.
"""

import errno
import json
import os
import types
import zipfile

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import atomic
from keras_preact.export import _check, _children, _graph, _replay, _scores
from keras_preact.export.runtimes import TARGETS, save_litert, save_onnx
from tests.keras_preact import harness
from tests.keras_preact.export import one_process
from tests.keras_preact.export.networks import grouped, stacked_with_dropout

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("tf2onnx")
litert = pytest.importorskip("ai_edge_litert.interpreter")

SAVE = {"onnx": save_onnx, "litert": save_litert}
DIGITS = [f"digit {i}" for i in range(10)]
PREPROCESSING = kp.model_entry("digits_resnet8_preact").preprocessing

#: Written in float32.
MIXED = {"classifier_activation": "sigmoid", "dtype": "mixed_bfloat16"}
#: Name to model, and the shape of an image that it is asked about.
MODELS = {
    "stacked": (lambda: stacked_with_dropout(4), (8, 8, 1)),
    "any size": (lambda: grouped(**MIXED), (9, 12, 3)),
    "transformer": (
        lambda: kp.models.transformer(2, width=32, patch_size=2, input_shape=(8, 8, 1)),
        (8, 8, 1),
    ),
}
FILES = [
    ("stacked", "onnx"),
    ("stacked", "litert"),
    ("any size", "onnx"),
    ("any size", "litert"),
    ("transformer", "onnx"),  # ONNX has no complementary error function
]
if keras.backend.backend() != "tensorflow":  # the network is handed over in the same way for all
    del FILES[1:]


@pytest.fixture(scope="module")
def child():
    with one_process.started() as run:
        yield run


@pytest.fixture(scope="module", params=FILES, ids="-".join)
def file(request, child, tmp_path_factory):
    """A model written as a user does it, but for the number of processes; its logits are
    those of its own code, in float32.
    """
    name, kind = request.param
    build, shape = MODELS[name]
    model = build()
    harness.randomize(model)
    before = model.get_weights()
    path = tmp_path_factory.mktemp("files") / "new" / f"digits{TARGETS[kind].suffix}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_children, "run", child)
        patch.setattr(_check, "compare", lambda *_: {})  # below, and closer
        preprocessing = PREPROCESSING if name == "stacked" else None
        assert SAVE[kind](model, path, classes=DIGITS, preprocessing=preprocessing) == path
    np.testing.assert_equal(model.get_weights(), before)
    images = np.random.default_rng(0).uniform(0, 1, (5, *shape)).astype("float32")
    images *= 255 if name == "stacked" else 1
    if name == "any size":
        model = kp.models.changed_copy(model, dtype="float32")
    logits = keras.Model(model.inputs[0], model.logits)(images, training=False)
    return types.SimpleNamespace(
        name=name,
        kind=kind,
        path=path,
        images=images,
        logits=keras.ops.convert_to_numpy(logits),
        activation="sigmoid" if name == "any size" else "softmax",
    )


@pytest.mark.backend
def test_outputs_are_those_of_the_model(file):
    probabilities = _scores.PROBABILITIES[file.activation](file.logits.astype("float64"))
    serve = _replay.RUNTIMES[file.kind](str(file.path))
    for n in (1, 2, 5):
        outputs = serve(file.images[:n])
        assert outputs.keys() == {"logits", "probabilities"}
        assert {value.dtype for value in outputs.values()} == {np.dtype("float32")}
        harness.close(outputs["logits"], file.logits[:n])
        harness.close(outputs["probabilities"], probabilities[:n])


def test_form_and_metadata(file):
    assert [entry.name for entry in file.path.parent.iterdir()] == [file.path.name]
    if file.kind == "onnx":
        model = onnx.load(file.path)
        onnx.checker.check_model(model, full_check=True)
        assert {opset.domain: opset.version for opset in model.opset_import}[""] == 18
        form = {
            value.name: [
                size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim
            ]
            for value in (*model.graph.input, *model.graph.output)
        }
        size = ["height", "width", 3] if file.name == "any size" else [8, 8, 1]
        scores = {key: ["batch", 10] for key in ("logits", "probabilities")}
        assert form == {"images": ["batch", *size]} | scores
        metadata = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
    else:
        with zipfile.ZipFile(file.path) as archive:
            metadata = json.loads(archive.read("metadata.json"))
    pixels = file.name == "stacked"
    assert metadata == {
        "classes": DIGITS,
        "preprocessing": PREPROCESSING.to_dict() if pixels else None,
        "pixels": pixels,
        "activation": file.activation,
    }


def test_plain_operations(file):
    """Stacks are unrolled, and nothing is left of training."""
    if file.kind == "onnx":
        nodes = onnx.load(file.path).graph.node
        found = [node.op_type for node in nodes]
        norms = [node for node in nodes if node.op_type == "BatchNormalization"]
        assert all(len(node.output) == 1 for node in norms)  # others are statistics in training
    else:
        interpreter = litert.Interpreter(str(file.path))
        found = [operation["op_name"] for operation in interpreter._get_ops_details()]
    unwanted = ["loop", "while", "scan", "call", "random", "dropout", "flex", "custom", "variable"]
    assert not [op for op in found for word in unwanted if word in op.lower()]
    if file.name == "stacked":
        assert found.count("Conv" if file.kind == "onnx" else "CONV_2D") == 13


# --- paths, wrong input, failures: without the work of converting


@pytest.mark.usefixtures("quick")
def test_a_file_is_never_overwritten(small, tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"

    def refused():
        with pytest.raises(ValueError, match="never overwritten"):
            save_onnx(small, path, classes=["a", "b"])

    path.write_text("mine")
    refused()
    path.unlink()
    path.symlink_to("nowhere")
    refused()
    path.unlink()
    monkeypatch.setattr(_check, "compare", lambda *_: path.write_text("another process"))
    refused()
    assert path.read_text() == "another process"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("quick")
def test_a_file_system_without_hard_links(small, tmp_path, monkeypatch):
    def link(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    assert save_onnx(small, tmp_path / "m.onnx", classes=["a", "b"]).read_bytes() == b"file"
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "m.tflite"}, "must end in .onnx"),
        (
            {"preprocessing": {"mean": [0], "std": [0], "size": 8}},
            "must be a finite number above 0",
        ),
        ({"classes": ["a"]}, "each of the model's 2 outputs"),
        ({"dtype": "mixed_bfloat16"}, "layers that compute in bfloat16"),
    ],
)
def test_wrong_arguments(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    given = {"path": "m.onnx", "classes": ["a", "b"], "dtype": "float32"} | arguments
    layer = keras.layers.Dense(2, dtype=given.pop("dtype"))
    with pytest.raises(ValueError, match=message):
        save_onnx(keras.Sequential([keras.Input((6,)), layer]), **given)
    assert not list(tmp_path.iterdir())


NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("place", "step", "passed", "error"),
    [
        (_graph, "write", 0, KeyboardInterrupt()),
        (_children, "run", 0, NO_ROOM),
        (_check, "compare", 0, KeyboardInterrupt()),
        (atomic, "sync", 0, NO_ROOM),
        # of the folder: the file, which may not last, is there already
        (atomic, "sync", 1, KeyboardInterrupt()),
    ],
    ids=str,
)
def test_a_failure_leaves_nothing(small, tmp_path, monkeypatch, place, step, passed, error):
    calls = []

    def fail(*_):
        calls.append(step)
        if len(calls) > passed:
            raise error

    monkeypatch.setattr(place, step, fail)
    message = "no room for the export" if error is NO_ROOM else None
    with pytest.raises(type(error), match=message):
        save_onnx(small, tmp_path / "new" / "m.onnx", classes=["a", "b"])
    assert not list(tmp_path.iterdir())
