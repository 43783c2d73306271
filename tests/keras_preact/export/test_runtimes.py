"""`kp.export.save_onnx` and `save_litert`: what ONNX Runtime and LiteRT make of the
files, and what failures leave behind.
"""

import collections
import contextlib
import dataclasses
import errno
import functools
import json
import os
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import atomic
from keras_preact.export import _check, _children, _graph, _scores
from keras_preact.export.runtimes import TARGETS, save_litert, save_onnx
from tests.keras_preact.export import one_process
from tests.keras_preact.export.networks import full_disk, stacked_with_dropout
from tests.keras_preact.harness import randomize

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("tf2onnx")
litert = pytest.importorskip("ai_edge_litert.interpreter")

SAVE = {"onnx": save_onnx, "litert": save_litert}
PIXELS = {"mean": [77.0], "std": [95.0]}
DIGITS = [f"digit {i}" for i in range(10)]


def cifar(depth=8, **options):
    return kp.models.resnet_cifar(
        depth, **{"width_factor": 0.25, "input_shape": (8, 8, 1)} | options
    )


#: Name to model, and the shape of an image that it is asked about, channels last.
MODELS = {
    "pixels": (lambda: cifar(**PIXELS), (8, 8, 1)),
    "original": (
        lambda: cifar(arrangement="original", classifier_activation="softmax", **PIXELS),
        (8, 8, 1),
    ),
    "stacked, dropout": (lambda: stacked_with_dropout(4), (8, 8, 1)),
    "mixed precision": (lambda: cifar(dtype="mixed_bfloat16", **PIXELS), (8, 8, 1)),
    "channels first": (
        lambda: cifar(input_shape=(1, 12, 8), data_format="channels_first", **PIXELS),
        (12, 8, 1),
    ),
    "any size, grouped": (
        lambda: cifar(
            11,
            block=kp.blocks.Bottleneck(groups=2),
            input_shape=(None, None, 3),
            classifier_activation="sigmoid",
        ),
        (9, 12, 3),
    ),
    "dense": (
        lambda: kp.models.dense_resnet(6, input_shape=(20,), classes=10, shortcut="dropout"),
        (20,),
    ),
    "transformer": (
        lambda: kp.models.pre_ln_transformer(2, width=32, patch_size=2, input_shape=(8, 8, 1)),
        (8, 8, 1),
    ),
}
if keras.backend.backend() != "tensorflow":  # what differs there is the file handed over
    MODELS = {
        name: MODELS[name]
        for name in ("pixels", "stacked, dropout", "mixed precision", "any size, grouped")
    }
#: Largest difference, as a share of the largest logit: rounding in float32, in bfloat16.
TOLERANCE = {name: 8 / 256 if name.startswith("mixed") else 1e-5 for name in MODELS}


def run(name: str, path: Path, images: np.ndarray) -> dict[str, np.ndarray]:
    """Return a file's outputs by name."""
    if name == "onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, {"images": images}), strict=True))
    return litert.Interpreter(str(path)).get_signature_runner("serving_default")(images=images)


def logits_of(model, images: np.ndarray) -> np.ndarray:
    """Return the logits of a network, from its own code on the backend of these tests,
    in float64.
    """
    if model.get_config().get("data_format") == "channels_first" and images.ndim == 4:
        images = np.moveaxis(images, -1, 1)
    output = keras.Model(model.inputs[0], model.logits)(images, training=False)
    return keras.ops.convert_to_numpy(keras.ops.cast(output, "float32")).astype("float64")


@dataclasses.dataclass(frozen=True)
class Converted:
    model: keras.Model
    paths: dict[str, Path]
    images: np.ndarray
    logits: np.ndarray


def build(name):
    model = MODELS[name][0]()
    randomize(model)
    return model


def write_files(folder, name, run_module):
    """Write a model of MODELS in both formats: the steps of an export."""
    model = build(name)
    if name == "mixed precision":
        model = kp.models.changed_copy(model, dtype="float32")
    scores = _scores.take_apart(model)
    network, graph, metadata = (folder / part for part in ("n.keras", "graph", "metadata.json"))
    scores.core.save(network)
    metadata.write_text(json.dumps({"activation": scores.activation}))
    plan = _graph.Plan(scores.activation, fold=False, plain=True).to_json()
    run_module(["-m", _graph.__name__, str(network), plan, str(graph)])
    for kind, target in TARGETS.items():
        arguments = [kind, graph, folder / f"model{target.suffix}", metadata]
        run_module(["-m", "keras_preact.export._convert", *map(str, arguments)])


