"""`keras-preact export`: from a run directory to a served model, and its errors."""

import contextlib
import functools
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import keras_preact as kp
from keras_preact.export import _check
from tests.keras_preact.export.one_process import in_this_process
from tests.training import images as pictures
from tests.training.calls import TINY, error_of, run_evaluate, words
from training import cli
from training.benchmark import __main__ as benchmark
from training.commands import train
from training.commands.export import export
from training.commands.predict import __main__ as predict
from training.config import Data
from training.data import load
from training.directory import models

CLASSES = list("0123456789")


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory):
    """A copy of a trained run, with metrics and a directory of its images."""
    folder = tmp_path_factory.mktemp("runs") / "digits-1"
    shutil.copytree(run, folder)
    described = json.loads((folder / "config.json").read_text())
    described["config"]["data"]["dir"] = "/data/digits"
    (folder / "config.json").write_text(json.dumps(described))
    metrics = {"model": str(folder / "model.keras"), "accuracy": 0.5}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    output = tmp_path_factory.mktemp("saved_models")
    export(trained, name="digits", output=output)
    return output / "digits"


def test_predict_and_the_card_are_of_the_run(trained, exported, tmp_path, capsys):
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), dtype="uint8")
    paths = [str(tmp_path / f"{i}.png") for i in range(3)]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image[..., 0]).save(path)
    predict.main([str(exported), *paths, "--top", "1"])
    lines = capsys.readouterr().out.splitlines()
    logits = models.load(trained / "model.keras").predict_on_batch(images.astype("float32"))
    assert [line.split()[0] for line in lines[1::2]] == [CLASSES[i] for i in logits.argmax(axis=1)]

    card = json.loads((exported / "model_card.json").read_text())
    # a served model's card has no paths of the machine that trained it
    config = json.loads((trained / "config.json").read_text())["config"]
    places = {"data": config["data"] | {"dir": None}, "output": None}
    assert card["run"]["config"] == config | places
    expected = {"directory": "digits-1", "checkpoint": "final", "recipe": "digits"}
    assert card["run"].items() >= expected.items()
    assert card["classes"] == CLASSES
    assert card["metrics"]["accuracy"] == 0.5
    assert "model" not in card["metrics"]


@pytest.fixture
def saved(monkeypatch):
    """The arguments of the library's `save`, which is replaced and writes only a card."""
    received = {}

    def save(model, directory, **kwargs):
        received.update(kwargs)
        path = directory / "1"
        (path / "assets.extra").mkdir(parents=True)
        differences = {"logits": 2.5e-7, "probabilities": 1e-8}
        check = {"largest_difference": differences, "allowed_difference": differences}
        if kwargs["precision"] != "float32":
            check["accuracy"] = {"images": 360, "model": 0.5, kwargs["precision"]: 0.4975}
        card = {"check": check, "parameters": {"total": 30_864}, "signatures": {}}
        (path / "assets.extra" / "model_card.json").write_text(json.dumps(card))
        return path

    monkeypatch.setattr(kp.export, "save", save)
    return received


def export_run(run, output, *options: str) -> None:
    arguments = [str(run), "--name", "d", "--output", str(output), *words(*options)]
    cli.main("export", export, arguments)


def test_metrics_of_another_checkpoint_are_left_out(trained, tmp_path, saved, capsys):
    export_run(trained, tmp_path, "--checkpoint best")
    assert saved["metrics"] is None
    assert f"keras-preact evaluate {trained} --checkpoint best" in capsys.readouterr().out


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
    unfinished = tmp_path / "run"
    shutil.copytree(run, unfinished)
    (unfinished / "model.keras").unlink()
    output = tmp_path / "saved_models"
    for subject, options, word in (
        (tmp_path, "--name m", "is not a run directory"),
        (run, "--name a/b", "must be a plain name"),
        (run, f"--name digits --output {exported.parent} --version 1", "next free one is 2"),
        (run, "--name m --format litert --precision bfloat16", "remove --version, --precision"),
        (run, "--name m --format onnx --no-fold-batch-norm", "and --no-fold-batch-norm"),
        (run, "--name m --data.dir images", "--data.dir is for --precision bfloat16 and int8"),
        (unfinished, "--name m", "not finished"),
        (tmp_path, "--name m --version 0", "--version must be positive"),
        (tmp_path, "--name m --temperature -1", "--temperature must be positive, or fitted"),
        (tmp_path, "--name m --temperature nan", "--temperature must be positive, or fitted"),
    ):
        arguments = [str(subject), "--output", str(output), *words(options)]
        assert word in error_of(capsys, cli.main, "export", export, arguments)
    assert not output.exists()

    def fail(*args, **kwargs):
        raise kp.export.ExportError("The SavedModel's logits\ndiffer")

    monkeypatch.setattr(kp.export, "save", fail)
    assert "logits differ" in error_of(capsys, export_run, run, tmp_path)


