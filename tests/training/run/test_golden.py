"""The losses of the first steps of a run must not change: a change in the computation shows
here.
"""

import keras
import numpy as np
import pytest

from training.commands.train import train
from training.config import Config, Data, Model, Optimizer, Schedule
from training.directory import histories

#: Backends draw different weights from the same seed.
LOSSES = {
    "jax": [2.3839, 2.3696, 2.3636],
    "tensorflow": [2.3022, 2.3351, 2.3553],
    "torch": [2.3619, 2.3374, 2.4069],
}
#: The same with a stack of two units in each stage.
STACKED = {
    "jax": [2.4199, 2.3969, 2.3959],
    "tensorflow": [2.2933, 2.3861, 2.3548],
    "torch": [2.3021, 2.3121, 2.3410],
}


@pytest.mark.backend
@pytest.mark.parametrize(
    ("model", "losses"),
    [
        (Model("digits_resnet8_preact"), LOSSES),
        (Model("digits_resnet20_preact", stacked=True), STACKED),
    ],
    ids=["units", "stacks"],
)
def test_first_losses(tmp_path, model, losses):
    """The run has crops, warm-up, momentum and decay. More steps would amplify the rounding
    of another library or CPU.
    """
    config = Config(
        model=model,
        data=Data("digits", augmentation="pad_crop_flip", holdout=0.1),
        optimizer=Optimizer(weight_decay=5e-3),
        schedule=Schedule("cosine", length=3, warmup=2, unit="iterations"),
        batch_size=64,
        health=0,
        output=tmp_path / "run",
    )
    run = train(config, "digits")
    found = histories.read_table(run / "first_losses.csv")["loss"]
    np.testing.assert_allclose(found, losses[keras.backend.backend()], rtol=1e-3)
