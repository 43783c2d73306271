"""Networks and parts of a person: what is called and checked, and that every command takes
the runs.
"""

import contextlib
import json
import re
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_preact.export import _check
from tests import own_modules
from tests.keras_preact.export.one_process import in_this_process
from tests.training.calls import TINY, assert_same_weights, error_of, run_evaluate, weights, words
from training import cli
from training.commands import audit, train
from training.commands.analyze import __main__ as analyze
from training.commands.compare import compare
from training.commands.export import export
from training.config import Config, Data, Model
from training.directory import models
from training.run import parts

CODE = """
import dataclasses

import keras
import numpy as np
import keras_preact as kp


class Alpha(keras.layers.Layer):
    def build(self, input_shape):
        self.alpha = self.add_weight(shape=(), initializer="zeros", name="alpha")

    def call(self, x):
        return keras.ops.convert_to_tensor(self.alpha)


@keras.saving.register_keras_serializable("mine")
class SkipInit(kp.shortcuts.Shortcut):
    def layers(self, site):
        return [Alpha(name="alpha", dtype=site.dtype)]

    def paths(self, x, residual, transformed):
        return x, transformed * residual


@keras.saving.register_keras_serializable("mine")
@dataclasses.dataclass(frozen=True)
class Half(kp.shortcuts.Shortcut):
    share: float

    def paths(self, x, residual, transformed):
        return self.share * x, residual


class Unregistered(kp.shortcuts.Shortcut):
    def paths(self, x, residual, transformed):
        return x, residual


@keras.saving.register_keras_serializable("mine")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Triple(kp.blocks.Convolutional):
    name = "triple"
    kernel_sizes = (3, 3, 3)


half = Half(0.5)
order = kp.Arrangement(
    first=("norm", "activation"), last="activation", head=("norm", "activation")
)


def plain(classes, input_shape, mean, std, data_format, **options):
    inputs = keras.Input(input_shape)
    x = keras.layers.Normalization(mean=mean, variance=np.square(std))(inputs)
    x = keras.layers.Conv2D(8, 3, strides=2, data_format=data_format)(x)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.GlobalAveragePooling2D()(keras.ops.relu(x))
    return keras.Model(inputs, keras.layers.Dense(classes)(x), name="plain")


def sequential(classes, input_shape, mean, std, data_format):
    return keras.Sequential(
        [keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)],
    )


def of_package(**options):
    return kp.models.resnet_cifar(20, width_factor=0.25, name="mine", **options)


def softmax(**options):
    return of_package(classifier_activation="softmax", **options)


def softmax_in_float32(**options):
    model = softmax(**options)
    in_float32 = keras.layers.Activation("linear", dtype="float32")
    return keras.Model(model.inputs, in_float32(model.output))


def without_input(classes, input_shape, mean, std, data_format):
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(classes)])


def seven(classes, **options):
    return of_package(classes=7, **options)


def fixed(**options):
    model = sequential(**options)
    model.set_weights([np.full(weight.shape, 7.0) for weight in model.weights])
    return model


def nothing(**options):
    return None


def fails(**options):
    raise ValueError("a bug of the user")


def lambdas(classes, input_shape, mean, std, data_format):
    inputs = keras.Input(input_shape)
    x = keras.layers.Dense(classes)(keras.layers.Flatten()(inputs))
    return keras.Model(inputs, keras.layers.Lambda(lambda x: 2 * x)(x))
"""
NETWORK = "--model.name digits_resnet8_preact --model.width-factor 0.25"
#: Options of runs with something of a person, by what it is.
OWN = {
    "parts": f"{NETWORK} --model.shortcut own_code:SkipInit --model.arrangement own_code:order",
    "plain": "--model.name own_code:plain",
}
TRAINED = [*TINY[4:], *words("--data.watch-test --checkpoint.every 2 --checkpoint.keep 99")]


