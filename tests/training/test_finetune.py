"""Fine-tuning by the command line: digits 0 to 6 as images in folders, then a few of 7,
8 and 9.
"""

import contextlib
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
from tests.training.commands import error_of, words
from training import train
from training.config import Data
from training.data import load

pytestmark = pytest.mark.backend

#: A network and a schedule of seconds.
SOURCE = words(
    "--model.name digits_resnet8_preact --model.width-factor 0.5 --data.size 8 --seed 1",
    "--data.augmentation none --health 0 --data.holdout 0 --batch-size 64",
    "--optimizer.learning-rate 0.1 --optimizer.weight-decay 1e-3",
    "--schedule.length 30 --schedule.warmup 0.5",
)
#: Few steps on few images.
SHORT = words(
    "--data.holdout 0 --data.augmentation none --health 0 --batch-size 15 --seed 2",
    "--schedule.unit iterations --schedule.length 4 --schedule.warmup 0",
    "--optimizer.learning-rate 0.2",
)
TUNE = SHORT + words(
    "--model.freeze stage1 --optimizer.layer-decay 0.7 --checkpoint.every 2 --checkpoint.keep 20"
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


@pytest.fixture(scope="session")
def work(once_per_run):
    """Folders `seven` and `three`, a run `source` on the first, and `tuned` from it on
    the second.
    """

    def make(folder: Path) -> None:
        write_digits(folder / "seven", range(7), None)
        write_digits(folder / "three", range(7, 10), 10)
        with contextlib.chdir(folder):
            train.main([*words("folder --data.dir seven --output source"), *SOURCE])
            options = words("finetune --data.dir three --model.weights source --output tuned")
            train.main([*options, *TUNE])

    return once_per_run("finetuned", make)


def test_the_source_is_of_its_folder(work):
    described = json.loads((work / "source" / "config.json").read_text())
    assert described["classes"] == list("0123456")
    assert described["config"]["data"]["dir"] == "seven"
    model = keras.saving.load_model(work / "source" / "model.keras")
    assert (model.input_shape, model.output_shape) == ((None, 8, 8, 3), (None, 7))
    rows = load(Data("folder", dir=work / "seven")).train.open().as_numpy_iterator()
    pixels = np.stack([image for image, _ in rows])
    mean = np.ravel(model.get_layer("preprocessing").mean)
    np.testing.assert_allclose(mean, pixels.mean(axis=(0, 1, 2)), rtol=1e-3)


def test_few_images_are_enough(work):
    assert accuracy(work / "tuned" / "model.keras", work / "three") > 0.7


@pytest.mark.soak
def test_few_images_are_not_enough_from_scratch(work, tmp_path):
    places = f"folder --data.dir {work / 'three'} --output {tmp_path / 'scratch'}"
    train.main([*words(places), *SOURCE, *SHORT])
    runs = (work / "tuned", tmp_path / "scratch")
    tuned, scratch = (accuracy(run / "model.keras", work / "three") for run in runs)
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
    """From a checkpoint in the middle, to the bits of the run that was left alone."""
    shutil.copytree(work / "three", tmp_path / "three")
    shutil.copytree(work / "tuned", tmp_path / "tuned")
    checkpoints = tmp_path / "tuned" / "checkpoints"
    later = [path for path in checkpoints.glob("state-*.npz") if int(path.name[6:15]) > 2]
    for path in [tmp_path / "tuned" / "model.keras", checkpoints / "best.keras", *later]:
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

    @pytest.fixture
    def error(self, capsys, work, tmp_path, monkeypatch):
        """Return a function that returns the message for options, with files in `work`."""
        monkeypatch.chdir(work)

        def message(options: str, recipe="finetune", tune=TUNE) -> str:
            run = tmp_path / "run"
            arguments = words(f"{recipe} --data.dir three --output {run} {options}")
            found = error_of(capsys, train.main, [*arguments, *tune])
            assert not run.exists()
            return found

        return message

    @pytest.mark.parametrize(
        ("options", "part"),
        [
            ("", "add --model.weights with a run directory"),
            ("--model.weights nowhere", "nowhere"),
            ("--model.weights three", "three"),
            ("--model.weights source --data.size 3", "images of 3 x 3 pixels"),
            ("--model.weights source --data.size 3", "must be at least 4"),
            (
                "--model.weights source --model.arrangement original",
                "--model.arrangement cannot change the trained network",
            ),
            ("--model.weights source --model.name cifar_resnet20_preact", "recipe finetune"),
            (
                "--model.weights source --model.mean 1 1 1 --model.std 1 1 1",
                "its own preprocessing layer",
            ),
        ],
    )
    def test_options(self, error, options, part):
        assert part in error(options)

    def test_unknown_place_to_freeze(self, error):
        message = error("--model.weights source --model.freeze stage9", tune=SHORT)
        assert "Did you mean 'stage" in message

    def test_options_without_weights(self, error):
        message = error("--model.freeze stem", "folder", SHORT)
        assert "--model.freeze needs a trained network" in message

    @pytest.mark.parametrize(
        ("name", "part"),
        [("weights.pth", "keras-preact convert"), ("model.keras", "model.keras is damaged")],
    )
    def test_files_that_are_no_model(self, error, tmp_path, name, part):
        (tmp_path / name).write_bytes(b"no model")
        assert part in error(f"--model.weights {tmp_path / name}")

    @pytest.mark.soak
    def test_a_model_of_keras_own(self, error, tmp_path):
        model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten()], name="flat")
        model.save(tmp_path / "model.keras")
        message = error(f"--model.weights {tmp_path / 'model.keras'}")
        assert "needs a network of residual units for images. " in message
        assert message.endswith("contains 'flat'.\n")

    def test_other_channels(self, error, tmp_path):
        pixels = {"mean": 100.0, "std": 60.0}
        options = {"width_factor": 0.125, "input_shape": (8, 8, 1), "name": "grey"} | pixels
        kp.models.resnet_cifar(8, **options).save(tmp_path / "model.keras")
        assert (
            "grey takes grayscale (1 channel) images; three has colour (3 channels) images. Train "
            "a new" in error(f"--model.weights {tmp_path / 'model.keras'}")
        )

    def test_preprocessing_that_nobody_knows(self, error, tmp_path):
        options = {"width_factor": 0.125, "input_shape": (8, 8, 3), "name": "plain"}
        kp.models.resnet_cifar(8, **options).save(tmp_path / "model.keras")
        weights_of = f"--model.weights {tmp_path / 'model.keras'}"
        assert "plain has no preprocessing layer" in error(weights_of)
        assert "need 3 numbers each" in error(f"{weights_of} --model.mean 1 --model.std 1")


def test_mean_and_std_of_a_network_without_a_layer_for_them(tmp_path, work):
    """It gets one; the network has other sizes then than the file's, and is channels
    last.
    """
    source = kp.models.resnet_cifar(
        8, width_factor=0.125, input_shape=(3, 16, 16), data_format="channels_first"
    )
    source.save(tmp_path / "model.keras")
    options = words(
        f"finetune --data.dir {work / 'three'} --model.weights {tmp_path / 'model.keras'}",
        "--model.mean 110 120 130 --model.std 40 50 60 --data.augmentation none --health 0",
        "--batch-size 4 --schedule.unit iterations --schedule.length 1 --schedule.warmup 0",
    )
    train.main([*options, "--output", str(tmp_path / "run")])
    model = keras.saving.load_model(tmp_path / "run" / "model.keras")
    assert model.input_shape == (None, 16, 16, 3)
    config = model.get_config()
    assert (config["mean"], config["std"]) == ([110, 120, 130], [40, 50, 60])
    layer = model.get_layer("preprocessing")
    found = keras.ops.convert_to_numpy(layer(np.full((1, 1, 1, 3), 150.0, "float32")))
    np.testing.assert_allclose(found[0, 0, 0], [1, 0.6, 20 / 60], rtol=1e-6)