@pytest.fixture(scope="module")
def files(once_per_run):
    """A function from a key of MODELS to the model in both formats. One process makes
    those of all.
    """
    with contextlib.ExitStack() as stack:
        process = functools.cache(lambda: stack.enter_context(one_process.started()))

        @functools.cache
        def converted(name):
            number = list(MODELS).index(name)
            folder = once_per_run(
                f"model_for_runtimes_{number}", lambda folder: write_files(folder, name, process())
            )
            model, shape = build(name), MODELS[name][1]
            images = np.random.default_rng(number).uniform(0, 1, (5, *shape)).astype("float32")
            images *= 255 if _scores.take_apart(model).takes_pixels else 1
            paths = {key: folder / f"model{target.suffix}" for key, target in TARGETS.items()}
            return Converted(model, paths, images, logits_of(model, images))

        yield converted


SLOW = ("original", "channels first", "dense")


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.soak if name in SLOW else ()) for name in MODELS]
)
def name(request):
    return request.param


@pytest.mark.backend
@pytest.mark.parametrize("kind", TARGETS)
def test_outputs_are_those_of_the_model(files, name, kind):
    file = files(name)
    wanted = file.logits
    probabilities = _scores.PROBABILITIES["sigmoid" if "grouped" in name else "softmax"](wanted)
    scale = max(1, np.abs(wanted).max())
    for n in (1, 2, 5):
        outputs = run(kind, file.paths[kind], file.images[:n])
        assert {key: (value.dtype, value.shape) for key, value in outputs.items()} == {
            key: (np.float32, (n, 10)) for key in ("logits", "probabilities")
        }
        np.testing.assert_allclose(
            outputs["logits"], wanted[:n], rtol=0, atol=TOLERANCE[name] * scale
        )
        np.testing.assert_allclose(
            outputs["probabilities"], probabilities[:n], rtol=0, atol=TOLERANCE[name] * scale
        )


@pytest.mark.backend
def test_onnx_form(files, name):
    graph = onnx.load(files(name).paths["onnx"])
    onnx.checker.check_model(graph, full_check=True)
    assert {opset.domain: opset.version for opset in graph.opset_import}[""] == 18

    def form(values):
        return {
            value.name: [
                size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim
            ]
            for value in values
        }

    size = ("height", "width", 3) if "any size" in name else MODELS[name][1]
    assert form(graph.graph.input) == {"images": ["batch", *size]}
    assert form(graph.graph.output) == {"logits": ["batch", 10], "probabilities": ["batch", 10]}


@pytest.mark.backend
def test_litert_batch_size_through_the_interpreter(files):
    file = files("pixels")
    interpreter = litert.Interpreter(str(file.paths["litert"]))
    (images,) = interpreter.get_input_details()
    assert images["shape_signature"].tolist() == [-1, 8, 8, 1]
    wanted = file.logits
    for n in (3, 1, 5):
        interpreter.resize_tensor_input(images["index"], [n, 8, 8, 1])
        interpreter.allocate_tensors()
        interpreter.set_tensor(images["index"], file.images[:n])
        interpreter.invoke()
        closest = min(
            np.abs(interpreter.get_tensor(output["index"]) - wanted[:n]).max()
            for output in interpreter.get_output_details()
        )
        assert closest <= 1e-5 * max(1, np.abs(wanted).max())


def operations(name: str, path: Path) -> collections.Counter:
    if name == "onnx":
        return collections.Counter(node.op_type for node in onnx.load(path).graph.node)
    interpreter = litert.Interpreter(str(path))
    return collections.Counter(operation["op_name"] for operation in interpreter._get_ops_details())


