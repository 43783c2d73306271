"""The text of a dry run: its counts against closed forms and published numbers, and a page
by hand.
"""

from types import SimpleNamespace

import keras
import pytest

import keras_preact as kp
from tests.training.calls import run_train
from training import backends
from training.commands.train import started
from training.config import Config, Data, Model, Optimizer, Schedule
from training.run import estimates


def counted(model: keras.Model) -> int:
    [image] = model.inputs
    return estimates.multiply_adds(model, keras.KerasTensor((1, *image.shape[1:]), image.dtype))


def cifar_products(n: int) -> int:
    """Count the products of ResNet-(6n+2) with option A: a 3x3 convolution, three stages
    of 2n convolutions, and the classifier.
    """
    stem = 32 * 32 * 9 * 3 * 16
    stages = sum(
        side**2 * 9 * (into + (2 * n - 1) * out) * out
        for side, into, out in ((32, 16, 16), (16, 16, 32), (8, 32, 64))
    )
    return stem + stages + 64 * 10


@pytest.mark.parametrize(
    ("depth", "stacked", "millions"),
    # the commonly published counts
    [(20, False, 40.6), (110, True, 252.9)],
)
def test_cifar_networks_in_closed_form(depth, stacked, millions):
    products = counted(kp.models.resnet_cifar(depth, stacked=stacked))
    assert products == cifar_products((depth - 2) // 6)
    assert products / 1e6 == pytest.approx(millions, abs=0.05)


def test_grouped_depthwise_and_dense_layers():
    """The dense layer is applied at every position."""
    inputs = keras.Input((8, 6, 4))
    x = keras.layers.Conv2D(6, 3, strides=2, groups=2, padding="same")(inputs)  # 4 x 3
    # 2 x 1, 12 channels
    x = keras.layers.DepthwiseConv2D(3, depth_multiplier=2, padding="valid")(x)
    products = counted(keras.Model(inputs, keras.layers.Dense(5)(x)))
    assert products == 4 * 3 * 9 * (4 // 2) * 6 + 2 * 1 * 9 * 6 * 2 + 2 * 1 * 12 * 5


def test_attention_in_closed_form():
    tokens, width, layers, classes = 16, 32, 2, 10
    model = kp.models.transformer(
        layers, width=width, num_heads=4, input_shape=(8, 8, 1), patch_size=2, classes=classes
    )
    projections = 4 * tokens * width**2
    scores_and_sums = 2 * tokens**2 * width
    mlp = 2 * tokens * width * 4 * width
    expected = tokens * 4 * width + layers * (projections + scores_and_sums + mlp) + width * classes
    assert counted(model) == expected


def test_a_dry_run_describes_the_run_and_writes_nothing(tmp_path, capsys):
    run_train(tmp_path / "run", "--data.mixup 0.2 --data.rand-augment 2 9 --dry-run")
    output = " ".join(capsys.readouterr().out.split())
    assert "RandAugment, 2 operations of magnitude 9; mixup with alpha 0.2" in output
    assert "Updates 5 with 64 images each" in output
    assert list(tmp_path.iterdir()) == []


def test_page(monkeypatch):
    monkeypatch.setattr(backends, "peak_on_device", lambda: 12_300_000_000)
    config = Config(
        model=Model("digits_resnet8_preact", dtype="mixed_bfloat16", stacked=True),
        data=Data("digits"),
        optimizer=Optimizer(learning_rate=0.1),
        schedule=Schedule("linear", length=30),
        batch_size=64,
        accumulate=4,
        steps_per_execution=8,  # 4 steps make an update
    )
    with started(config, "digits") as run:
        run.distribution = SimpleNamespace(replicas=2)
        text = " ".join(estimates.describe(run, [3.0, 0.8, 1.0, 9.0]).split())
        products = counted(run.network)
    for part in (
        "Model digits_resnet8_preact, 3 units, mixed_bfloat16",
        f"Parameters {run.parameters:,} trained, ",
        f"{2 * products / 1e6:.3g} M per image in the forward pass (",
        "660 with 64 images each in 4 micro-batches on 2 devices: 30 epochs of 22",
        "Memory at most 12.3 GB of a device; ",
        "Learning rate 0.1 at the start, 0.09 at 10 %, 0.075 at 25 %, 0.05 at 50 %, ",
        "at the end; highest 0.1",
        "5 min 30 s (0.5 s per update, 128 images/s), and 2 s to compile",  # 660 half seconds
    ):
        assert part in text, part
