"""`kp.export.save`: what it writes, what a process with TensorFlow alone makes of it, and what failures leave behind."""

import contextlib
import dataclasses
import json
import resource
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.export import _check, _scores, saved_model
from tests.keras_preact.harness import randomize

PIXELS = {"mean": [77.0], "std": [95.0]}
DIGITS = [f"digit {i}" for i in range(10)]


def sequential(*last):
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="relu"), *last])


#: Name to model, and the shapes it is served.
MODELS = {
    "pixels": (lambda: kp.models.resnet_cifar(8, input_shape=(8, 8, 1), **PIXELS), (8, 8, 1)),
    "softmax, any size, grouped": (
        lambda: kp.models.resnet_cifar(
            11, groups=2, width_factor=0.25, block="bottleneck", input_shape=(None, None, 3), classifier_activation="softmax"
        ),
        (9, 12, 3),
    ),
    "mixed precision, sigmoid": (
        lambda: kp.models.resnet_cifar(
            8, width_factor=0.25, input_shape=(8, 8, 1), classifier_activation="sigmoid", dtype="mixed_bfloat16", **PIXELS
        ),
        (8, 8, 1),
    ),
    "dropout, dense": (lambda: kp.models.dense_resnet(6, input_shape=(20,), classes=10, shortcut="dropout"), (20,)),
    "stacked, dropout": (
        lambda: kp.models.resnet_cifar(
            20,
            stacked=True,
            remat=True,
            stochastic_depth=0.5,
            shortcut="dropout",
            width_factor=0.5,
            input_shape=(8, 8, 1),
            **PIXELS,
        ),
        (8, 8, 1),
    ),
    "functional": (lambda: sequential(keras.layers.Dense(10, activation="softmax")), (6,)),
}
#: Largest difference, as a share of the largest logit: rounding in float32, in bfloat16.
TOLERANCE = {name: 8 / 256 if name.startswith("mixed") else 1e-5 for name in MODELS}


