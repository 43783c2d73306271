"""`python -m training.export`: from a run directory to a served model, and its errors."""

import json

import keras
import numpy as np
import pytest
from PIL import Image

import keras_preact as kp
from tests.keras_preact.harness import randomize
from tests.training.commands import error_of as error_of_command
from tests.training.commands import words
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


def test_card_tells_of_the_run(exported):
    card = json.loads((exported / "model_card.json").read_text())
    assert card["classes"] == CLASSES
    assert card["preprocessing"]["size"] == 8
    # a served model's card does not tell where things were on the machine that trained it
    served = CONFIG | {"data": {"name": "digits", "dir": None}, "output": None}
    assert "model" not in card["metrics"]
    assert card["run"] == {
        "directory": "digits-1",
        "checkpoint": "final",
        "recipe": "digits",
        "config": served,
    }
    assert card["metrics"]["accuracy"] == 0.5
    assert card["model"]["name"] == "digits_resnet8_preact"


def test_predict_agrees_with_the_model(run, exported, tmp_path, capsys):
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), dtype="uint8")
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image[..., 0]).save(path)
    predict.main([str(exported), *map(str, paths), "--top", "1"])
    lines = capsys.readouterr().out.splitlines()
    logits = keras.ops.convert_to_numpy(run[1](images.astype("float32"), training=False))
    assert [line.split()[0] for line in lines[1::2]] == [CLASSES[i] for i in logits.argmax(axis=1)]
    assert lines[::2] == list(map(str, paths))


@pytest.fixture
def saved(monkeypatch):
    """What the library's `save` is called with, which writes a little here."""
    received = {}

    def save(model, directory, **kwargs):
        received.update(kwargs)
        path = directory / "1"
        (path / "variables").mkdir(parents=True)
        (path / "assets.extra").mkdir()
        (path / "variables" / "data").write_bytes(bytes(123_456))
        check = {
            "largest_difference": {"logits": 2.5e-7, "probabilities": 1e-8},
            "allowed_difference": {"logits": 1e-5, "probabilities": 1e-5},
        }
        if kwargs["precision"] != "float32":
            check["accuracy"] = {"images": 360, "model": 0.5, kwargs["precision"]: 0.4975}
        card = {"check": check, "parameters": {"total": 30_864}, "metrics": kwargs["metrics"]}
        (path / "assets.extra" / "model_card.json").write_text(json.dumps(card))
        return path

    monkeypatch.setattr(kp.export, "save", save)
    return received


def export_run(run, output, *options: str) -> None:
    arguments = [str(run[0]), "--name", "d", "--output", str(output), *words(*options)]
    cli.main("export", export, arguments)


def test_what_is_printed(run, tmp_path, saved, capsys):
    export_run(run, tmp_path, "--checkpoint best")
    out = capsys.readouterr().out
    assert ", 30,864 parameters)" in out
    assert "the largest difference is 2.5e-07 in logits (allowed 1.0e-05)" in out
    assert f"keras-preact predict {tmp_path / 'd'} IMAGE, or keras-preact serve {tmp_path}" in out
    # those of the run are of another checkpoint
    assert (
        f"no metrics. To add them, run keras-preact evaluate {run[0]} --checkpoint best before "
        "the export." in out
    )


def test_bfloat16_is_compared_on_the_test_images(run, tmp_path, saved, capsys):
    export_run(run, tmp_path, "--precision bfloat16")
    said = "Accuracy on 360 test images: 49.75 % in bfloat16, 50.00 % in the run."
    assert said in capsys.readouterr().out
    images, labels = saved["validation_data"]
    pairs = list(load(Data("digits")).test.open().as_numpy_iterator())
    np.testing.assert_array_equal(images, np.stack([image for image, _ in pairs]).astype("float32"))
    np.testing.assert_array_equal(labels, [label for _, label in pairs])
    assert saved["precision"] == "bfloat16"


def test_int8_is_calibrated_on_training_images_from_everywhere(run, tmp_path, saved):
    export_run(run, tmp_path, "--precision int8")
    train = load(Data("digits", holdout=0)).train
    images = np.stack([image for image, _ in train.open().as_numpy_iterator()])
    assert saved["precision"] == "int8"
    assert len(saved["validation_data"][0]) == 360
    np.testing.assert_array_equal(saved["calibration_images"], images[::5].astype("float32"))


@pytest.mark.soak
def test_a_file_for_another_runtime(run, tmp_path, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    export_run(run, tmp_path / "new", "--format onnx")
    assert f"Wrote {tmp_path / 'new' / 'd.onnx'} (" in capsys.readouterr().out
    images = np.random.default_rng(0).uniform(0, 255, (2, 8, 8, 1)).astype("float32")
    session = onnxruntime.InferenceSession(tmp_path / "new" / "d.onnx")
    logits = keras.ops.convert_to_numpy(run[1](images, training=False))
    np.testing.assert_allclose(session.run(["logits"], {"images": images})[0], logits, atol=1e-4)


def error_of(capsys, *arguments):
    return error_of_command(capsys, cli.main, "export", export, list(map(str, arguments)))


def test_errors(run, exported, tmp_path, monkeypatch, capsys):
    folder, _ = run
    assert "is not a run directory" in error_of(capsys, tmp_path, "--name", "m")
    assert "must be a plain name" in error_of(capsys, folder, "--name", "a/b")
    assert "next free one is 2" in error_of(
        capsys, folder, "--name", "digits", "--output", exported.parent, "--version", 1
    )
    options = words("--format litert --precision bfloat16")
    message = error_of(capsys, folder, "--name", "m", "--output", tmp_path, *options)
    assert "remove --version and --precision" in message
    message = error_of(capsys, folder, "--name", "m", "--output", tmp_path, "--checkpoint", "last")
    assert "It has: --checkpoint final, --checkpoint best." in message

    def fail(*args, **kwargs):
        raise kp.export.ExportError("The SavedModel's logits\ndiffer")

    monkeypatch.setattr(kp.export, "save", fail)
    assert "logits differ" in error_of(capsys, folder, "--name", "m", "--output", tmp_path)


def test_an_interrupted_run(tmp_path, capsys):
    folder, _ = make_run(tmp_path / "run", ("checkpoints/best.keras",))
    message = error_of(capsys, folder, "--name", "m", "--output", tmp_path / "saved_models")
    assert "not finished" in message
    assert "--checkpoint best" in message
    assert not (tmp_path / "saved_models").exists()
