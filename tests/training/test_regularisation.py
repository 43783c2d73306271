"""What regularises a run reaches its network, its loss and its figures, and a run with
all of it goes on to the bit.
"""

import csv
import json
import shutil
from typing import ClassVar

import keras
import numpy as np
import pytest

from tests.training.commands import error_of, run_train, words
from training import networks
from training.config import Config, Data, Model, Optimizer
from training.data import evaluation_batches, load

OPTIONS = words(
    "--data.mixup 0.2 --data.cutmix 1 --data.rand-augment 2 9 --data.holdout 200",
    "--optimizer.label-smoothing 0.1 --model.dropout 0.1 --model.stochastic-depth 0.2",
    "--model.squeeze-excitation 2 --accumulate 2 --schedule.length 6 --health 2",
    "--checkpoint.every 3 --checkpoint.keep 4",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_train(tmp_path_factory.mktemp("regularised") / "run", *OPTIONS)


def cross_entropy(logits: np.ndarray, targets: np.ndarray, smoothing: float) -> np.ndarray:
    log_shares = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return -(log_shares * ((1 - smoothing) * targets + smoothing / logits.shape[-1])).sum(axis=-1)


class TestRun:
    @pytest.mark.backend
    def test_validation_is_of_the_images_as_they_are(self, run):
        """The loss and the accuracy of the last epoch, from the model's outputs and
        integer labels.
        """
        [row] = csv.DictReader((run / "history.csv").read_text().splitlines())
        split = load(Data("digits", holdout=200))
        [(images, labels)] = evaluation_batches(split, split.holdout, 200, None).as_numpy_iterator()
        logits = np.asarray(
            keras.ops.convert_to_numpy(
                networks.load(run / "model.keras").predict(images, verbose=0)
            )
        )
        assert float(row["val_accuracy"]) == pytest.approx(
            (logits.argmax(axis=1) == labels).mean(), abs=1e-6
        )
        expected = cross_entropy(logits.astype("float64"), np.eye(10)[labels], 0.1).mean()
        assert float(row["val_loss"]) == pytest.approx(expected, rel=1e-4)
        assert np.isfinite(float(row["loss"]))
        assert len((run / "health.csv").read_text().splitlines()) == 1 + 3

    @pytest.mark.backend
    def test_goes_on_from_its_middle_to_the_same_weights(self, run, tmp_path):
        again = tmp_path / "run"
        shutil.copytree(run, again)
        (again / "model.keras").unlink()
        [last] = again.glob("checkpoints/state-000000012-*")  # six updates in two parts each
        last.unlink()
        assert list(again.glob("checkpoints/state-000000006-*"))
        run_train(again, *OPTIONS, "--resume")
        for one, other in zip(
            *(networks.load(path / "model.keras").get_weights() for path in (run, again)),
            strict=True,
        ):
            np.testing.assert_array_equal(one, other)

    @pytest.mark.backend
    def test_is_written_down_and_is_part_of_the_run(self, run, capsys):
        written = json.loads((run / "config.json").read_text())["config"]["data"]
        assert (written["mixup"], written["cutmix"], written["rand_augment"]) == (0.2, 1.0, [2, 9])
        (run / "model.keras").rename(run / "kept")
        message = error_of(capsys, run_train, run, *OPTIONS, "--resume --data.rand-augment 2 10")
        (run / "kept").rename(run / "model.keras")
        assert "was started with another value of --data.rand-augment. " in message

    def test_a_dry_run_says_what_happens_to_the_images(self, tmp_path, capsys):
        options = "--data.mixup 0.2 --data.cutmix 1 --data.rand-augment 2 9 --dry-run"
        run_train(tmp_path / "run", options)
        described = (
            "none; RandAugment, 2 operations of magnitude 9; mixup with alpha 0.2; CutMix with "
            "alpha 1"
        )
        assert described in " ".join(capsys.readouterr().out.split())


@pytest.mark.backend
class TestLoss:
    LOGITS = np.random.default_rng(0).normal(size=(6, 5)).astype("float32")

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    def test_of_shares(self, smoothing):
        loss = networks.loss(
            Config(data=Data(mixup=0.2), optimizer=Optimizer(label_smoothing=smoothing))
        )
        targets = np.random.default_rng(1).dirichlet(np.ones(5), 6).astype("float32")
        expected = cross_entropy(self.LOGITS.astype("float64"), targets, smoothing).mean()
        assert float(loss(targets, self.LOGITS)) == pytest.approx(expected, rel=1e-5)
        # where nothing is mixed it is the loss of integers
        plain = networks.loss(Config(optimizer=Optimizer(label_smoothing=smoothing)))
        labels = np.array([0, 4, 2, 2, 1, 3])
        assert float(loss(np.eye(5, dtype="float32")[labels], self.LOGITS)) == pytest.approx(
            float(plain(labels, self.LOGITS)), rel=1e-5
        )

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_is_computed_in_float32(self, dtype):
        loss = networks.loss(Config(data=Data(cutmix=1.0)))
        logits = keras.ops.cast(self.LOGITS, dtype)
        value = loss(np.eye(5, dtype="float32")[[0, 1, 2, 3, 4, 0]], logits)
        assert keras.backend.standardize_dtype(value.dtype) == "float32"
        rounded = np.asarray(
            keras.ops.convert_to_numpy(keras.ops.cast(logits, "float32")), "float64"
        )
        expected = cross_entropy(rounded, np.eye(5)[[0, 1, 2, 3, 4, 0]], 0.0).mean()
        assert float(value) == pytest.approx(expected, rel=1e-5)

    def test_accuracy_is_that_of_the_larger_share(self):
        model = keras.Sequential([keras.Input((5,)), keras.layers.Identity()])
        model.compile(
            "sgd",
            networks.loss(Config(data=Data(mixup=0.2))),
            weighted_metrics=["accuracy"],
            jit_compile=False,
        )
        targets = np.zeros((6, 5), "float32")
        targets[np.arange(6), [0, 1, 2, 3, 4, 0]] = 0.7
        targets[np.arange(6), [1, 2, 3, 4, 0, 1]] = 0.3
        # four of the larger shares, two of the smaller
        logits = np.eye(5, dtype="float32")[[0, 1, 3, 3, 4, 1]]
        assert model.evaluate(logits, targets, verbose=0, return_dict=True)[
            "accuracy"
        ] == pytest.approx(4 / 6)


@pytest.mark.backend
class TestModelOptions:
    SET: ClassVar = {
        "squeeze_excitation": 4,
        "downsampling": "average",
        "standardize_weights": True,
        "zero_init_last": True,
    }

    def units(self, **options) -> list:
        data = load(Data("digits"))
        small = Model("digits_resnet8_preact", width_factor=0.25, **options)
        return networks.build(Config(model=small), data, 8).units

    def options(self, unit) -> dict:
        """The options of a unit and of its block that the test is about."""
        found = {**vars(unit.options), **vars(unit.options.block)}
        return {name: found[name] for name in self.SET}

    def test_each_reaches_every_unit_and_is_off_by_default(self):
        off = self.units()
        for name, value in self.SET.items():
            units = self.units(**{name: value})
            assert len(units) == 3
            for unit, plain in zip(units, off, strict=True):
                got, default = self.options(unit), self.options(plain)
                assert got.pop(name) == value
                assert default.pop(name) in (None, False, "strided")
                assert got == default