@pytest.mark.backend
@pytest.mark.parametrize("kind", TARGETS)
def test_plain_operations(files, name, kind):
    found = operations(kind, files(name).paths[kind])
    assert "if" not in {operation.lower() for operation in found}
    for word in (
        "loop",
        "while",
        "scan",
        "call",
        "random",
        "dropout",
        "flex",
        "custom",
        "variable",
    ):
        assert not [operation for operation in found if word in operation.lower()]
    if kind == "onnx":  # a normalisation has outputs for its statistics in training only
        norms = [
            node
            for node in onnx.load(files(name).paths[kind]).graph.node
            if node.op_type == "BatchNormalization"
        ]
        assert all(len(node.output) == 1 for node in norms)
    if name == "stacked, dropout":
        assert (
            found["Conv" if kind == "onnx" else "CONV_2D"] == 13
        )  # the units of the stacks, each by itself


# --- the whole way


def metadata_of(name: str, path: Path) -> dict:
    if name == "onnx":
        return {entry.key: json.loads(entry.value) for entry in onnx.load(path).metadata_props}
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("metadata.json"))


@pytest.mark.backend
def test_metadata(files, name):
    for kind, path in files(name).paths.items():
        assert metadata_of(kind, path) == {
            "activation": "sigmoid" if "grouped" in name else "softmax"
        }


#: Other backends hand the network over in the same way for both formats.
@pytest.mark.parametrize(
    ("kind", "model_name"),
    [
        ("onnx", "mixed precision"),
        pytest.param("litert", "stacked, dropout", marks=pytest.mark.soak),
    ],
)
def test_save(files, tmp_path, kind, model_name):
    file = files(model_name)
    before, dtypes = file.model.get_weights(), _scores.take_apart(file.model).dtypes
    path = tmp_path / "files" / f"digits{TARGETS[kind].suffix}"
    preprocessing = kp.model_entry("digits_resnet8_preact").preprocessing
    assert SAVE[kind](file.model, path, classes=DIGITS, preprocessing=preprocessing) == path
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert metadata_of(kind, path) == {
        "classes": DIGITS,
        "preprocessing": preprocessing.to_dict(),
        "pixels": True,
        "activation": "softmax",
    }
    outputs = run(kind, path, file.images)
    same = run(kind, file.paths[kind], file.images)
    for key in ("logits", "probabilities"):
        np.testing.assert_allclose(outputs[key], same[key], rtol=1e-5, atol=1e-5)
    for was, is_now in zip(before, file.model.get_weights(), strict=True):
        np.testing.assert_array_equal(was, is_now)
    assert _scores.take_apart(file.model).dtypes == dtypes


