"""The losses of the first steps of a run, as they were on the day of this file: a change
that alters what is computed shows here.
"""

import keras
import numpy as np
import pytest

from training import histories
from training.config import Config, Data, Model, Optimizer, Schedule
from training.train import train

pytestmark = pytest.mark.backend

#: Backends draw different weights from a seed.
LOSSES = {
    "jax": """2.3839 2.3696 2.3636 2.3474 2.3414 2.3118 2.3660 2.3463 2.4066 2.3594
        2.3008 2.3585 2.3035 2.3110 2.2988 2.3109 2.3176 2.3063 2.3037 2.2323""",
    "tensorflow": """2.3022 2.3351 2.3553 2.3187 2.3143 2.2898 2.3916 2.3179 2.3284 2.3160
        2.3007 2.3584 2.2932 2.3120 2.3295 2.3325 2.2794 2.3016 2.2917 2.3013""",
    "torch": """2.3619 2.3374 2.4069 2.3144 2.3177 2.2993 2.4220 2.3434 2.3244 2.3206
        2.2296 2.3170 2.3016 2.2875 2.2987 2.3229 2.2761 2.3414 2.2248 2.2510""",
}


def test_first_losses(tmp_path):
    """Twenty steps over two epochs, with crops, warm-up, momentum and decay."""
    config = Config(
        model=Model("digits_resnet8_preact"),
        data=Data("digits", augmentation="pad_crop_flip", holdout=0.1),
        optimizer=Optimizer(weight_decay=5e-3),
        schedule=Schedule("cosine", length=20, warmup=2, unit="iterations"),
        batch_size=64,
        steps_per_epoch=10,
        health=0,
        output=tmp_path / "run",
    )
    run = train(config, "digits")
    found = histories.read_table(run / "first_losses.csv")
    assert found["step"].tolist() == list(range(1, 21))
    expected = np.array(LOSSES[keras.backend.backend()].split(), "float64")
    np.testing.assert_allclose(found["loss"], expected, rtol=2e-3)
