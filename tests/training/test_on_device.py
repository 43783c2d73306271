"""Training with the images on the device is training with images from the host, also
with many steps per call.
"""

import dataclasses
import re

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.training import images as pictures
from training import histories, networks
from training.cli import UserError
from training.config import Config, Data, Model, Schedule
from training.data.crops import PADDINGS
from training.data.resident import Cut
from training.on_device import OnDevice
from training.train import train

pytestmark = pytest.mark.backend

BACKEND = keras.backend.backend()
CONFIG = Config(
    model=Model("digits_resnet8_preact", dropout=0.2),
    data=Data("digits", augmentation="pad_crop_flip", holdout=0.1),
    schedule=Schedule("steps", drops=(9,), length=12, unit="iterations"),
    batch_size=16,
    steps_per_epoch=6,
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
    network = networks.load(run / "model.keras")
    weights = {each.path: np.array(keras.ops.convert_to_numpy(each)) for each in network.weights}
    return histories.read(run / "history.csv"), weights, run


def test_it_trains_as_from_the_host(tmp_path):
    """The held-out images, the health and the checkpoints are those of any run."""
    history, weights, _ = trained(tmp_path / "host")
    together = 1 if BACKEND == "torch" else 3
    found, others, run = trained(tmp_path / "device", True, together)
    for name in ("iteration", "loss", "accuracy", "val_loss", "learning_rate"):
        np.testing.assert_allclose(found[name], history[name], rtol=1e-4)
    assert weights.keys() == others.keys()
    for path, value in weights.items():
        np.testing.assert_allclose(others[path], value, rtol=1e-3, atol=1e-4)
    steps = histories.read_table(run / "first_losses.csv")["step"]
    assert steps.tolist() == list(range(together, 13, together))
    health = histories.read_table(run / "health.csv")
    assert health["step"].tolist() == [3, 6, 9, 12]
    assert np.isfinite(health["gradient_norm"]).all()
    assert max(path.stat().st_size for path in (run / "checkpoints").iterdir()) < 2**21


@pytest.mark.parametrize(
    "change", [{"rand_augment": (1, 5)}, {"mixup": 0.2}, {"name": "fake", "size": 8}]
)
def test_what_does_not_stay_on_the_device(change, tmp_path):
    data = dataclasses.replace(CONFIG.data, on_device=True, **change)
    config = dataclasses.replace(CONFIG, output=tmp_path / "run", data=data)
    with pytest.raises(UserError, match=r"--data\.on-device is for images in memory"):
        train(config, "digits")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(BACKEND != "jax", reason="only JAX has a loop over steps of its own")
def test_steps_together_lower_for_a_gpu(monkeypatch):
    """The whole loop is one program that does not call the host and convolves in
    bfloat16.
    """
    import jax

    images = np.zeros((4, 8, 8, 1), "uint8")
    data = pictures.in_memory(images, np.zeros(4, "int64"))
    network = kp.models.resnet_cifar(
        26,
        width_factor=0.25,
        arrangement="full_preactivation",
        stacked=True,
        input_shape=(8, 8, 1),
        dtype="mixed_bfloat16",
        data_format="channels_last",
        mean=0.0,
        std=1.0,
    )
    model = OnDevice(network, Cut(PADDINGS["mean"](images, data.preprocessing.mean)))
    model.compile(kp.optimizers.CoupledSGD(0.1), kp.losses.SparseCategoricalCrossentropy())
    codes, labels = np.zeros(4, "int32"), np.zeros(4, "int64")
    model.train_on_batch(codes, labels)
    state = tuple(
        [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    # what convolutions in a loop are made of depends on it
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    traced = jax.jit(model.loop).trace(state, [(codes, labels)] * 3)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # the steps; forward and backward through each stage
    assert text.count("stablehlo.while") == 1 + 2 * 3
    convolutions = re.findall(r"stablehlo\.convolution.* : (.*)", text)
    # forward, backward to images except the pixels, and to weights: of the stem, of each stage's
    # first unit and of its others
    assert len(convolutions) == 3 * (1 + 3 * 2 * 2) - 1
    assert all(re.findall(r"x([a-z]+\d+)>", types) == ["bf16"] * 3 for types in convolutions)
    assert "custom_call" not in text
