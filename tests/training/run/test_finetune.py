"""Fine-tuning by the command line, from pictures of seven classes to three other classes."""

import contextlib
import json
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.training import images as pictures
from tests.training.calls import assert_same_weights, error_of, weights, words
from training import cli
from training.commands import train
from training.config import Config, Data, Model
from training.data import load
from training.recipes import RECIPES
from training.run import finetune

#: Few steps on few images.
SHORT = words(
    "--data.holdout 0 --data.augmentation none --health 0 --batch-size 15 --seed 2",
    "--schedule.unit iterations --schedule.length 4 --schedule.warmup 0",
    "--optimizer.learning-rate 0.2",
)
SOURCE = SHORT + words(
    "--model.name digits_resnet8_preact --model.width-factor 0.25 --data.size 8 --seed 1"
)
TUNE = SHORT + words(
    "--model.freeze stage1 --optimizer.layer-decay 0.7 --checkpoint.every 2 --checkpoint.keep 20"
)


@pytest.fixture(scope="session")
def work(once_per_run):
    """The folders `seven` and `three`, a run `source` on the first, and a run `tuned`, which
    fine-tunes `source` on the second.
    """

    def make(folder: Path) -> None:
        pictures.write_folder(folder / "seven", tuple("0123456"), 6, (8, 8))
        pictures.write_folder(folder / "three", tuple("789"), 10, (8, 8), seed=1)
        with contextlib.chdir(folder):
            train.main([*words("folder --data.dir seven --output source"), *SOURCE])
            options = words("finetune --data.dir three --model.weights source --output tuned")
            train.main([*options, *TUNE])

    return once_per_run("finetuned", make)


def test_frozen_weights_are_the_source_s_to_the_bit(work):
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
    source, tuned = (
        json.loads((work / name / "config.json").read_text()) for name in ("source", "tuned")
    )
    assert source["classes"] == list("0123456")
    assert tuned["classes"] == ["7", "8", "9"]
    assert tuned["preprocessing"]["mean"] == source["preprocessing"]["mean"]
    assert tuned["preprocessing"]["std"] == source["preprocessing"]["std"]
    model = keras.saving.load_model(work / "tuned" / "model.keras")
    assert model.get_config()["mean"] == pytest.approx(source["preprocessing"]["mean"])
    assert model.optimizer.rate_factors["stage3"] == pytest.approx(0.7)


def test_a_shipped_network_gets_a_new_classifier(work):
    folder = Data("folder", dir=work / "three", size=32)
    model = Model("", weights=Path("cifar_resnet20_preact:cifar10"))
    _, data, tuned = finetune.begin(Config(model, folder), load(folder))
    trained = weights(kp.create_model("cifar_resnet20_preact", weights="cifar10"))
    assert data.preprocessing.mean == pytest.approx((125.3, 123.0, 113.9), abs=0.1)
    for path, value in weights(tuned).items():
        if path.startswith("head_classifier"):
            assert value.shape[-1] == 3
        elif not path.startswith("preprocessing"):
            np.testing.assert_array_equal(value, trained[path], path)


def test_a_run_resumes_without_the_file_it_started_from(work, tmp_path, monkeypatch):
    """It resumes from a checkpoint in the middle, and ends with the bits of the run that was
    not interrupted.
    """
    shutil.copytree(work / "three", tmp_path / "three")
    shutil.copytree(work / "tuned", tmp_path / "tuned")
    checkpoints = tmp_path / "tuned" / "checkpoints"
    later = [path for path in checkpoints.glob("state-*.npz") if int(path.name[6:15]) > 2]
    for path in [tmp_path / "tuned" / "model.keras", checkpoints / "best.keras", *later]:
        path.unlink()
    monkeypatch.chdir(tmp_path)
    train.main(["--resume", "tuned"])
    assert_same_weights(*(each / "tuned" / "model.keras" for each in (tmp_path, work)))


class TestErrors:
    """Each error is one line, and there is no run directory after it."""

    @pytest.fixture
    def error(self, capsys, work, tmp_path, monkeypatch):
        """Return a function that returns the message for options, with files in `work`."""
        monkeypatch.chdir(work)

        def message(options: str) -> str:
            run = tmp_path / "run"
            arguments = words(f"finetune --data.dir three --output {run}")
            found = error_of(capsys, train.main, [*arguments, *TUNE, *words(options)])
            assert not run.exists()
            return found

        return message

    @pytest.mark.parametrize(
        ("options", "part"),
        [
            ("", "add --model.weights with a run directory"),
            ("--model.weights nowhere", "nowhere"),
            ("--model.weights cifar_resnet20_preact:imagenet", "imagenet"),
            ("--model.weights three", "three"),
            ("--model.weights source --data.size 3", "must be at least 4"),
            ("--model.weights source --model.arrangement original", "cannot change the trained"),
            ("--model.weights source --model.name cifar_resnet20_preact", "recipe finetune"),
            ("--model.weights source --model.mean 1 1 1 --model.std 1 1 1", "its own preproc"),
            ("--model.weights source --model.freeze stage9", "Did you mean 'stage"),
            ("--model.name cifar_resnet20_preact", "--model.freeze needs a trained network"),
        ],
    )
    def test_options(self, error, options, part):
        assert part in error(options)

    def test_files_without_a_fitting_network(self, error, tmp_path):
        path = tmp_path / "model.keras"
        for name, part in (("weights.pth", "keras-preact convert"), (path.name, "is damaged")):
            (tmp_path / name).write_bytes(b"no model")
            assert part in error(f"--model.weights {tmp_path / name}")
        keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten()]).save(path)
        assert "needs a network of residual units for images. " in error(f"--model.weights {path}")

    @pytest.mark.parametrize(
        ("network", "options", "part"),
        [
            (
                {"input_shape": (8, 8, 1), "mean": 1.0, "std": 1.0},
                "",
                "takes grayscale",
            ),
            ({"input_shape": (8, 8, 3)}, "", "has no preprocessing layer"),
            ({"input_shape": (8, 8, 3)}, "--model.mean 1 --model.std 1", "need 3 numbers each"),
        ],
    )
    def test_channels_and_preprocessing(self, error, tmp_path, network, options, part):
        path = tmp_path / "model.keras"
        kp.models.resnet_cifar(8, width_factor=0.125, **network).save(path)
        assert part in error(f"--model.weights {path} {options}")


def test_mean_and_std_of_a_network_without_a_layer_for_them(tmp_path, work):
    """It gets such a layer. The network then takes other sizes than the file's, and is
    channels last.
    """
    options = {"width_factor": 0.125, "input_shape": (3, 16, 16), "data_format": "channels_first"}
    kp.models.resnet_cifar(8, **options).save(tmp_path / "model.keras")
    options = words(
        f"--data.dir {work / 'three'} --model.weights {tmp_path / 'model.keras'}",
        "--model.mean 110 120 130 --model.std 40 50 60 --batch-size 4",
    )
    config = cli.parse("train finetune", Config, options, "", default=RECIPES["finetune"]())
    with train.started(config, "finetune") as run:
        model = run.network
    assert model.input_shape == (None, 16, 16, 3)
    layer = model.get_layer("preprocessing")
    found = keras.ops.convert_to_numpy(layer(np.full((1, 1, 1, 3), 150.0, "float32")))
    np.testing.assert_allclose(found[0, 0, 0], [1, 0.6, 20 / 60], rtol=1e-6)