@pytest.fixture(scope="module", params=[("float32", 32), ("mixed_bfloat16", 24)])
def photos(request, tmp_path_factory):
    """A run on a folder of images that was evaluated, its precision and its size of images."""
    policy, size = request.param
    folder = tmp_path_factory.mktemp("photos")
    pictures.write_folder(folder / "photos")
    options = f"--data.dir {folder / 'photos'} --data.size {size} --precision {policy}"
    options += f" --batch-size 4 --health 0 --output {folder / 'run'}"
    train.main(["folder_small", *TINY, *words(options)])
    run_evaluate(folder / "run")
    return folder / "run", policy, size


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_card_is_about_the_export(photos, precision, tmp_path, monkeypatch):
    """A client that follows the card sends images that the model takes, and knows in which
    precision its accuracy was measured.
    """
    run, policy, size = photos
    assert json.loads((run / "metrics.json").read_text())["precision"] == policy
    monkeypatch.setattr(_check, "replay", in_this_process)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        export_run(run, tmp_path, f"--precision {precision}")
    measure_it = f"evaluate {tmp_path / 'd'}" in out.getvalue()
    assert measure_it is (precision != policy.removeprefix("mixed_"))
    card = json.loads((tmp_path / "d/model_card.json").read_text())
    shape = card["signatures"]["serving_default"]["inputs"]["images"]["shape"]
    preprocessing = card["preprocessing"]
    assert shape[1:3] == [preprocessing["size"]] * 2 == [size] * 2
    assert preprocessing["resize"] == round(preprocessing["size"] * 256 / 224)
    described = json.loads((run / "config.json").read_text())
    assert preprocessing == described["preprocessing"]
    assert (card["precision"], card["metrics"]["precision"]) == (precision, policy)


@pytest.fixture(scope="module")
def of_channels(tmp_path_factory):
    """Return a function from a number of channels to a run and its images. Its held-out images
    are one image with each of two labels, for which no temperature is the best.
    """

    @functools.cache
    def trained_on(channels: int):
        folder = tmp_path_factory.mktemp("channels")
        images = np.random.default_rng(0).integers(0, 256, (12, 8, 8, channels), "uint8")
        labels = np.arange(12) % 2
        arrays = {f"{name}_images": images for name in ("train", "test")}
        arrays |= {f"{name}_labels": labels for name in ("train", "test")}
        arrays |= {"val_images": images[[0, 0]], "val_labels": labels[:2]}
        np.savez(folder / "a.npz", **arrays)
        options = f"--data.name npz --data.dir {folder / 'a.npz'} --batch-size 4 --health 0"
        options += f" --data.holdout 1 --output {folder / 'run'}"
        train.main(["digits", *TINY, *words(options)])
        run_evaluate(folder / "run")
        return folder / "run", images

    return trained_on


@pytest.mark.parametrize("channels", [2, 3])
def test_the_next_step_works(of_channels, channels, tmp_path, monkeypatch, capsys):
    run, images = of_channels(channels)
    monkeypatch.setattr(_check, "replay", in_this_process)
    capsys.readouterr()
    export_run(run, tmp_path)
    [line] = re.findall("^Next: (.*)$", capsys.readouterr().out, re.MULTILINE)
    first, *others = line.split(", or ")
    takes_files = channels in (1, 3)
    Image.fromarray(images[0, ..., :3] if takes_files else images[0]).save(tmp_path / "a.png")
    arguments = [str(tmp_path / "d"), str(tmp_path / "a.png")]
    if takes_files:
        assert first.split() == ["keras-preact", "predict", arguments[0], "IMAGE"]
        predict.main(arguments)
    else:
        assert "take image files" in error_of(capsys, predict.main, arguments)
        others = [first]
    assert others == [f"keras-preact serve {tmp_path}"]


@pytest.mark.parametrize(
    ("run_of", "options", "remove", "words_of_the_error"),
    [
        ("run", "", "metrics.json", "The run has no held-out images: train with --data.holdout"),
        ("everything", "", "metrics.json", "Run keras-preact evaluate {run} first"),
        (
            "everything",
            "--checkpoint best",
            "",
            "evaluate {run} --checkpoint best first",
        ),
        ("of_channels", "", "", "all 2 images are classified correctly, or no better than by"),
        ("of_channels", "", "metrics.json", "Run keras-preact evaluate {run} first"),
    ],
)
def test_why_no_temperature_was_fitted(
    run_of, options, remove, words_of_the_error, request, tmp_path, capsys
):
    found = request.getfixturevalue(run_of)
    run = tmp_path / "run"
    shutil.copytree(found if isinstance(found, Path) else found(3)[0], run)
    if remove:
        (run / remove).unlink(missing_ok=True)
    error = error_of(capsys, export_run, run, tmp_path, "--temperature fitted", options)
    assert words_of_the_error.format(run=run) in error


def test_an_export_for_one_size_is_measured_at_no_other(exported, capsys):
    options = ["exports", str(exported), "--image-size", "9"]
    message = error_of(capsys, benchmark.main, options)
    assert f"{exported} takes images with 8 rows. Received: 9" in message


def test_an_export_that_takes_no_images_cannot_be_evaluated(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_check, "replay", in_this_process)
    sequences = kp.models.resnet_1d(8, input_shape=(8, 1), classes=10, width_factor=0.25)
    exported = kp.export.save(sequences, tmp_path / "d", classes=CLASSES)
    message = error_of(capsys, run_evaluate, exported, "--data", "digits")
    assert f"{exported} does not take images: its input has shape (8, 1)." in message
