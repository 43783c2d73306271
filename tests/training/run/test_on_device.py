"""Training with the images on the device gives the results of training with images from
the host, also with many steps per call.
"""

import dataclasses

import keras
import numpy as np
import pytest

from tests.training.calls import weights
from training.commands.train import train
from training.config import Config, Data, Model, Schedule
from training.directory import histories
from training.errors import UserError

pytestmark = pytest.mark.backend

BACKEND = keras.backend.backend()
CONFIG = Config(
    model=Model("digits_resnet8_preact", width_factor=0.25, dropout=0.2),
    data=Data("digits", augmentation="pad_crop_flip", holdout=0.1),
    schedule=Schedule("steps", drops=(2,), length=3, unit="iterations"),
    batch_size=16,
    steps_per_epoch=3,
    health=3,
)


def trained(folder, on_device=False, together=1):
    config = dataclasses.replace(
        CONFIG,
        output=folder,
        data=dataclasses.replace(CONFIG.data, on_device=on_device),
        steps_per_execution=together,
    )
    run = train(config, "digits")
    return histories.read(run / "history.csv"), weights(run / "model.keras"), run


def test_it_trains_as_from_the_host(tmp_path):
    """Held-out images, health and checkpoints are as in any other run."""
    history, expected, _ = trained(tmp_path / "host")
    together = 1 if BACKEND == "torch" else 3
    found, others, run = trained(tmp_path / "device", True, together)
    for name in ("iteration", "loss", "accuracy", "val_loss", "learning_rate"):
        np.testing.assert_allclose(found[name], history[name], rtol=1e-4)
    assert expected.keys() == others.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(others[path], value, rtol=1e-3, atol=1e-4)
    steps = histories.read_table(run / "first_losses.csv")["step"]
    assert steps.tolist() == list(range(together, 4, together))
    health = histories.read_table(run / "health.csv")
    assert health["step"].tolist() == [3]
    assert np.isfinite(health["gradient_norm"]).all()
    # checkpoints do not contain the images
    assert max(path.stat().st_size for path in (run / "checkpoints").iterdir()) < 2**18


@pytest.mark.parametrize(
    "change", [{"rand_augment": (1, 5)}, {"mixup": 0.2}, {"name": "fake", "size": 8}]
)
def test_data_that_cannot_stay_on_the_device(change, tmp_path):
    data = dataclasses.replace(CONFIG.data, on_device=True, **change)
    config = dataclasses.replace(CONFIG, output=tmp_path / "run", data=data)
    with pytest.raises(UserError, match=r"--data\.on-device is for images in memory"):
        train(config, "digits")
    assert not (tmp_path / "run").exists()
