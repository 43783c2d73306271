"""`kp.export.save`: what it writes, what a process with TensorFlow alone makes of it,
and what failures leave behind.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.export import _check, _children, _directory, _flat, _graph, _replay, _scores
from keras_preact.serving import engines, loading
from keras_preact.serving.settings import Settings
from tests.keras_preact.export import image_files, one_process
from tests.keras_preact.export.networks import full_disk, stacked_with_dropout, two_stages
from tests.keras_preact.harness import randomize

PIXELS = {"mean": [77.0], "std": [95.0]}
#: What is not needed of the normalisations behind convolutions and dense layers.
FOLDED = re.compile(r"(stem_norm|branch/norm_[12])/(gamma|moving_mean|moving_variance)$")
#: Arrangement to the paths of the normalisations that stand right behind a weight.
FOLDED_IN = {
    "original": r"stem_norm|branch/norm_[12]|projection/norm",
    "bn_after_addition": r"stem_norm|branch/norm_1",
    "relu_before_addition": r"stem_norm|branch/norm_[12]|projection/norm",
    "relu_only_preactivation": r"stem_norm|branch/norm_[12]|projection/norm",
    "full_preactivation": r"stem_norm|branch/norm_1",
    "bn_only_preactivation": r"^$",
}
DIGITS = [f"digit {i}" for i in range(10)]


SQUEEZED = kp.blocks.Basic(squeeze_excitation=4)
STANDARDIZED = kp.blocks.Basic(standardize_weights=True)


def sequential(*last):
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="relu"), *last])


def grouped():
    return kp.models.resnet_cifar(
        11,
        width_factor=0.25,
        block=kp.blocks.Bottleneck(groups=2),
        input_shape=(None, None, 3),
        classifier_activation="softmax",
    )


def mixed():
    return kp.models.resnet_cifar(
        8,
        width_factor=0.25,
        input_shape=(8, 8, 1),
        classifier_activation="sigmoid",
        dtype="mixed_bfloat16",
        **PIXELS,
    )


#: Name to model, and the shapes it is served.
MODELS = {
    "pixels": (lambda: kp.models.resnet_cifar(8, input_shape=(8, 8, 1), **PIXELS), (8, 8, 1)),
    "softmax, any size, grouped": (grouped, (9, 12, 3)),
    "mixed precision, sigmoid": (mixed, (8, 8, 1)),
    "not folded, dense": (
        lambda: kp.models.dense_resnet(6, input_shape=(20,), classes=10, shortcut="dropout"),
        (20,),
    ),
    "stacked, dropout": (lambda: stacked_with_dropout(8), (8, 8, 1)),
    "functional": (lambda: sequential(keras.layers.Dense(10, activation="softmax")), (6,)),
}
if keras.backend.backend() != "tensorflow":  # what differs there is the file handed over
    MODELS = {
        name: row for name, row in MODELS.items() if name not in ("not folded, dense", "functional")
    }
PREPROCESSING = kp.model_entry("digits_resnet8_preact").preprocessing
COLOURS = kp.preprocessing.Preprocessing(
    (100, 120, 140), (50, 60, 70), 12, resize=12, crop="center"
)
#: Largest difference, as a share of the largest logit: rounding in float32, in bfloat16.
TOLERANCE = {name: 8 / 256 if name.startswith("mixed") else 1e-5 for name in MODELS}


@dataclasses.dataclass(frozen=True)
class Export:
    model: keras.Model
    path: Path
    images: np.ndarray
    pixels: np.ndarray | None
    served: dict
    description: dict

    @property
    def card(self):
        return json.loads((self.path.parent / "model_card.json").read_text())


def draw(name):
    """Return random images as the model takes them, and pixels for image files if it
    takes these.
    """
    _, shape = MODELS[name]
    random = np.random.default_rng(len(name))
    images = random.uniform(
        0, 255 if any(word in name for word in ("pixels", "mixed", "stacked")) else 1, (3, *shape)
    ).astype("float32")
    files = random.integers(
        0, 256, (3, 12, 12, 3) if "any size" in name else (3, *shape), dtype="uint8"
    )
    return images, files if len(shape) == 3 else None


def build(name):
    model = MODELS[name][0]()
    randomize(model)
    return model


@pytest.fixture(scope="module")
def one_process_for_all():
    """A stand-in for `_children.run`, which exports call on other backends than
    TensorFlow; None on this one.
    """
    if keras.backend.backend() == "tensorflow":
        yield None
    else:
        with one_process.started() as run:
            yield run


def write_exports(folder, run_module):
    """Export every model of MODELS, and ask a process with TensorFlow alone about them:
    one start for all.
    """
    paths, requests = [], {}
    with pytest.MonkeyPatch.context() as patch:
        for i, (name, (_, shape)) in enumerate(MODELS.items()):
            if i == 1:  # the first one goes through save()'s own processes, the others share one
                patch.setattr(_check, "compare", lambda *_: {})
                if run_module:
                    patch.setattr(_children, "run", run_module)
            kp.export.save(
                build(name),
                folder / f"model {i}",
                classes=DIGITS,
                preprocessing=COLOURS if "any size" in name else PREPROCESSING,
                run={"recipe": "digits", "directory": Path("runs/1")},
                validation_data=(np.zeros((1, *shape)), np.zeros(1)),  # which float32 needs not
                metrics={"error": np.float32(0.25)},
                top_k=3,
                batch_sizes=(1, 3),
                fold_batch_norm="not folded" not in name,
            )
            paths.append(folder / f"model {i}" / "1")
            images, pixels = draw(name)
            requests |= {f"{i}/all": images, f"{i}/one": images[1:2]}
            for j, image in enumerate(() if pixels is None else pixels):
                file = image_files.encode(image.squeeze())
                requests[f"{i}/file{j}"] = np.frombuffer(file, "uint8")
    asked, answers = folder / "requests.npz", folder / "answers.npz"
    np.savez(asked, **requests)
    script = Path(__file__).with_name("serve_alone.py")
    command = [sys.executable, script, asked, answers, *paths]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def exports(once_per_run, one_process_for_all):
    """Every model of MODELS exported, and what a process with TensorFlow alone says of
    them.
    """
    folder = once_per_run("exports", lambda folder: write_exports(folder, one_process_for_all))
    answers = dict(np.load(folder / "answers.npz"))
    found = {}
    for i, name in enumerate(MODELS):
        own = {
            key.removeprefix(f"{i}/"): value
            for key, value in answers.items()
            if key.startswith(f"{i}/")
        }
        description = json.loads(str(own.pop("description")))
        path = folder / f"model {i}" / "1"
        found[name] = Export(build(name), path, *draw(name), own, description)
    return found


@pytest.fixture(params=MODELS)
def export(request, exports):
    return exports[request.param]


@pytest.fixture
def name(request):
    return request.node.callspec.params["export"]


@pytest.mark.backend
def test_layout(exports):
    path = exports["pixels"].path
    assert path.name == "1"
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["1", "model_card.json"]
    names = {entry.name for entry in path.iterdir()}
    assert names >= {"saved_model.pb", "variables", "assets", "assets.extra"}
    assert path.stat().st_mode & 0o777 == 0o755  # a server under another user reads it
    assert (path / "assets.extra" / "model_card.json").read_text() == (
        path.parent / "model_card.json"
    ).read_text()


@pytest.mark.backend
def test_outputs_are_those_of_the_model(export, name):
    own = export.model.predict(export.images, verbose=0).astype("float64")
    logits = export.served["all/logits"]
    allowed = TOLERANCE[name] * max(1, np.abs(logits).max())
    probabilities = export.served["all/probabilities"]
    if name in ("pixels", "not folded, dense", "stacked, dropout"):
        np.testing.assert_allclose(logits, own, rtol=0, atol=allowed)
        own = np.exp(own - own.max(-1, keepdims=True))
        own /= own.sum(-1, keepdims=True)
    np.testing.assert_allclose(probabilities, own, rtol=0, atol=TOLERANCE[name] * 2)
    from_logits = keras.ops.sigmoid(logits) if "sigmoid" in name else keras.ops.softmax(logits)
    np.testing.assert_allclose(probabilities, keras.ops.convert_to_numpy(from_logits), atol=1e-5)


@pytest.mark.backend
def test_batch_size_is_free(export):
    for output in ("logits", "probabilities"):
        assert export.served[f"one/{output}"].shape == (1, 10)
        all_logits = np.abs(export.served["all/logits"]).max()
        np.testing.assert_allclose(
            export.served[f"one/{output}"],
            export.served[f"all/{output}"][1:2],
            atol=1e-5 * max(1, all_logits),
        )


@pytest.mark.backend
def test_signatures(export, name):
    """As they are in the file, and the card says the same."""
    shape = MODELS[name][1] if "any size" not in name else (None, None, 3)
    images = {"images": ["float32", [None, *shape]]}
    scores = {key: ["float32", [None, 10]] for key in ("logits", "probabilities")}
    width = export.served["all/features"].shape[-1]
    wanted = {
        "serving_default": [images, scores],
        "features": [images, {"features": ["float32", [None, width]]}],
    }
    if len(shape) == 3:
        named = {
            "classes": ["string", [None, 3]],
            "scores": ["float32", [None, 3]],
            "indices": ["int32", [None, 3]],
        }
        wanted["predict_bytes"] = [{"image_bytes": ["string", [None]]}, named]
    assert export.description["signatures"] == wanted
    in_card = {
        key: [
            {name: [spec["dtype"], spec["shape"]] for name, spec in part[side].items()}
            for side in ("inputs", "outputs")
        ]
        for key, part in export.card["signatures"].items()
    }
    assert in_card == wanted
    takes_pixels = any(layer.name == "preprocessing" for layer in export.model.layers)
    for signature in ("serving_default", "features"):
        spec = export.card["signatures"][signature]["inputs"]["images"]
        assert spec["range"] == ([0, 255] if takes_pixels else [-2, 2])
        if not takes_pixels:
            assert (spec["mean"], spec["std"]) == ([0], [1])


@pytest.mark.backend
def test_features_are_what_the_classifier_reads(export, name):
    """The served logits and probabilities come from the served features and the
    classifier's own weights.
    """
    kernel, bias = export.model.get_weights()[-2:]
    logits = export.served["all/features"] @ kernel + bias
    np.testing.assert_allclose(
        export.served["all/logits"], logits, atol=1e-5 * max(1, np.abs(logits).max())
    )
    assert export.served["all/features"].dtype == np.float32


@pytest.mark.backend
def test_image_files(export, name):
    """predict_bytes decodes, normalises where the network does not, and names what the
    network finds.
    """
    if export.pixels is None:
        assert "predict_bytes" not in export.description["signatures"]
        return
    preprocessing = COLOURS if "any size" in name else PREPROCESSING
    own = (
        export.pixels.astype("float32")
        if export.card["pixels"]
        else preprocessing.normalize(export.pixels)
    )
    np.testing.assert_allclose(export.served["files/decoded"], own, atol=1e-6)
    scores = export.model.predict(own, verbose=0).astype("float64")
    if export.model.get_config()["classifier_activation"] is None:
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
    indices = export.served["files/indices"]
    allowed = 4 * TOLERANCE[name]
    np.testing.assert_allclose(
        export.served["files/scores"], -np.sort(-scores, axis=-1)[:, :3], rtol=0, atol=allowed
    )
    np.testing.assert_allclose(
        export.served["files/scores"], np.take_along_axis(scores, indices, -1), rtol=0, atol=allowed
    )
    assert export.served["files/classes"].tolist() == [
        [f"digit {i}" for i in row] for row in indices
    ]


@pytest.mark.backend
def test_wrong_images_are_refused(export):
    for signature in ("serving_default", "features"):
        refused = {key: value[signature] for key, value in export.description["refused"].items()}
        assert "shape" in refused["wrong size"].lower()
        assert "<<images holds a value that is not a finite number>>" in refused["not a number"]
        assert "<<images holds no image>>" in refused["no image"]


@pytest.mark.backend
def test_every_weight_once_and_operations_that_any_server_has(export, name):
    unread = (
        []
        if name.startswith("not folded")
        else [weight for weight in export.model.weights if FOLDED.search(weight.path)]
    )
    assert bool(unread) == (name not in ("not folded, dense", "functional"))
    assert export.description["variables"] == export.model.count_params() - sum(
        int(np.prod(w.shape)) for w in unread
    )
    assert not [
        op
        for op in export.description["operations"]
        if "Assign" in op or "Random" in op or "Xla" in op
    ]
    network = export.description["network"]  # files are decoded one by one
    assert not [op for op in network if "While" in op or "TensorList" in op]
    if name == "pixels":  # in the others the names of the weights take more room than the weights
        data = sum(file.stat().st_size for file in (export.path / "variables").iterdir())
        assert data < 1.3 * 4 * export.model.count_params()


@pytest.mark.backend
def test_card(exports):
    export = exports["pixels"]
    card = export.card
    assert card["name"] == "model 0"
    assert card["version"] == 1
    assert card["classes"] == DIGITS
    assert card["preprocessing"]["mean"] == [77.853723]
    assert card["run"] == {"recipe": "digits", "directory": "runs/1"}
    assert card["metrics"] == {"error": 0.25}
    assert card["versions"]["backend"] == keras.backend.backend()
    assert card["versions"]["keras"] == keras.__version__
    assert card["versions"]["numpy"] == np.__version__
    assert card["parameters"]["total"] == export.model.count_params()
    assert card["model"]["class"] == "ResidualNetwork"
    assert (
        kp.models.ResidualNetwork.from_config(card["model"]["config"]).count_params()
        == export.model.count_params()
    )
    assert card["pixels"] is True
    assert (card["activation"], card["top_k"], card["batch_sizes"], card["precision"]) == (
        "softmax",
        3,
        [1, 3],
        "float32",
    )
    assert card["check"]["batch_sizes"] == [1, 3]
    assert "accuracy" not in card["check"]
    largest, allowed = card["check"]["largest_difference"], card["check"]["allowed_difference"]
    assert all(0 <= largest[key] <= allowed[key] for key in ("logits", "probabilities"))
    assert allowed["logits"] < 1e-3


@pytest.mark.backend
def test_card_holds_the_hash_of_every_file(exports):
    export = exports["pixels"]
    own = Path("assets.extra/model_card.json")
    files = {path.relative_to(export.path) for path in export.path.rglob("*") if path.is_file()} - {
        own
    }
    assert {str(path) for path in files} == set(export.card["files"])
    for path in files:
        assert (
            hashlib.sha256((export.path / path).read_bytes()).hexdigest()
            == export.card["files"][str(path)]
        )


@pytest.mark.backend
def test_warm_up_requests(export, name):
    """For every signature and batch size, and they run."""
    wanted = {(signature, n) for signature in export.description["signatures"] for n in (1, 3)}
    assert {tuple(request) for request in export.description["warmed up"]} == wanted


@pytest.mark.backend
def test_channels_first_is_served_channels_last():
    model = kp.models.resnet_cifar(
        8, width_factor=0.25, input_shape=(1, 12, 8), data_format="channels_first", **PIXELS
    )
    randomize(model)
    scores = _scores.take_apart(model)
    images = _check.samples(scores)
    assert images.shape == (3, 12, 8, 1)
    logits = keras.ops.convert_to_numpy(scores.core(images, training=False)[0])
    np.testing.assert_allclose(
        logits, _check.expected(scores, images)["logits"], atol=1e-5 * max(1, np.abs(logits).max())
    )


@pytest.mark.backend
@pytest.mark.parametrize(
    ("last", "activation", "output_is"),
    [
        ((keras.layers.Dense(4),), "softmax", "logits"),
        ((keras.layers.Dense(4, activation="softmax"),), "softmax", "probabilities"),
        ((keras.layers.Dense(4), keras.layers.Softmax()), "softmax", "probabilities"),
        ((keras.layers.Dense(4), keras.layers.Activation("sigmoid")), "sigmoid", "probabilities"),
    ],
)
def test_logits_of_other_models(last, activation, output_is):
    model = sequential(*(type(layer).from_config(layer.get_config()) for layer in last))
    scores = _scores.take_apart(model)
    assert (scores.activation, scores.output_is) == (activation, output_is)
    x = np.random.default_rng(0).normal(size=(5, 6)).astype("float32")
    wanted = _check.expected(scores, x)
    logits = keras.ops.convert_to_numpy(scores.core(x)[0])
    np.testing.assert_allclose(logits, wanted["logits"], atol=1e-6)
    np.testing.assert_allclose(
        _scores.PROBABILITIES[activation](logits), wanted["probabilities"], atol=1e-6
    )


@pytest.mark.backend
def test_probabilities_of_extreme_logits():
    x = np.array([[-1000.0, 0, 1000]])
    np.testing.assert_array_equal(_scores.PROBABILITIES["sigmoid"](x), [[0, 0.5, 1]])
    np.testing.assert_array_equal(_scores.PROBABILITIES["softmax"](x), [[0, 0, 1]])


# --- versions, wrong input, failures: without the work of writing a graph


@pytest.fixture
def small():
    return sequential(keras.layers.Dense(2))


@pytest.fixture
def quick(monkeypatch):
    """Neither write a graph nor check it."""

    def write(core, plan, path):
        (path / "variables").mkdir(parents=True)
        (path / "saved_model.pb").write_bytes(b"graph")

    monkeypatch.setattr(_graph, "write", write)
    monkeypatch.setattr(_check, "compare", lambda *_: {})


@pytest.mark.backend
@pytest.mark.usefixtures("quick")
def test_versions(small, tmp_path):
    def save(version=None):
        return int(kp.export.save(small, tmp_path / "m", classes=["a", "b"], version=version).name)

    def card_version():
        return json.loads((tmp_path / "m" / "model_card.json").read_text())["version"]

    assert [save(), save(), save(7), save()] == [1, 2, 7, 8]
    assert save(4) == 4
    assert card_version() == 8  # the card beside the versions is the highest one's
    assert json.loads((tmp_path / "m/4/assets.extra/model_card.json").read_text())["version"] == 4
    with pytest.raises(
        ValueError, match=r"has a version 7.*next free one is 9.*Received: version=7"
    ):
        save(7)
    for version in (0, -1, 1.5, "2", True):
        with pytest.raises(ValueError, match="positive integer"):
            save(version)
    assert sorted(entry.name for entry in (tmp_path / "m").iterdir()) == [
        "1",
        "2",
        "4",
        "7",
        "8",
        "model_card.json",
    ]


@pytest.mark.backend
@pytest.mark.usefixtures("quick")
def test_a_version_that_another_process_takes_meanwhile(small, tmp_path, monkeypatch):
    def compare(*_):
        (tmp_path / "m" / "1").mkdir()
        return {}

    monkeypatch.setattr(_check, "compare", compare)
    path = kp.export.save(small, tmp_path / "m", classes=["a", "b"])
    assert path.name == "2"
    assert json.loads((path / "assets.extra/model_card.json").read_text())["version"] == 2
    (tmp_path / "m" / "1").rmdir()
    with pytest.raises(ValueError, match="has a version 1"):
        kp.export.save(small, tmp_path / "m", classes=["a", "b"], version=1)
    assert not list((tmp_path / "m" / "1").iterdir())


@pytest.mark.backend
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": ["a"]}, "each of the model's 2 outputs.*Received: 1 names"),
        ({"classes": ["a", "a"]}, "unique name.*'a' more than once"),
        ({"classes": "ab"}, "list of names.*Received: classes='ab'"),
        ({"classes": [0, 1]}, "list of names"),
        ({"metrics": {"loss": float("nan")}}, "cannot hold 'metrics'"),
        ({"top_k": 0}, "`top_k` must be a positive integer"),
        ({"batch_sizes": []}, r"at least one number.*Received: batch_sizes=\[\]"),
        ({"batch_sizes": (4, 2)}, "rising order"),
        ({"batch_sizes": (0, 2)}, "positive integer"),
        ({"precision": "int4"}, "precision"),
        ({"precision": "bfloat16"}, "needs validation_data"),
        ({"precision": "int8"}, "needs calibration_images"),
        (
            {"precision": "bfloat16", "validation_data": (np.zeros((3, 4)), np.zeros(2))},
            r"shapes \(3, 4\) and \(2,\)",
        ),
        (
            {"precision": "bfloat16", "validation_data": (np.zeros((3, 6)), np.zeros(3))},
            "networks of this package",
        ),
    ],
)
def test_wrong_arguments(small, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        kp.export.save(small, tmp_path / "m", **{"classes": ["a", "b"]} | arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.backend
def test_wrong_models(tmp_path):
    inputs = keras.Input((4,))
    two = keras.Model(inputs, [keras.layers.Dense(2)(inputs)] * 2)
    for model, message in (
        (kp.models.resnet_cifar(8, include_top=False), "include_top=True"),
        (keras.Sequential([keras.layers.Dense(2)]), "keras.Input"),
        (two, "one output.*Received: 1 inputs and 2 outputs"),
        (sequential(keras.layers.Dense(2, activation="tanh")), "must end in a Dense layer"),
        (
            sequential(keras.layers.Dense(2), keras.layers.BatchNormalization()),
            "must end in a Dense layer",
        ),
        (keras.layers.Dense(2), "Only a built functional"),
    ):
        with pytest.raises(ValueError, match=message):
            kp.export.save(model, tmp_path / "m", classes=["a", "b"])
    assert not list(tmp_path.iterdir())


@pytest.mark.backend
@pytest.mark.usefixtures("quick")
def test_a_file_in_the_way(small, tmp_path):
    (tmp_path / "m").write_text("mine")
    with pytest.raises(ValueError, match="a file"):
        kp.export.save(small, tmp_path / "m", classes=["a", "b"])
    assert (tmp_path / "m").read_text() == "mine"


@pytest.mark.backend
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), kp.export.ExportError("differs"), OSError("gone")], ids=repr
)
@pytest.mark.parametrize("at", ["check", "rename", "card"])
def test_a_failure_leaves_nothing(small, tmp_path, monkeypatch, error, at):
    def fail(*_):
        raise error

    @contextlib.contextmanager
    def failing():
        with pytest.MonkeyPatch.context() as patch:
            match at:
                case "check":
                    patch.setattr(_check, "compare", fail)
                case "rename":
                    patch.setattr(Path, "rename", fail)
                case "card":
                    patch.setattr(Path, "replace", fail)
            yield

    with failing(), pytest.raises(type(error)):
        kp.export.save(small, tmp_path / "saved_models" / "m", classes=["a", "b"])
    assert not list(tmp_path.iterdir())

    kp.export.save(small, tmp_path / "m", classes=["a", "b"])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "m").rglob("*")}
    with failing(), pytest.raises(type(error)):
        kp.export.save(small, tmp_path / "m", classes=["a", "b"])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "m").rglob("*")} == before


@pytest.mark.backend
def test_preprocessing_of_other_channels(tmp_path):
    model = kp.models.resnet_cifar(8, width_factor=0.25, input_shape=(8, 8, 1))
    with pytest.raises(ValueError, match=r"each of the model's 1 channels.*Received"):
        kp.export.save(model, tmp_path / "m", classes=DIGITS, preprocessing=COLOURS)
    with pytest.raises(TypeError, match="unknown"):
        kp.export.save(
            model,
            tmp_path / "m",
            classes=DIGITS,
            preprocessing=PREPROCESSING.to_dict() | {"unknown": 1},
        )
    assert not list(tmp_path.iterdir())


@pytest.fixture
def few_processes(monkeypatch, one_process_for_all):
    """Run SavedModels in this process, which has TensorFlow; a process without Keras
    does it for the first of `exports`.
    """
    if one_process_for_all:
        monkeypatch.setattr(_children, "run", one_process_for_all)

    def replay(path, batches, folder, runtime="saved_model"):
        serve = _replay.RUNTIMES[runtime](str(path))
        return {
            f"{name}/{key}": value
            for name, images in batches.items()
            for key, value in serve(images).items()
        }

    monkeypatch.setattr(_check, "replay", replay)


@pytest.fixture(scope="module")
def labelled():
    """A network, images, and what it says they are: of many classes."""
    model = two_stages(stacked=True, input_shape=(8, 8, 1), **PIXELS)
    randomize(model)
    squares = np.random.default_rng(1).uniform(0, 255, (70, 2, 2, 1)).astype("float32")
    images = squares.repeat(4, 1).repeat(4, 2)
    bias = model.layers[-1].bias
    logits = model.predict(images, verbose=0)
    bias.assign(keras.ops.convert_to_numpy(bias) - logits.mean(0))
    labels = (logits - logits.mean(0)).argmax(-1)
    assert len(set(labels)) >= 5
    return model, images, labels


@pytest.mark.backend
@pytest.mark.usefixtures("few_processes")
def test_bfloat16(labelled, tmp_path):
    """Half the bytes, float32 out, and the card tells what it cost."""
    tf = pytest.importorskip("tensorflow")
    model, images, labels = labelled
    path = kp.export.save(
        model,
        tmp_path / "m",
        classes=DIGITS,
        precision="bfloat16",
        validation_data=(images, labels),
        max_accuracy_loss=0.1,
    )
    served = tf.saved_model.load(str(path))
    size = sum(file.stat().st_size for file in (path / "variables").glob("*.data*"))
    assert size < 0.6 * sum(4 * int(np.prod(variable.shape)) for variable in served.weights)
    outputs = served.signatures["serving_default"](images=tf.constant(images))
    assert {value.dtype for value in outputs.values()} == {tf.float32}
    assert served.core(tf.constant(images))["features"].dtype == tf.float32
    right = float((outputs["logits"].numpy().argmax(-1) == labels).mean())
    card = json.loads((path / "assets.extra/model_card.json").read_text())
    assert card["precision"] == "bfloat16"
    assert card["check"]["accuracy"] == {
        "images": 70,
        "model": 1.0,
        "bfloat16": right,
        "max_loss": 0.1,
    }
    logits = model.predict(images, verbose=0)
    difference = np.abs(outputs["logits"].numpy() - logits).max()
    assert 0 < difference < 8 / 256 * np.abs(logits).max()


def in_8_bits(model, images, labels, path, of_training=None, **options):
    return kp.export.save(
        model,
        path,
        classes=DIGITS,
        precision="int8",
        validation_data=(images, labels),
        calibration_images=images[:32] if of_training is None else of_training,
        **options,
    )


def test_int8(labelled, tmp_path, caplog):
    """The convolutions are in 8 bits; the server's engine gives nearly the model's
    answers, TensorFlow those of float32 whatever the model computes in.
    """
    pytest.importorskip("nncf")
    ov = pytest.importorskip("openvino")
    model, images, labels = labelled
    mixed = kp.transfer.changed_copy(model, dtype="mixed_bfloat16")
    path = in_8_bits(mixed, images, labels, tmp_path / "m", max_accuracy_loss=0.4)
    card = loading.read_card(path)
    assert card.precision == "int8"
    loading.check_files(path, card.files)
    frozen, _ = loading.read_functions(path)
    serve = {
        name: engine(frozen, Settings(tmp_path), card.precision)
        for name, engine in engines.ENGINES.items()
    }
    assert "computes m in float32: its 8 bits are for the engine 'openvino'" in caplog.text
    outputs = {name: run(images) for name, run in serve.items()}
    logits = model.predict(images, verbose=0)
    largest = np.abs(logits).max()
    np.testing.assert_allclose(outputs["tensorflow"]["logits"], logits, atol=1e-5 * largest)
    assert outputs["openvino"].keys() == outputs["tensorflow"].keys()
    for name, values in outputs["openvino"].items():
        wanted = outputs["tensorflow"][name]
        assert 0.95 < np.corrcoef(values.ravel(), wanted.ravel())[0, 1] < 0.999999, name
    right = float((outputs["openvino"]["logits"].argmax(-1) == labels).mean())
    content = json.loads((path / "assets.extra/model_card.json").read_text())
    assert content["calibration_images"] == 32
    assert content["check"]["accuracy"] == {
        "images": 70,
        "model": pytest.approx(1, abs=0.3),  # in bfloat16
        "int8": pytest.approx(right, abs=2 / 70),  # rounded otherwise in a batch of another size
        "max_loss": 0.4,
    }
    compiled = ov.Core().compile_model(path / _directory.INT8, "CPU")
    kinds = [
        node.get_rt_info()["runtimePrecision"].astype(str)
        for node in compiled.get_runtime_model().get_ops()
        if node.get_rt_info()["layerType"].astype(str) == "Convolution"
    ]
    assert len(kinds) >= 7
    assert set(kinds) <= {"i8", "u8"}


def test_int8_that_loses_too_much(labelled, tmp_path):
    pytest.importorskip("nncf")
    model, images, labels = labelled
    dark = images[:32] / 100  # their ranges cut the activations of the others off
    with pytest.raises(
        kp.export.ExportError,
        match=r"accuracy on 70 images is [\d.]+ % in int8 and 100.00 % in the model",
    ):
        in_8_bits(model, images, labels, tmp_path / "m", dark)
    assert not list(tmp_path.iterdir())


@pytest.mark.backend
def test_int8_needs_packages(labelled, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'keras-preact\[int8\]'. Missing: nncf"):
        in_8_bits(*labelled, tmp_path / "m")


@pytest.mark.usefixtures("few_processes")
def test_bfloat16_that_loses_too_much(labelled, exports, tmp_path):
    model, images, labels = labelled
    reference = _check.Reference.of(_scores.take_apart(model), (images, labels), 0.1, "bfloat16")
    with pytest.raises(
        kp.export.ExportError,
        match=r"accuracy on 70 images is [\d.]+ % in bfloat16 and 100.00 % in the model",
    ):
        reference.compare(exports["pixels"].path, tmp_path)


@pytest.mark.backend
@pytest.mark.parametrize(
    ("arrangement", "options"),
    [
        *((arrangement, {"use_bias": True}) for arrangement in kp.ARRANGEMENTS),
        ("original", {"use_bias": "unless_norm", "downsampling": "blur", "block": SQUEEZED}),
        ("original", {"block": STANDARDIZED}),
    ],
    ids=str,
)
@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="folded by the process on TensorFlow"
)
def test_folded_networks_give_the_same(arrangement, options):
    """Every arrangement, with single units and stacks, projections, biases, and
    statistics far from the start.
    """
    # a standardised kernel would lose the factor again
    folded = re.compile(r"^$" if options.get("block") is STANDARDIZED else FOLDED_IN[arrangement])
    options = options | {"arrangement": arrangement, "shape_shortcut": "projection"}
    model = two_stages(stacked=True, width=8, input_shape=(8, 8, 3), **options)
    randomize(model)
    core = _scores.take_apart(model).core
    before = model.get_weights()
    images = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype("float32")
    wanted = [output.numpy() for output in core(images, training=False)]
    flat = _flat.flat(core, fold=True)
    kept = {
        layer.path for layer in flat.layers if isinstance(layer, keras.layers.BatchNormalization)
    }
    norms = {path.rsplit("/", 1)[0] for path in kp.weights.named(model) if path.endswith("/gamma")}
    assert len(kept) == len([path for path in norms if not folded.search(path)])
    outputs = [output.numpy() for output in flat(images, training=False)]
    for output, own in zip(outputs, wanted, strict=True):
        np.testing.assert_allclose(output, own, rtol=0, atol=1e-5 * max(1, np.abs(own).max()))
    for array, own in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(array, own)


@pytest.mark.backend
@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="made by the process on TensorFlow"
)
def test_nested_models_are_unrolled():
    """Networks and stacks inside a functional model, a layer that is called twice, and
    a nested model of two inputs, which stays one layer.
    """
    network = two_stages(
        stacked=True, width=8, input_shape=(8, 8, 3), include_top=False, pooling="avg"
    )
    pair = [keras.Input((16,)), keras.Input((16,))]
    both = keras.Model(pair, keras.layers.Add()(pair), name="both")
    inputs = keras.Input((8, 8, 3))
    x, mirrored = network(inputs), network(inputs[:, :, ::-1])
    model = keras.Model(inputs, keras.layers.Dense(3)(both([x, mirrored])))
    randomize(model)
    flat = _flat.flat(model, fold=True)
    assert not [layer for layer in flat.layers if isinstance(layer, kp.UnitStack)]
    images = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype("float32")
    own = model(images, training=False).numpy()
    np.testing.assert_allclose(
        flat(images, training=False).numpy(), own, rtol=0, atol=1e-5 * max(1, np.abs(own).max())
    )


@pytest.mark.backend
def test_diverged_weights_are_not_exported(small, tmp_path, monkeypatch):
    monkeypatch.setattr(_graph, "write", lambda core, plan, path: path.mkdir())
    small.set_weights([np.full(weight.shape, np.nan) for weight in small.get_weights()])
    with pytest.raises(ValueError, match="not finite"):
        kp.export.save(small, tmp_path / "m", classes=["a", "b"])
    assert not list(tmp_path.iterdir())


@pytest.mark.backend
@pytest.mark.usefixtures("few_processes")
def test_a_different_result_is_an_error(exports, tmp_path):
    other = MODELS["pixels"][0]()
    randomize(other, seed=1)
    with pytest.raises(
        kp.export.ExportError, match=r"logits differ from the model's by up to .* is allowed"
    ):
        _check.compare(_scores.take_apart(other), exports["pixels"].path, tmp_path)


@pytest.mark.backend
def test_full_disk(tmp_path):
    model = build("pixels")
    message = r"no room for the export in .*m \(File too large\)"
    with full_disk(100_000), pytest.raises(OSError, match=message):
        kp.export.save(model, tmp_path / "m", classes=DIGITS)
    assert not list(tmp_path.iterdir())


@pytest.mark.backend
@pytest.mark.skipif(
    keras.backend.backend() != "jax",
    reason="TensorFlow writes in the same process, torch as JAX does",
)
def test_a_layer_that_cannot_be_imported(tmp_path):
    model = sequential(
        keras.layers.Lambda(lambda x: x * 2, output_shape=(5,)), keras.layers.Dense(2)
    )
    with pytest.raises(
        kp.export.ExportError,
        match=r"(?s)failed \(exit status 1\).*registered.*Its last lines:.*Lambda",
    ):
        kp.export.save(model, tmp_path / "m", classes=["a", "b"])
    assert not list(tmp_path.iterdir())


_GROUPED = """
import keras, numpy as np, tensorflow as tf
import keras_preact as kp
model = kp.models.ResidualNetwork(
    [(16, 1, 1)],
    stem="3x3",
    stem_filters=16,
    block=kp.blocks.Bottleneck(groups=4),
    classes=2,
    input_shape=(8, 8, 3),
)
path = kp.export.save(model, "served", classes=("a", "b"), fold_batch_norm={fold})
images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
served = tf.saved_model.load(path).signatures["serving_default"](images=tf.constant(images))
expected = keras.ops.convert_to_numpy(model(images))
np.testing.assert_allclose(served["logits"], expected, atol=1e-5)
"""


@pytest.mark.backend
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="about TensorFlow's kernels")
@pytest.mark.parametrize("fold", [True, False])
def test_groups_without_onednn(fold, tmp_path):
    """TensorFlow without oneDNN, as on a CPU without AVX-512, fuses a convolution in groups
    with a ReLU behind into an operation that refuses groups.
    """
    done = subprocess.run(
        [sys.executable, "-c", _GROUPED.format(fold=fold)],
        cwd=tmp_path,
        env=os.environ | {"TF_ENABLE_ONEDNN_OPTS": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
