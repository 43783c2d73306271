"""What a dry run says: closed forms and published counts, XLA's own, and plots and
times from functions that are known.
"""

import itertools
import math
import re

import keras
import numpy as np
import pytest

import keras_preact as kp
from training import networks
from training.estimates import Clock, Costs, Timing, costs, describe_run, memory, schedule_plot
from training.recipes import RECIPES

pytestmark = pytest.mark.backend


def cifar_products(n: int) -> int:
    """Of ResNet-(6n+2) with option A, by hand: a 3x3 convolution at each pixel, three
    stages of 2n, the classifier.
    """
    stem = 32 * 32 * 9 * 3 * 16
    stages = sum(
        side**2 * 9 * (into + (2 * n - 1) * out) * out
        for side, into, out in ((32, 16, 16), (16, 16, 32), (8, 32, 64))
    )
    return stem + stages + 64 * 10


@pytest.mark.parametrize(
    ("depth", "stacked", "millions"),
    # the counts that are commonly given of them
    [(20, False, 40.6), (20, True, 40.6), (110, True, 252.9)],
)
def test_cifar_networks_in_closed_form(depth, stacked, millions):
    counted = costs(kp.models.resnet_cifar(depth, stacked=stacked))
    assert counted.multiply_adds == cifar_products((depth - 2) // 6)
    assert counted.flops == 2 * counted.multiply_adds
    assert counted.multiply_adds / 1e6 == pytest.approx(millions, abs=0.05)
    assert counted.unknown == ()


@pytest.mark.parametrize(
    ("name", "billions"),
    # torchvision's documentation gives 1.81 for its ResNet-18, 4.09 for ResNet-50 and 4.23 for
    # ResNeXt-50 32x4d
    [
        ("imagenet_resnet18_preact", 1.81),
        ("imagenet_resnet50_preact", 4.09),
        ("imagenet_resnext50_32x4d_preact", 4.23),
    ],
)
def test_imagenet_networks(name, billions):
    assert costs(kp.create_model(name)).multiply_adds / 1e9 == pytest.approx(billions, abs=0.006)


def test_layers_one_by_one():
    """Groups, strides, depthwise kernels, dense layers at every position; what is not
    counted is named.
    """
    inputs = keras.Input((8, 6, 4))
    x = keras.layers.Conv2D(6, 3, strides=2, groups=2, padding="same")(inputs)  # 4 x 3
    # 2 x 1, 12 channels
    x = keras.layers.DepthwiseConv2D(3, depth_multiplier=2, padding="valid")(x)
    x = keras.layers.Dense(5)(x)
    x = keras.layers.Conv2DTranspose(3, 2)(x)
    expected = 4 * 3 * 9 * (4 // 2) * 6 + 2 * 1 * 9 * 6 * 2 + 2 * 1 * 12 * 5
    assert costs(keras.Model(inputs, x)) == Costs(
        2 * expected, costs(keras.Model(inputs, x)).kept, ("Conv2DTranspose",)
    )


def test_channels_first_counts_alike():
    first, last = (
        kp.models.resnet_cifar(8, input_shape=shape, data_format=data_format)
        for shape, data_format in (((3, 16, 16), "channels_first"), ((16, 16, 3), "channels_last"))
    )
    assert costs(first).flops == costs(last).flops > 0


def test_attention_in_closed_form():
    tokens, width, layers, classes = 16, 32, 2, 10
    model = kp.models.pre_ln_transformer(
        layers, width=width, num_heads=4, input_shape=(8, 8, 1), patch_size=2, classes=classes
    )
    projections = 4 * tokens * width**2
    scores_and_sums = 2 * tokens**2 * width
    mlp = 2 * tokens * width * 4 * width
    expected = tokens * 4 * width + layers * (projections + scores_and_sums + mlp) + width * classes
    assert costs(model).multiply_adds == expected
    assert costs(model).unknown == ()


def test_size_of_images_must_be_known():
    model = kp.models.resnet_cifar(8, input_shape=(None, None, 3), width_factor=0.25)
    with pytest.raises(ValueError, match=r"one size. Received: a model for \(None, None, 3\)"):
        costs(model)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX tells what XLA counts")
class TestAgainstXLA:
    def of(self, model) -> float:
        import jax

        weights, state = (
            [v.value for v in part]
            for part in (model.trainable_variables, model.non_trainable_variables)
        )
        image = np.zeros((1, *model.input_shape[1:]), "float32")
        forward = jax.jit(lambda *arguments: model.stateless_call(*arguments, training=False)[0])
        return forward.lower(weights, state, image).cost_analysis()["flops"]

    def test_one_by_one_kernels(self):
        """A convolution without zeros at the sides, and dense layers: what both count
        is the same.
        """
        layers = [keras.Input((9, 9, 8)), keras.layers.Conv2D(64, 1, groups=4, use_bias=False)]
        layers += [keras.layers.Flatten(), keras.layers.Dense(32, use_bias=False)]
        model = keras.Sequential(layers)
        assert costs(model).flops == pytest.approx(self.of(model), rel=1e-6)

    @pytest.mark.parametrize("depth", [8, 20])
    def test_residual_networks(self, depth):
        """XLA leaves out the products with zeros that pad an image, and counts sums and
        normalisations.
        """
        model = kp.models.resnet_cifar(depth, stacked=False)

        def share(side: int) -> float:  # of the products of a 3x3 kernel that are not with zeros
            return ((3 * side - 2) / (3 * side)) ** 2

        counted = costs(model).flops
        padded = counted - 2 * sum(
            (1 - share(side)) * of_stage
            for side, of_stage in zip((32, 16, 8), self.of_stages(depth), strict=True)
        )
        assert padded == pytest.approx(self.of(model), rel=0.05)

    def of_stages(self, depth):
        n = (depth - 2) // 6
        first = 32 * 32 * 9 * 3 * 16 + 32**2 * 9 * 16 * 16 * 2 * n
        return (
            first,
            16**2 * 9 * (16 + (2 * n - 1) * 32) * 32,
            8**2 * 9 * (32 + (2 * n - 1) * 64) * 64,
        )


class TestMemory:
    def test_what_is_kept_of_a_plain_unit(self):
        """Of BN-ReLU-conv twice: the inputs of both normalisations and of both
        convolutions, four maps.
        """
        inputs = keras.Input((8, 8, 4))
        unit = kp.ResidualUnit(4)
        assert costs(keras.Model(inputs, unit(inputs))).kept == 4 * (8 * 8 * 4) * 4

    @pytest.mark.parametrize(
        ("dtype", "size"), [("float32", 4), ("mixed_bfloat16", 2), ("mixed_float16", 2)]
    )
    def test_dtype(self, dtype, size):
        inputs = keras.Input((8, 8, 4), dtype="float16" if size == 2 else "float32")
        assert (
            costs(keras.Model(inputs, kp.ResidualUnit(4, dtype=dtype)(inputs))).kept
            == 4 * (8 * 8 * 4) * size
        )

    @pytest.mark.parametrize(
        ("remat", "maps"),
        [(False, 4 * 10), (1, 10 + 4), (3, 4 + 3 * 4), (True, 10 + 4), (20, 1 + 40)],
    )
    def test_stacks_keep_inputs_of_segments_and_the_inside_of_one(self, remat, maps):
        inputs = keras.Input((8, 8, 4))
        stack = kp.UnitStack(kp.ResidualUnit(4), depth=10, remat=remat)
        assert costs(keras.Model(inputs, stack(inputs))).kept == maps * (8 * 8 * 4) * 4

    def test_parts(self):
        """Momentum, average and accumulator are a copy of the weights each."""
        config = RECIPES["cifar10_modern"]()
        model = kp.models.resnet_cifar(8)
        optimizer = kp.optimizers.CoupledSGD(0.1, use_ema=True, gradient_accumulation_steps=2)
        model.compile(optimizer, networks.loss(config))
        trained = 4 * sum(math.prod(variable.shape) for variable in model.trainable_variables)
        moving = 4 * sum(math.prod(variable.shape) for variable in model.non_trainable_weights)
        needed = memory(model, Costs(kept=1000), 7)
        assert needed["weights"] == trained + moving
        assert needed["gradients"] == trained
        assert 3 * trained <= needed["optimizer"] <= 3 * trained + 32  # and the counters
        assert needed["activations"] == 7000


def heights(plot: str) -> list[float]:
    """Read a plot back: the height of each column in rows."""
    rows = [line.split("|")[1] for line in plot.splitlines() if "|" in line]
    columns = itertools.zip_longest(*rows, fillvalue=" ")
    return [sum(" ▁▂▃▄▅▆▇█".index(block) / 8 for block in column) for column in columns]


class TestPlot:
    @pytest.mark.parametrize(
        ("rate", "iterations"),
        [
            (
                lambda step: (
                    0.01
                    if step < 400
                    else 0.1 * 0.1 ** sum(step >= drop for drop in (32_000, 48_000))
                ),
                64_000,
            ),
            (lambda step: 0.05 * (1 + math.cos(math.pi * step / 78_200)), 78_200),
            (lambda step: 3e-4 * step / 50, 50),
        ],
    )
    def test_every_column_is_the_rate(self, rate, iterations):
        plot = schedule_plot(rate, iterations)
        lines = plot.splitlines()
        assert max(map(len, lines)) <= 100
        assert len(lines) <= 12
        assert lines[-1].split() == ["0", f"{iterations:,}", "updates"]
        columns = lines[-2].count("-")
        assert columns in (iterations, 72)
        drawn = heights(plot)
        assert len(drawn) == columns
        shown = [rate(column * (iterations - 1) // (columns - 1)) for column in range(columns)]
        assert float(lines[0].split("|")[0]) == pytest.approx(max(shown), rel=0.005)
        for height, value in zip(drawn, shown, strict=True):
            nearest = value / max(shown) * 8
            assert height == pytest.approx(nearest, abs=0.0626) or (height == 0.125 and nearest > 0)
            assert (height > 0) == (value > 0)

    def test_axis(self):
        lines = schedule_plot(lambda step: 0.02 * step, 6).splitlines()
        assert lines[0] == " 0.1 |     █"
        assert lines[4].startswith("0.05 |")
        assert lines[8] == "   0 +------"
        assert heights("\n".join(lines)) == pytest.approx([0, 1.625, 3.25, 4.75, 6.375, 8])

    @pytest.mark.parametrize("iterations", [1, 2])
    @pytest.mark.parametrize("value", [0.0, 0.1])
    def test_short_and_flat(self, iterations, value):
        drawn = heights(schedule_plot(lambda step: value, iterations))
        assert drawn == ([8.0] * iterations if value else [])


class TestTime:
    def test_median_after_the_first(self):
        times = iter((100.0, 109.0, 111.0, 111.5, 112.5))
        clock = Clock(lambda: next(times))
        clock.on_train_begin()
        for batch in range(4):
            clock.on_train_batch_end(batch, {"loss": 1.0})
        assert clock.timing == Timing(first=9.0, step=1.0)
        assert clock.timing.compiling == 8.0

    def test_first_that_was_faster(self):
        assert Timing(first=0.5, step=1.0).compiling == 0.0


class TestPage:
    @pytest.fixture
    def model(self):
        model = kp.create_model("digits_resnet8_preact", dtype="mixed_bfloat16", stacked=True)
        model.compile(kp.optimizers.CoupledSGD(0.1), kp.losses.SparseCategoricalCrossentropy())
        return model

    def page(self, model, **changes) -> str:
        arguments = {
            "batch_size": 64,
            "iterations": 690,
            "steps_per_epoch": 23,
            "rate": lambda step: 0.1,
        }
        return describe_run(model, data={"Data": "digits, 1,437 images"}, **(arguments | changes))

    def test_what_it_says(self, model):
        trained = sum(math.prod(variable.shape) for variable in model.trainable_variables)
        text = self.page(model, timing=Timing(first=10.5, step=0.5))
        words = " ".join(text.split())
        assert max(map(len, text.splitlines())) <= 100
        assert f"Model {model.name}, 3 units, mixed_bfloat16 " in words
        assert f"Parameters {trained:,} trained, " in words
        assert (
            "Data digits, 1,437 images Updates 690 with 64 images each: 30 epochs of 23 updates "
            in words
        )
        assert f"{costs(model).flops / 1e6:.3g} M per image in the forward pass (" in words
        # 690 half seconds
        assert (
            "Time about 5 min 45 s (0.5 s per update, 128 images/s), and 10 s to compile; measured"
            in words
        )
        parts = re.search(
            r"weights (.*?), gradients (.*?), optimizer (.*?), activations (.*?) \(", words
        )
        assert parts
        assert text.endswith(schedule_plot(lambda step: 0.1, 690))
        assert "; without" not in text.replace("s, without", "")

    def test_parts_and_executions(self, model):
        """An execution of 8 steps of which 4 make an update is two updates."""
        text = self.page(
            model, parts=4, devices=2, timing=Timing(first=3.0, step=1.0), updates_timed=2
        )
        words = " ".join(text.split())
        assert "0.5 s per update, 128 images/s" in words
        assert "690 with 64 images each in 4 parts on 2 devices: 30 epochs" in words
        assert "(8 images)" in words