@dataclasses.dataclass(frozen=True)
class Export:
    model: keras.Model
    path: Path
    images: np.ndarray
    served: dict
    description: dict

    @property
    def card(self):
        return json.loads((self.path.parent / "model_card.json").read_text())


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Every model of MODELS exported, and what a process with TensorFlow alone says of them: one start for all."""
    folder = tmp_path_factory.mktemp("saved_models")
    built, paths, requests = {}, [], {}
    for i, (name, (make, shape)) in enumerate(MODELS.items()):
        built[name] = make()
        randomize(built[name])
        with pytest.MonkeyPatch.context() as patch:
            if i:  # the first one goes through save()'s own check, the others are checked here
                patch.setattr(_check, "compare", lambda *_: {})
            path = kp.export.save(
                built[name],
                folder / f"model {i}",
                classes=DIGITS,
                preprocessing=kp.model_entry("digits_resnet8_preact").preprocessing,
                run={"recipe": "digits", "directory": Path("runs/1")},
                metrics={"error": np.float32(0.25)},
            )
        paths.append(path)
        requests[f"{i}/all"] = np.random.default_rng(i).uniform(0, 255 if i in (0, 2) else 1, (3, *shape)).astype("float32")
        requests[f"{i}/one"] = requests[f"{i}/all"][1:2]
    np.savez(folder / "requests.npz", **requests)
    script = Path(__file__).with_name("serve_alone.py")
    command = [sys.executable, str(script), str(folder / "requests.npz"), str(folder / "answers.npz"), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = dict(np.load(folder / "answers.npz"))
    return {
        name: Export(
            built[name],
            paths[i],
            requests[f"{i}/all"],
            {key.split("/", 1)[1]: value for key, value in answers.items() if key.startswith(f"{i}/")},
            json.loads(str(answers[f"{i}/description"])),
        )
        for i, name in enumerate(MODELS)
    }


@pytest.fixture(params=MODELS)
def export(request, exports):
    return exports[request.param]


@pytest.fixture
def name(request):
    return request.node.callspec.params["export"]


def test_layout(exports):
    path = exports["pixels"].path
    assert path.name == "1"
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["1", "model_card.json"]
    names = {entry.name for entry in path.iterdir()}
    assert names >= {"saved_model.pb", "variables", "assets", "assets.extra"}
    assert path.stat().st_mode & 0o777 == 0o755  # a server under another user reads it
    assert (path / "assets.extra" / "model_card.json").read_text() == (path.parent / "model_card.json").read_text()


def test_outputs_are_those_of_the_model(export, name):
    own = export.model.predict(export.images, verbose=0).astype("float64")
    logits = export.served["all/logits"]
    allowed = TOLERANCE[name] * max(1, np.abs(logits).max())
    probabilities = export.served["all/probabilities"]
    if name in ("pixels", "dropout, dense", "stacked, dropout"):
        np.testing.assert_allclose(logits, own, rtol=0, atol=allowed)
        own = np.exp(own - own.max(-1, keepdims=True))
        own /= own.sum(-1, keepdims=True)
    np.testing.assert_allclose(probabilities, own, rtol=0, atol=TOLERANCE[name] * 2)
    from_logits = keras.ops.sigmoid(logits) if "sigmoid" in name else keras.ops.softmax(logits)
    np.testing.assert_allclose(probabilities, keras.ops.convert_to_numpy(from_logits), atol=1e-5)


def test_batch_size_is_free(export):
    for output in ("logits", "probabilities"):
        assert export.served[f"one/{output}"].shape == (1, 10)
        all_logits = np.abs(export.served["all/logits"]).max()
        np.testing.assert_allclose(
            export.served[f"one/{output}"], export.served[f"all/{output}"][1:2], atol=1e-5 * max(1, all_logits)
        )


def test_signature(export, name):
    shape = MODELS[name][1] if "any size" not in name else (None, None, 3)
    assert export.description["signatures"] == ["serving_default"]
    assert export.description["inputs"] == {"images": ["float32", [None, *shape]]}
    assert export.description["outputs"] == {key: ["float32", [None, 10]] for key in ("logits", "probabilities")}


def test_wrong_images_are_refused(export):
    assert "shape" in export.description["wrong size"].lower()
    assert "not a finite number" in export.description["not a number"]
    assert "holds no image" in export.description["no image"]


def test_every_weight_once_and_operations_that_any_server_has(export, name):
    assert export.description["variables"] == export.model.count_params()
    assert not [op for op in export.description["operations"] if "Assign" in op or "Random" in op or "Xla" in op]
    assert not [op for op in export.description["operations"] if "While" in op or "TensorList" in op]
    if name == "pixels":  # in the others the names of the weights take more room than the weights
        data = sum(file.stat().st_size for file in (export.path / "variables").iterdir())
        assert data < 1.3 * 4 * export.model.count_params()


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
    assert kp.models.ResidualNetwork.from_config(card["model"]["config"]).count_params() == export.model.count_params()
    assert card["signature"]["inputs"]["images"] == {
        "dtype": "float32",
        "shape": [None, 8, 8, 1],
        "normalized_in_graph": True,
    }
    assert card["signature"]["outputs"]["probabilities"]["activation"] == "softmax"
    assert card["check"]["batch_sizes"] == [1, 3]
    largest, allowed = card["check"]["largest_difference"], card["check"]["allowed_difference"]
    assert all(0 <= largest[key] <= allowed[key] for key in ("logits", "probabilities"))
    assert allowed["logits"] < 1e-3


def test_card_knows_a_model_without_normalisation(exports):
    assert exports["dropout, dense"].card["signature"]["inputs"]["images"]["normalized_in_graph"] is False


def test_channels_first_is_served_channels_last():
    model = kp.models.resnet_cifar(8, width_factor=0.25, input_shape=(1, 12, 8), data_format="channels_first", **PIXELS)
    randomize(model)
    scores = _scores.take_apart(model)
    images = _check.samples(scores)
    assert images.shape == (3, 12, 8, 1)
    logits = keras.ops.convert_to_numpy(scores.model(images, training=False))
    np.testing.assert_allclose(logits, _check.expected(scores, images)["logits"], atol=1e-5 * max(1, np.abs(logits).max()))


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
    logits = keras.ops.convert_to_numpy(scores.model(x))
    np.testing.assert_allclose(logits, wanted["logits"], atol=1e-6)
    np.testing.assert_allclose(_scores.PROBABILITIES[activation](logits), wanted["probabilities"], atol=1e-6)


def test_probabilities_of_extreme_logits():
    x = np.array([[-1000.0, 0, 1000]])
    np.testing.assert_array_equal(_scores.PROBABILITIES["sigmoid"](x), [[0, 0.5, 1]])
    np.testing.assert_array_equal(_scores.PROBABILITIES["softmax"](x), [[0, 0, 1]])


# --- versions, wrong input, failures: without the work of writing a graph -----------------------------------------------


@pytest.fixture
def small():
    return sequential(keras.layers.Dense(2))


@pytest.fixture
def quick(monkeypatch):
    """Neither write a graph nor check it."""

    def write(scores, temporary):
        (temporary / "version" / "variables").mkdir(parents=True)
        (temporary / "version" / "saved_model.pb").write_bytes(b"graph")

    monkeypatch.setattr(saved_model, "_write", write)
    monkeypatch.setattr(_check, "compare", lambda *_: {})


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
    with pytest.raises(ValueError, match=r"has a version 7.*next free one is 9.*Received: version=7"):
        save(7)
    for version in (0, -1, 1.5, "2", True):
        with pytest.raises(ValueError, match="positive integer"):
            save(version)
    assert sorted(entry.name for entry in (tmp_path / "m").iterdir()) == ["1", "2", "4", "7", "8", "model_card.json"]


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


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": ["a"]}, "each of the model's 2 outputs.*Received: 1 names"),
        ({"classes": ["a", "a"]}, "name of its own.*'a' more than once"),
        ({"classes": "ab"}, "list of names.*Received: classes='ab'"),
        ({"classes": [0, 1]}, "list of names"),
        ({"metrics": {"loss": float("nan")}}, "cannot hold 'metrics'"),
    ],
)
def test_wrong_arguments(small, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        kp.export.save(small, tmp_path / "m", **{"classes": ["a", "b"]} | arguments)
    assert not list(tmp_path.iterdir())


def test_wrong_models(tmp_path):
    inputs = keras.Input((4,))
    two = keras.Model(inputs, [keras.layers.Dense(2)(inputs)] * 2)
    for model, message in (
        (kp.models.resnet_cifar(8, include_top=False), "include_top=True"),
        (keras.Sequential([keras.layers.Dense(2)]), "keras.Input"),
        (two, "one output.*Received: 1 inputs and 2 outputs"),
        (sequential(keras.layers.Dense(2, activation="tanh")), "must end in a Dense layer"),
        (sequential(keras.layers.Dense(2), keras.layers.BatchNormalization()), "must end in a Dense layer"),
        (keras.layers.Dense(2), "Only a built functional"),
    ):
        with pytest.raises(ValueError, match=message):
            kp.export.save(model, tmp_path / "m", classes=["a", "b"])
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("quick")
def test_a_file_in_the_way(small, tmp_path):
    (tmp_path / "m").write_text("mine")
    with pytest.raises(ValueError, match="a file"):
        kp.export.save(small, tmp_path / "m", classes=["a", "b"])
    assert (tmp_path / "m").read_text() == "mine"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), kp.export.ExportError("differs"), OSError("gone")], ids=repr)
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


def test_diverged_weights_are_not_exported(small, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_model, "_write", lambda scores, temporary: (temporary / "version").mkdir())
    small.set_weights([np.full(weight.shape, np.nan) for weight in small.get_weights()])
    with pytest.raises(ValueError, match="not finite"):
        kp.export.save(small, tmp_path / "m", classes=["a", "b"])
    assert not list(tmp_path.iterdir())


def test_a_different_result_is_an_error(exports, tmp_path):
    other = MODELS["pixels"][0]()
    randomize(other, seed=1)
    with pytest.raises(kp.export.ExportError, match=r"logits differ from the model's by up to .* is allowed"):
        _check.compare(_scores.take_apart(other), exports["pixels"].path, tmp_path)


def test_full_disk(exports, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=r"no room for the export in .*m \(File too large\); nothing of it was left behind"):
            kp.export.save(exports["pixels"].model, tmp_path / "m", classes=DIGITS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="this backend writes in the same process")
def test_a_layer_that_cannot_be_imported(tmp_path):
    model = sequential(keras.layers.Lambda(lambda x: x * 2, output_shape=(5,)), keras.layers.Dense(2))
    with pytest.raises(kp.export.ExportError, match=r"(?s)failed \(exit status 1\).*registered.*Its last lines:.*Lambda"):
        kp.export.save(model, tmp_path / "m", classes=["a", "b"])
    assert not list(tmp_path.iterdir())
