"""Fine-tuning by the command line, from pictures of seven classes to three other classes."""

import contextlib
import json
import shutil
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
from keras.src.legacy.saving import legacy_h5_format

import keras_preact as kp
from tests.keras_preact import harness
from tests.keras_preact.weights import keras_nets
from tests.training import images as pictures
from tests.training.calls import assert_same_weights, error_of, weights, words
from training import cli
from training.commands import train
from training.config import Config, Data, Model
from training.data import load
from training.directory import models
from training.errors import UserError
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
    "--model.freeze stage1 --optimizer.name muon --optimizer.layer-decay 0.7",
    "--checkpoint.every 2 --checkpoint.keep 20",
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


def timm_file(folder):
    """A file of timm's names, and the network that it is of."""
    network = kp.models.resnet_imagenet(
        (1, 1, 1, 1),
        block="basic",
        width_factor=1 / 8,
        stem="deep",
        downsampling="average",
        arrangement="full_preactivation_raw_stem",
        classes=5,
        input_shape=(32, 32, 3),
    )
    harness.randomize(network)
    kp.weights.write_state(folder / "model.safetensors", kp.weights.to_timm(network))
    return folder / "model.safetensors", network


def applications_file(folder):
    theirs = keras_nets.applications()
    with h5py.File(folder / "weights.h5", "w") as file:  # as the downloads are
        legacy_h5_format.save_weights_to_hdf5_group(file, theirs)
    return folder / "weights.h5", kp.weights.from_keras_applications(theirs)


@pytest.mark.parametrize("make", [timm_file, applications_file])
def test_weights_of_another_library_get_a_new_classifier(work, tmp_path, make):
    """Their pixels are scaled as that library does, unless other values are given."""
    path, network = make(tmp_path)
    folder = Data("folder", dir=work / "three", size=48)
    _, data, tuned = finetune.begin(Config(Model("", weights=path), folder), load(folder))
    assert (data.preprocessing.mean, data.preprocessing.std) == ((127.5,) * 3, (127.5,) * 3)
    assert tuned.input_shape == (None, 48, 48, 3)
    given, found = weights(network), weights(tuned)
    assert found.pop("head_classifier/kernel").shape[-1] == 3
    for name, value in found.items():
        if not name.startswith(("preprocessing", "head_classifier")):
            np.testing.assert_array_equal(value, given[name], name)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 48, 48, 3)).astype("float32")
    network = kp.transfer.changed_copy(network, input_shape=(48, 48, 3))
    want = kp.transfer.feature_extractor(network, ["pool"])(pixels / 127.5 - 1)["pool"]
    got = kp.transfer.feature_extractor(tuned, ["pool"])(pixels)["pool"]
    np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, (got, want)), rtol=1e-3, atol=1e-3)
    other = Model("", weights=path, mean=(1.0, 2.0, 3.0), std=(4.0, 5.0, 6.0))
    _, data, _ = finetune.begin(Config(other, folder), load(folder))
    assert (data.preprocessing.mean, data.preprocessing.std) == (other.mean, other.std)


def test_a_run_from_weights_of_another_library(work, tmp_path, capsys):
    """One line of the command line."""
    path, _ = timm_file(tmp_path)
    run = tmp_path / "run"
    options = words(f"finetune --data.dir {work / 'three'} --data.size 32 --output {run}")
    train.main([*options, "--model.weights", str(path), *TUNE])
    assert f"Started from {path}: pixels have mean 127.5" in capsys.readouterr().out
    assert keras.saving.load_model(run / "model.keras").output_shape == (None, 3)


def test_keras_applications_by_name(monkeypatch):
    """ResNet50V2:imagenet downloads its weights; here they are random."""
    loaded = []

    def build(weights, **options):
        loaded.append(weights)
        return kp.models.resnet_imagenet((1,), input_shape=(32, 32, 3), width_factor=0.125)

    monkeypatch.setattr(kp.applications, "ResNet50V2", build)
    assert models.shipped("ResNet50V2:imagenet").count_params()
    assert loaded == ["imagenet"]

    def offline(weights, **options):
        raise ConnectionError("The download failed")

    monkeypatch.setattr(kp.applications, "ResNet50V2", offline)
    with pytest.raises(UserError, match="ResNet50V2:imagenet: The download failed"):
        models.shipped("ResNet50V2:imagenet")


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
            ("--model.weights imagenet", "such as cifar_resnet20_preact:cifar10 or ResNet50V2:im"),
            ("--model.weights missing.safetensors", "an existing file of weights (.keras, .h5, "),
            ("--model.weights ResNet50V2:image-net", "ResNet50V2:image-net: There is no such"),
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
        for name, part in (("weights.pth", "is no Torch file"), (path.name, "is damaged")):
            (tmp_path / name).write_bytes(b"no model")
            assert part in error(f"--model.weights {tmp_path / name}")
        keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten()]).save(path)
        assert "no network of residual units for images: " in error(f"--model.weights {path}")

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
