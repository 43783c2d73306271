"""Every builder's network trains: a step leaves a finite loss, and each weight and
moving statistic moved.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

pytestmark = pytest.mark.backend


@pytest.mark.parametrize(
    "build",
    [
        lambda: kp.models.resnet_cifar(
            11,
            width_factor=0.125,
            input_shape=(8, 8, 3),
            shortcut="shortcut_only_gating",
            classes=4,
        ),
        lambda: kp.models.wide_resnet(10, 0.125, input_shape=(8, 8, 3), dropout=0.3, classes=4),
        lambda: kp.models.resnet_imagenet(
            (1, 1), width_factor=0.125, input_shape=(16, 16, 3), shortcut="dropout", classes=4
        ),
        lambda: kp.models.dense_resnet(
            6, width=8, input_shape=(5,), arrangement="original", classes=4
        ),
    ],
    ids=["cifar", "wide", "imagenet", "dense"],
)
def test_fit(build):
    model = build()
    before = harness.weights(model)
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False
    )
    x = harness.images(8, *model.input_shape[1:])
    history = model.fit(x, np.arange(8) % 4, batch_size=4, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    unchanged = [
        path
        for path, value in harness.weights(model).items()
        if np.array_equal(value, before[path])
    ]
    assert not unchanged