@pytest.mark.soak
@pytest.mark.parametrize("kind", TARGETS)
def test_an_operation_that_the_format_lacks(tmp_path, kind):
    inputs = keras.Input((6,))
    x = keras.ops.erfinv(keras.layers.Dense(4, activation="tanh")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    path = tmp_path / f"m{TARGETS[kind].suffix}"
    with pytest.raises(
        kp.export.ExportError, match=rf"(?s)to {TARGETS[kind].title} failed.*Erfinv"
    ):
        SAVE[kind](model, path, classes=["a", "b"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", TARGETS)
def test_a_different_result_is_an_error(files, tmp_path, kind):
    other = MODELS["pixels"][0]()
    randomize(other, seed=1)
    path = files("pixels").paths[kind]
    message = (
        rf"The {TARGETS[kind].title} file's logits differ from the model's by up to .* is allowed"
    )
    with pytest.raises(kp.export.ExportError, match=message):
        _check.compare(_scores.take_apart(other), path, tmp_path, kind)


@pytest.mark.parametrize("kind", TARGETS)
def test_a_damaged_file_is_an_error(files, tmp_path, kind):
    path = tmp_path / "damaged"
    path.write_bytes(files("pixels").paths[kind].read_bytes()[:5000])
    with pytest.raises(
        kp.export.ExportError, match=rf"Running the {TARGETS[kind].title} file with .* failed"
    ):
        _check.compare(_scores.take_apart(files("pixels").model), path, tmp_path, kind)


# --- paths, wrong input, failures: without the work of converting


@pytest.fixture
def small():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])


@pytest.fixture
def quick(monkeypatch):
    """Neither convert nor check."""
    monkeypatch.setattr(_graph, "write", lambda core, plan, path: path.mkdir())
    monkeypatch.setattr(
        _children, "run", lambda arguments, *_: Path(arguments[4]).write_bytes(b"file")
    )
    monkeypatch.setattr(_check, "compare", lambda *_: {})


@pytest.mark.backend
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", TARGETS)
def test_a_file_is_never_overwritten(small, tmp_path, monkeypatch, kind):
    path = tmp_path / f"m{TARGETS[kind].suffix}"
    path.write_text("mine")
    with pytest.raises(ValueError, match="exists, and a file is never overwritten"):
        SAVE[kind](small, path, classes=["a", "b"])
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(ValueError, match="never overwritten"):
        SAVE[kind](small, path, classes=["a", "b"])
    path.unlink()
    monkeypatch.setattr(_check, "compare", lambda *_: path.write_text("another process"))
    with pytest.raises(ValueError, match="never overwritten"):
        SAVE[kind](small, path, classes=["a", "b"])
    assert path.read_text() == "another process"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.backend
@pytest.mark.usefixtures("quick")
def test_a_file_system_without_hard_links(small, tmp_path, monkeypatch):
    def link(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    assert save_onnx(small, tmp_path / "m.onnx", classes=["a", "b"]).read_bytes() == b"file"
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.backend
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "m.tflite"}, r"must end in .onnx. Received: m.tflite"),
        ({"classes": ["a"]}, "each of the model's 2 outputs.*Received: 1 names"),
        ({"classes": "ab"}, "list of names"),
        ({"preprocessing": {"mean": [0], "std": [0], "size": 8}}, "must be positive"),
    ],
)
def test_wrong_arguments(small, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        save_onnx(small, **{"path": "m.onnx", "classes": ["a", "b"]} | arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.backend
def test_wrong_models(tmp_path):
    mixed = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, dtype="mixed_bfloat16")])
    for model, message in (
        (cifar(include_top=False), "include_top=True"),
        (
            mixed,
            r"LiteRT files compute in float32: .*Received: layers that compute in bfloat16",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            save_litert(model, tmp_path / "m.tflite", classes=["a", "b"])
    assert not list(tmp_path.iterdir())


@pytest.mark.backend
@pytest.mark.parametrize("kind", TARGETS)
def test_a_missing_package(small, tmp_path, monkeypatch, kind):
    monkeypatch.setitem(
        TARGETS, kind, dataclasses.replace(TARGETS[kind], modules=("json", "no_such_package"))
    )
    with pytest.raises(
        ImportError, match=rf"needs no_such_package: pip install 'keras-preact\[{kind}\]'"
    ):
        SAVE[kind](small, tmp_path / f"m{TARGETS[kind].suffix}", classes=["a", "b"])
    assert not list(tmp_path.iterdir())


@pytest.mark.backend
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), kp.export.ExportError("differs"), OSError("gone")], ids=repr
)
@pytest.mark.parametrize(
    ("place", "step"),
    [
        (_graph, "write"),
        (_children, "run"),
        (_check, "compare"),
        (atomic, "sync"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_failure_leaves_nothing(small, tmp_path, monkeypatch, error, place, step):
    def fail(*_):
        raise error

    monkeypatch.setattr(place, step, fail)
    with pytest.raises(type(error)):
        save_onnx(small, tmp_path / "new" / "m.onnx", classes=["a", "b"])
    assert not list(tmp_path.iterdir())


@pytest.mark.backend
@pytest.mark.usefixtures("quick")
def test_a_file_that_may_not_last_is_taken_back(small, tmp_path, monkeypatch):
    def sync(path):
        if path == tmp_path:
            assert (path / "m.onnx").exists()
            raise OSError("gone")

    monkeypatch.setattr(atomic, "sync", sync)
    with pytest.raises(OSError, match="gone"):
        save_onnx(small, tmp_path / "m.onnx", classes=["a", "b"])
    assert not list(tmp_path.iterdir())


@pytest.mark.backend
def test_full_disk(tmp_path):
    model = build("pixels")
    message = r"no room for the export in .* \(File too large\)"
    with full_disk(10_000), pytest.raises(OSError, match=message):
        save_litert(model, tmp_path / "m.tflite", classes=DIGITS)
    assert not list(tmp_path.iterdir())