def forget() -> None:
    """Forget the module and the numbers in names of layers, as a new process does."""
    keras.utils.clear_session()
    own_modules.forget("own_code")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of each kind in `OWN`."""
    with own_modules.working_in(tmp_path_factory.mktemp("own"), own_code=CODE) as folder:
        for kind, options in OWN.items():
            forget()
            options = [*TRAINED, *words(options, "--health 2")]
            train.main(["digits", *options, "--output", kind])
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path):
    with own_modules.working_in(tmp_path, own_code=CODE):
        keras.utils.clear_session()
        yield tmp_path


@pytest.fixture
def parts_run(trained, here):
    shutil.copytree(trained / "parts", here / "run")


@pytest.mark.backend
@pytest.mark.parametrize("kind", OWN)
def test_a_run_is_resumed_and_measured(kind, trained, here, capsys):
    """In each command, the module is imported again."""
    run = trained / kind
    config = json.loads((run / "config.json").read_text())["config"]["model"]
    assert "own_code:" in str(config)
    assert (run / "health.csv").is_file()

    # killed after the second iteration
    shutil.copytree(run, "killed")
    (here / "killed/model.keras").unlink()
    for path in (here / "killed/checkpoints").glob("state-*"):
        if int(path.name[6:15]) > 2:
            path.unlink()
    message = error_of(capsys, train.main, ["--resume", "killed"])
    assert "killed/config.json names own_code:" in message
    assert "own_code" not in sys.modules
    train.main(["--resume", "killed", "--trust"])
    out = capsys.readouterr().out
    assert "Resuming after iteration 2." in out
    assert "Next: keras-preact evaluate killed --trust" in out
    assert_same_weights(here / "killed/model.keras", run / "model.keras")

    forget()
    message = error_of(capsys, run_evaluate, "killed", "--checkpoint", "last")
    assert message.endswith("keras-preact evaluate killed --trust\n")
    assert "own_code" not in sys.modules
    run_evaluate("killed", "--checkpoint", "last", "--trust")
    assert (here / "killed/metrics-last.json").is_file()
    forget()
    cli.main("compare", compare, [str(run), "killed"])  # it needs no code
    assert "own_code" not in sys.modules


def test_a_dry_run_of_a_network_of_a_person(capsys):
    train.main(["digits", *TRAINED, *words(OWN["plain"]), "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"Model +plain, \d+ layers, float32", lines[0])


def test_an_export_needs_no_code_of_a_person(parts_run, monkeypatch, capsys):
    monkeypatch.setattr(_check, "replay", in_this_process)

    def run_export(*arguments):
        cli.main("export", export, ["run", "--name", "m", *arguments])

    message = error_of(capsys, run_export)
    assert message.endswith("keras-preact export run --name m --trust\n")
    run_export("--trust")
    forget()
    run_evaluate("saved_models/m", "--data", "digits")
    assert "own_code" not in sys.modules


def test_studies_of_a_run(parts_run, capsys):
    for command in (analyze, audit):
        assert "run/config.json names own_code:" in error_of(capsys, command.main, ["run"])
        assert "own_code" not in sys.modules
    with contextlib.suppress(SystemExit):  # it finds mistakes
        audit.main(["run", "--trust"])
    assert "own_code" in sys.modules


def test_fine_tuning_does_not_load_it(parts_run, capsys):
    options = "--model.weights run --data.name digits --data.augmentation none"
    message = error_of(capsys, train.main, ["finetune", *words(options)])
    assert "has parts of your own, own_code:order, own_code:SkipInit, which fine-tuning" in message


def test_the_scalar_of_skip_init_is_trained(parts_run):
    found = weights(models.open_run(Path("run"))[0])
    scalars = {path: value for path, value in found.items() if path.endswith("alpha")}
    assert len(scalars) == 3
    assert all(value.shape == () and value != 0 for value in scalars.values())


@pytest.mark.parametrize(
    ("model", "units"),
    [
        (Model("cifar_resnet20_preact", block="own_code:Triple", shortcut="own_code:half"), 6),
        (Model("own_code:of_package", shortcut="own_code:SkipInit", stacked=True), 9),
        (Model("own_code:sequential"), None),
        (Model("own_code:plain"), None),
    ],
)
def test_kinds_of_networks(model, units):
    """A network and what its file gives have the same weights, by the same paths."""
    with train.started(Config(model=model, data=Data("digits")), "digits") as run:
        network = run.network
    assert network.output_shape == (None, 10)
    names = getattr(network, "unit_names", None)
    assert (names and len(names)) == units
    loaded = parts.through_file(network, [])
    assert [weight.path for weight in loaded.weights] == [each.path for each in network.weights]


@pytest.mark.parametrize("name", ["plain", "sequential", "of_package"])
def test_the_precision_is_that_of_all_layers(name):
    """The function may take it, ignore it, or hand it on."""
    given = {"classes": 10, "input_shape": (8, 8, 1), "data_format": "channels_last"}
    given |= {"mean": (0.0,), "std": (1.0,), "dtype": "mixed_bfloat16"}
    network = parts.build(f"own_code:{name}", given)
    used = {layer.compute_dtype for layer in network.layers if layer.weights}
    assert "bfloat16" in used
    assert used == {"bfloat16"} or name == "of_package"  # some of its layers stay in float32
    assert {weight.dtype for weight in network.trainable_weights} == {"float32"}
    assert keras.config.dtype_policy().name == "float32"


def test_weights_that_the_function_has_set_stay():
    given = {"classes": 10, "input_shape": (8, 8, 1), "data_format": "channels_last"}
    network = parts.build("own_code:fixed", given | {"mean": (0.0,), "std": (1.0,)})
    assert {float(each.numpy().max()) for each in network.trainable_weights} == {7.0}


def test_parts_are_arguments_of_the_builder():
    given = parts.arguments(
        Model("own_code:plain", shortcut="own_code:SkipInit", arrangement="original", dropout=0.1)
    )
    assert type(given.pop("shortcut")).__name__ == "SkipInit"
    assert given == {"arrangement": "original", "dropout": 0.1}
    network = parts.build(
        "own_code:plain",
        {"classes": 3, "input_shape": (8, 8, 1), "data_format": "channels_last"}
        | {"mean": (10.0,), "std": (2.0,)},
    )
    [normalised] = np.ravel(network.layers[1](np.full((1, 1, 1, 1), 14.0)))
    assert (network.output_shape, normalised) == ((None, 3), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model.shortcut own_code:SkipIn", "own_code:SkipIn' (module 'own_code' has no attri"),
        ("--model.shortcut other_code:SkipInit", "No module named 'other_code'"),
        ("--model.shortcut own_code:order", "must name an object or a subclass of keras_preact.s"),
        ("--model.arrangement own_code:SkipInit", "keras_preact.arrangements.Arrangement"),
        ("--model.block own_code:half", "keras_preact.blocks.Block"),
        ("--model.shortcut own_code:Half", "is a class that cannot be made without arguments"),
        ("--model.shortcut own_code:Unregistered", "could not be loaded. Register your classes"),
        ("--model.shortcut conv1x2", "Unknown --model.shortcut: 'conv1x2'. Did you mean 'conv1x1'"),
        ("--model.arrangement origin", "Unknown --model.arrangement: 'origin'. Did you mean"),
        ("--model.name own_code:small", "has no attribute 'small'"),
        ("--model.name own_code:half", "--model.name must name a function"),
        (
            "--model.name own_code:sequential --model.dropout 0.1",
            "unexpected keyword argument 'dro",
        ),
        ("--model.name own_code:softmax", "must return logits. Remove the softmax"),
        ("--model.name own_code:softmax_in_float32", "must return logits. Remove the softmax"),
        ("--model.name own_code:without_input", "Sequential one that begins with keras.Input"),
        (
            "--model.name own_code:seven",
            "one output of shape (None, 10). Received: shapes (None, 8",
        ),
        ("--model.name own_code:nothing", "functional Keras model"),
        ("--model.name own_code:lambdas", "could not be loaded"),
        ("--model.name own_code:plain --optimizer.layer-decay 0.5", "network"),
    ],
)
def test_errors(options, message, here, capsys):
    own = words(options) if "--model.name" in options else words(NETWORK, options)
    assert message in error_of(capsys, train.main, ["digits", *TRAINED, *own, "--output", "run"])
    assert not (here / "run").exists()


def test_a_fault_in_a_network_shows_its_trace(here):
    with pytest.raises(RuntimeError, match="own_code:fails raised ValueError: a bug of the user"):
        train.main(["digits", *TRAINED, "--model.name", "own_code:fails", "--output", "run"])
