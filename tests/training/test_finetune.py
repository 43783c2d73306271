"""Fine-tuning by the command line: digits 0 to 6 as images in folders, then a few of 7,
8 and 9.
"""

import functools
import json
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
from PIL import Image

import keras_preact as kp
from keras_preact import transfer
from tests.training.commands import error_of, finish, start
from training import train

#: A network and a schedule of seconds.
SOURCE = (
    *(
        "--model.name",
        "digits_resnet8_preact",
        "--model.width-factor",
        "0.5",
        "--data.size",
        "8",
        "--seed",
        "1",
    ),
    *(
        "--data.augmentation",
        "none",
        "--health",
        "0",
        "--optimizer.learning-rate",
        "0.1",
        "--optimizer.weight-decay",
        "1e-3",
    ),
    *(
        "--schedule.length",
        "30",
        "--schedule.warmup",
        "0.5",
        "--batch-size",
        "64",
        "--data.holdout",
        "0",
    ),
)
#: Few steps on few images.
TUNE = (
    *(
        "--data.holdout",
        "0",
        "--data.augmentation",
        "none",
        "--health",
        "0",
        "--schedule.unit",
        "iterations",
        "--schedule.length",
        "4",
    ),
    *(
        "--schedule.warmup",
        "0",
        "--batch-size",
        "15",
        "--seed",
        "2",
        "--optimizer.learning-rate",
        "0.2",
    ),
    *("--model.freeze", "stage1"),
    *("--optimizer.layer-decay", "0.7", "--checkpoint.every", "2", "--checkpoint.keep", "20"),
)


