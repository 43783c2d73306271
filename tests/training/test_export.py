"""`keras-preact export`: from a run directory to a served model, and its errors."""

import json

import keras
import numpy as np
import pytest
from PIL import Image

import keras_preact as kp
from tests.keras_preact.harness import randomize
from tests.training.commands import error_of, words
from training import cli, predict
from training.config import Data
from training.data import load
from training.export import export

CLASSES = list("0123456789")
CONFIG = {"seed": 3, "data": {"name": "digits", "dir": "/data/digits"}, "output": "/runs/digits-1"}


def make_run(folder, files=("model.keras",)):
    """A run directory as training writes it."""
    (folder / "checkpoints").mkdir(parents=True)
    preprocessing = kp.model_entry("digits_resnet8_preact").preprocessing
    config = {
        "recipe": "digits",
        "classes": CLASSES,
        "preprocessing": preprocessing.to_dict(),
        "config": CONFIG,
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = kp.create_model("digits_resnet8_preact", include_preprocessing=True, width_factor=0.25)
    randomize(model)
    for file in files:
        model.save(folder / file)
    return folder, model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(
        tmp_path_factory.mktemp("runs") / "digits-1", ("model.keras", "checkpoints/best.keras")
    )


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    folder, _ = run
    metrics = {"model": str(folder / "model.keras"), "accuracy": 0.5}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    output = tmp_path_factory.mktemp("saved_models")
    export(folder, name="digits", output=output)
    return output / "digits"


def test_predict_and_the_card_are_of_the_run(run, exported, tmp_path, capsys):
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), dtype="uint8")
    paths = [str(tmp_path / f"{i}.png") for i in range(3)]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image[..., 0]).save(path)
    predict.main([str(exported), *paths, "--top", "1"])
    lines = capsys.readouterr().out.splitlines()
    logits = keras.ops.convert_to_numpy(run[1](images.astype("float32"), training=False))
    assert [line.split()[0] for line in lines[1::2]] == [CLASSES[i] for i in logits.argmax(axis=1)]

    card = json.loads((exported / "model_card.json").read_text())
    # a served model's card does not tell where things were on the machine that trained it
    served = CONFIG | {"data": {"name": "digits", "dir": None}, "output": None}
    told = {"directory": "digits-1", "checkpoint": "final", "recipe": "digits", "config": served}
    assert card["run"] == told
    assert card["classes"] == CLASSES
    assert card["metrics"]["accuracy"] == 0.5
    assert "model" not in card["metrics"]


@pytest.fixture
def saved(monkeypatch):
    """What the library's `save` is called with, which writes a little here."""
    received = {}

    def save(model, directory, **kwargs):
        received.update(kwargs)
        path = directory / "1"
        (path / "assets.extra").mkdir(parents=True)
        differences = {"logits": 2.5e-7, "probabilities": 1e-8}
        check = {"largest_difference": differences, "allowed_difference": differences}
        if kwargs["precision"] != "float32":
            check["accuracy"] = {"images": 360, "model": 0.5, kwargs["precision"]: 0.4975}
        card = {"check": check, "parameters": {"total": 30_864}}
        (path / "assets.extra" / "model_card.json").write_text(json.dumps(card))
        return path

    monkeypatch.setattr(kp.export, "save", save)
    return received


def export_run(run, output, *options: str) -> None:
    arguments = [str(run[0]), "--name", "d", "--output", str(output), *words(*options)]
    cli.main("export", export, arguments)


def test_metrics_of_another_checkpoint_are_left_out(run, exported, tmp_path, saved, capsys):
    export_run(run, tmp_path, "--checkpoint best")
    assert saved["metrics"] is None
    assert f"keras-preact evaluate {run[0]} --checkpoint best" in capsys.readouterr().out


def test_bfloat16_is_compared_on_the_test_images(run, tmp_path, saved, capsys):
    export_run(run, tmp_path, "--precision bfloat16")
    assert "49.75 % in bfloat16, 50.00 % in the run." in capsys.readouterr().out
    images, labels = saved["validation_data"]
    pairs = list(load(Data("digits")).test.open().as_numpy_iterator())
    np.testing.assert_array_equal(images, np.stack([image for image, _ in pairs]).astype("float32"))
    np.testing.assert_array_equal(labels, [label for _, label in pairs])


def test_int8_is_calibrated_on_training_images_from_everywhere(run, tmp_path, saved):
    export_run(run, tmp_path, "--precision int8")
    train = load(Data("digits", holdout=0)).train
    images = np.stack([image for image, _ in train.open().as_numpy_iterator()])
    np.testing.assert_array_equal(saved["calibration_images"], images[::5].astype("float32"))


def test_errors(run, exported, tmp_path, monkeypatch, capsys):
    folder, _ = run
    unfinished, _ = make_run(tmp_path / "run", ("checkpoints/best.keras",))
    output = tmp_path / "saved_models"
    for subject, options, word in (
        (tmp_path, "--name m", "is not a run directory"),
        (folder, "--name a/b", "must be a plain name"),
        (folder, f"--name digits --output {exported.parent} --version 1", "next free one is 2"),
        (folder, "--name m --format litert --precision bfloat16", "--version and --precision"),
        (folder, "--name m --checkpoint last", "--checkpoint final, --checkpoint best"),
        (folder, "--name m --temperature fitted", "`keras-preact evaluate` fits one"),
        (unfinished, "--name m", "not finished"),
    ):
        arguments = [str(subject), "--output", str(output), *words(options)]
        assert word in error_of(capsys, cli.main, "export", export, arguments)
    assert not output.exists()

    def fail(*args, **kwargs):
        raise kp.export.ExportError("The SavedModel's logits\ndiffer")

    monkeypatch.setattr(kp.export, "save", fail)
    assert "logits differ" in error_of(capsys, export_run, run, tmp_path)
