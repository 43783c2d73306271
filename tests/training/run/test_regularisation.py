"""Regularisation reaches the loss and the figures of a run. test_resume.py tests that a run
with all of it resumes to the bit.
"""

import json

import numpy as np
import pytest

from tests.training.calls import csv_rows
from training.config import Config, Data, Optimizer
from training.data import evaluation_batches, load
from training.directory import models
from training.run import networks

LOGITS = np.random.default_rng(0).normal(size=(6, 5)).astype("float32")


def cross_entropy(logits: np.ndarray, targets: np.ndarray, smoothing: float) -> float:
    logits = logits.astype("float64")
    log_shares = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    targets = (1 - smoothing) * targets + smoothing / logits.shape[-1]
    return -(log_shares * targets).sum(axis=-1).mean()


def test_validation_is_of_the_images_as_they_are(everything):
    """Compute the loss and the accuracy of the last epoch from the model's outputs and
    integer labels.
    """
    last = csv_rows(everything / "history.csv")[-1]
    data = load(Data("digits", holdout=200))
    [(images, labels)] = evaluation_batches(data, data.holdout, 200, None).as_numpy_iterator()
    logits = models.load(everything / "model.keras").predict_on_batch(images)
    accuracy = (logits.argmax(axis=1) == labels).mean()
    assert float(last["val_accuracy"]) == pytest.approx(accuracy, abs=1e-6)
    expected = cross_entropy(logits, np.eye(10)[labels], 0.1)
    assert float(last["val_loss"]) == pytest.approx(expected, rel=1e-4)
    written = json.loads((everything / "config.json").read_text())["config"]["data"]
    assert (written["mixup"], written["cutmix"], written["rand_augment"]) == (0.2, 1.0, [2, 9])


@pytest.mark.backend
class TestLoss:
    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    def test_of_shares_and_of_class_numbers(self, smoothing):
        optimizer = Optimizer(label_smoothing=smoothing)
        loss = networks.loss(Config(data=Data(mixup=0.2), optimizer=optimizer))
        targets = np.random.default_rng(1).dirichlet(np.ones(5), 6).astype("float32")
        expected = cross_entropy(LOGITS, targets, smoothing)
        assert float(loss(targets, LOGITS)) == pytest.approx(expected, rel=1e-5)
        plain = networks.loss(Config(optimizer=optimizer))
        labels = np.array([0, 4, 2, 2, 1, 3])
        expected = cross_entropy(LOGITS, np.eye(5)[labels], smoothing)
        given = np.eye(5, dtype="float32")[labels] if smoothing else labels
        assert float(plain(given, LOGITS)) == pytest.approx(expected, rel=1e-5)