def write_digits(folder: Path, classes: range, train_images: int | None, seed: int = 0) -> Path:
    """Write digits as colour PNGs, with other images for training than for the test;
    None: half of them for training.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    random = np.random.default_rng(seed)
    for number in classes:
        images = np.round(digits.images[digits.target == number] * (255 / 16)).astype("uint8")
        images = images[random.permutation(len(images))]
        half = len(images) // 2
        for split, some in (("train", images[: train_images or half]), ("test", images[half:])):
            place = folder / split / str(number)
            place.mkdir(parents=True)
            for i, image in enumerate(some):
                Image.fromarray(image).convert("RGB").save(place / f"{i}.png")
    return folder


def weights(path: Path) -> dict[str, np.ndarray]:
    model = keras.saving.load_model(path, compile=False)
    return {weight.path: keras.ops.convert_to_numpy(weight.value) for weight in model.weights}


def accuracy(path: Path, folder: Path) -> float:
    """Count, without the package's own evaluation."""
    model = keras.saving.load_model(path, compile=False)
    names = sorted(each.name for each in (folder / "test").iterdir())
    files = sorted((folder / "test").glob("*/*.png"))
    described = json.loads((path.parent / "config.json").read_text())["preprocessing"]
    prepare = functools.partial(
        kp.preprocessing.resize_image,
        preprocessing=kp.preprocessing.Preprocessing(**described),
        size=8,
    )
    images = np.stack([prepare(np.asarray(Image.open(file))) for file in files])
    found = model.predict(images, verbose=0).argmax(-1)
    return float(
        np.mean([names[i] == file.parent.name for i, file in zip(found, files, strict=True)])
    )


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Folders `seven` and `three`, a run `source` on the first, and `tuned` from it on
    the second, by a real process.
    """
    folder = tmp_path_factory.mktemp("work")
    write_digits(folder / "seven", range(7), None)
    write_digits(folder / "three", range(7, 10), 10)
    train.main(
        ["folder", "--data.dir", str(folder / "seven"), "--output", str(folder / "source"), *SOURCE]
    )
    arguments = (
        "finetune",
        "--data.dir",
        "three",
        "--model.weights",
        "source",
        "--output",
        "tuned",
        *TUNE,
    )
    status, _, err = finish(start("-m", "training", "train", *arguments, cwd=folder))
    assert (status, err) == (0, "")
    return folder


def test_few_images_are_enough_that_are_not_from_scratch(work):
    options = (
        "--data.dir",
        str(work / "three"),
        "--output",
        str(work / "scratch"),
        *SOURCE,
        *TUNE[:-8],
    )
    train.main(["folder", *options])
    tuned, scratch = (
        accuracy(work / name / "model.keras", work / "three") for name in ("tuned", "scratch")
    )

    assert tuned > 0.7
    assert tuned > scratch + 0.1


def test_what_is_frozen_is_the_source_s_to_the_bit(work):
    before, after = (weights(work / name / "model.keras") for name in ("source", "tuned"))
    same = {
        path
        for path in after
        if before[path].shape == after[path].shape and np.array_equal(before[path], after[path])
    }
    frozen = {path for path in after if path.startswith(("preprocessing", "stem", "stage1"))}
    assert any("moving_mean" in path for path in frozen)
    assert same == frozen


def test_the_images_are_prepared_as_the_source_s_were(work):
    described, source = (
        json.loads((work / name / "config.json").read_text()) for name in ("tuned", "source")
    )
    assert described["preprocessing"]["mean"] == source["preprocessing"]["mean"]
    assert described["preprocessing"]["std"] == source["preprocessing"]["std"]
    assert described["classes"] == ["7", "8", "9"]
    assert described["config"]["data"]["size"] == 8
    first, second = (
        keras.saving.load_model(work / name / "model.keras").get_config()
        for name in ("tuned", "source")
    )
    assert (first["mean"], first["std"]) == (second["mean"], second["std"])
    model = keras.saving.load_model(work / "tuned" / "model.keras")
    assert isinstance(model.optimizer, transfer.LayerwiseRates)
    assert model.optimizer.factors["stage3"] == pytest.approx(0.7)


def test_a_run_goes_on_without_the_file_it_began_with(work, tmp_path, monkeypatch, capsys):
    """From a checkpoint in the middle, to the bits of the run that was left alone,
    which another process trained.
    """
    shutil.copytree(work / "three", tmp_path / "three")
    shutil.copytree(work / "tuned", tmp_path / "tuned")
    for path in [
        tmp_path / "tuned" / "model.keras",
        *(tmp_path / "tuned" / "checkpoints").glob("best*"),
    ]:
        path.unlink()
    states = sorted((tmp_path / "tuned" / "checkpoints").glob("state-*.npz"))
    for path in states:
        if int(path.name[6:15]) > 2:
            path.unlink()
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    train.main(["--resume", "tuned"])
    ours, theirs = (
        weights(tmp_path / "tuned" / "model.keras"),
        weights(work / "tuned" / "model.keras"),
    )
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        np.testing.assert_array_equal(ours[path], value, err_msg=path)
    shutil.rmtree(tmp_path / "source")
    capsys.readouterr()
    train.main(["--resume", "tuned"])
    assert "Already finished" in capsys.readouterr().out


class TestErrors:
    """One line each, and no run directory."""

    def error(self, capsys, tmp_path, work, *options) -> str:
        options = (
            "--data.dir",
            str(work / "three"),
            *TUNE,
            "--output",
            str(tmp_path / "run"),
            *options,
        )
        message = error_of(capsys, train.main, ["finetune", *options])
        assert not (tmp_path / "run").exists()
        return message

    def test_no_weights(self, capsys, tmp_path, work):
        assert "add --model.weights with a run directory" in self.error(capsys, tmp_path, work)

    def test_no_such_file(self, capsys, tmp_path, work):
        assert "nowhere" in self.error(capsys, tmp_path, work, "--model.weights", "nowhere")

    def test_no_run(self, capsys, tmp_path, work):
        message = self.error(capsys, tmp_path, work, "--model.weights", str(work / "three"))
        assert str(work / "three") in message

    def test_another_kind_of_file(self, capsys, tmp_path, work):
        (tmp_path / "weights.pth").write_bytes(b"")
        message = self.error(
            capsys, tmp_path, work, "--model.weights", str(tmp_path / "weights.pth")
        )
        assert "keras-preact convert" in message

    def test_damaged_file(self, capsys, tmp_path, work):
        (tmp_path / "model.keras").write_bytes(b"no model")
        message = self.error(
            capsys, tmp_path, work, "--model.weights", str(tmp_path / "model.keras")
        )
        assert "model.keras is damaged" in message

    def test_a_model_of_keras_own(self, capsys, tmp_path, work):
        keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten()], name="flat").save(
            tmp_path / "model.keras"
        )
        message = self.error(
            capsys, tmp_path, work, "--model.weights", str(tmp_path / "model.keras")
        )
        assert "needs a network of residual units for images. " in message
        assert message.endswith("contains 'flat'.\n")

    def test_other_channels(self, capsys, tmp_path, work):
        small = kp.models.resnet_cifar(
            8, width_factor=0.125, input_shape=(8, 8, 1), mean=100.0, std=60.0, name="grey"
        )
        small.save(tmp_path / "model.keras")
        message = self.error(
            capsys, tmp_path, work, "--model.weights", str(tmp_path / "model.keras")
        )
        assert (
            f"grey takes grayscale (1 channel) images; {work / 'three'} has colour (3 channels) "
            "images. Train a new" in message
        )

    def test_too_small(self, capsys, tmp_path, work):
        message = self.error(
            capsys, tmp_path, work, "--model.weights", str(work / "source"), "--data.size", "3"
        )
        assert "images of 3 x 3 pixels" in message
        assert "must be at least 4" in message

    def test_unknown_place_to_freeze(self, capsys, tmp_path, work):
        message = self.error(
            capsys,
            tmp_path,
            work,
            "--model.weights",
            str(work / "source"),
            "--model.freeze",
            "stage9",
        )
        assert "Did you mean 'stage" in message

    def test_another_network(self, capsys, tmp_path, work):
        options = ("--model.weights", str(work / "source"), "--model.arrangement", "original")
        assert "--model.arrangement cannot change the trained network" in self.error(
            capsys, tmp_path, work, *options
        )
        options = ("--model.weights", str(work / "source"), "--model.name", "cifar_resnet20_preact")
        assert "recipe finetune" in self.error(capsys, tmp_path, work, *options)

    def test_preprocessing_that_nobody_knows(self, capsys, tmp_path, work):
        kp.models.resnet_cifar(8, width_factor=0.125, input_shape=(8, 8, 3), name="plain").save(
            tmp_path / "model.keras"
        )
        weights_of = ("--model.weights", str(tmp_path / "model.keras"))
        assert "plain has no preprocessing layer" in self.error(capsys, tmp_path, work, *weights_of)
        short = ("--model.mean", "1", "--model.std", "1")
        assert "need 3 numbers each" in self.error(capsys, tmp_path, work, *weights_of, *short)
        doubled = ("--model.mean", "1", "1", "1", "--model.std", "1", "1", "1")
        message = self.error(
            capsys, tmp_path, work, "--model.weights", str(work / "source"), *doubled
        )
        assert "its own preprocessing layer" in message

    def test_options_without_weights(self, capsys, tmp_path, work):
        options = [
            "folder",
            "--data.dir",
            str(work / "three"),
            "--model.freeze",
            "stem",
            "--output",
            str(tmp_path / "run"),
        ]
        assert "--model.freeze needs a trained network" in error_of(capsys, train.main, options)


def test_mean_and_std_of_a_network_without_a_layer_for_them(tmp_path, work):
    """It gets one; the network has other sizes then than the file's, and is channels
    last.
    """
    source = kp.models.resnet_cifar(
        8, width_factor=0.125, input_shape=(3, 16, 16), data_format="channels_first"
    )
    source.save(tmp_path / "model.keras")
    options = (
        *(
            "--data.dir",
            str(work / "three"),
            "--model.weights",
            str(tmp_path / "model.keras"),
            "--data.augmentation",
            "none",
        ),
        *(
            "--model.mean",
            "10",
            "20",
            "30",
            "--model.std",
            "4",
            "5",
            "6",
            "--health",
            "0",
            "--batch-size",
            "4",
        ),
        *("--schedule.unit", "iterations", "--schedule.length", "1", "--schedule.warmup", "0"),
    )
    train.main(["finetune", *options, "--output", str(tmp_path / "run")])
    model = keras.saving.load_model(tmp_path / "run" / "model.keras")
    assert model.input_shape == (None, 16, 16, 3)
    config = model.get_config()
    assert (config["mean"], config["std"]) == ([10, 20, 30], [4, 5, 6])
    layer = model.get_layer("preprocessing")
    found = keras.ops.convert_to_numpy(layer(np.full((1, 1, 1, 3), 50.0, "float32")))
    np.testing.assert_allclose(found[0, 0, 0], [10, 6, 20 / 6], rtol=1e-6)
