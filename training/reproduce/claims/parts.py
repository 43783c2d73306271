"""Claims about single units, shortcuts, initialisers and pieces of code."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .finding import Finding, conditional, decided
from .signals import ROUNDING, digits, network

if TYPE_CHECKING:
    import keras

#: Two numbers are "about" equal up to this share.
ABOUT = 0.05


def power(factor: float, count: int, claimed: float) -> Finding:
    """A factor to a power has this value. It holds up to a factor of 2."""
    value = factor**count
    return decided(
        claimed / 2 < value < claimed * 2, f"{factor:g}^{count} = {value:.2g}.", value=value
    )


def scaled_shortcuts(factor: float, units: int, claimed: float) -> Finding:
    """A signal and a gradient that pass so many shortcuts with this factor are left with
    this share. It holds within 5 %, measured in a stack of units whose branches are 0.
    """
    import keras_preact as kp

    unit = kp.ResidualUnit(
        4,
        shortcut=kp.shortcuts.ConstantScaling(factor, 1.0),
        normalization="none",
        kernel_initializer="zeros",
    )
    values = kp.analysis.spectrum(kp.UnitStack(unit, units), np.ones((1, 3, 3, 4), "float32"))
    share = float(values.values[0])
    return decided(
        abs(share / claimed - 1) < ABOUT,
        f"{units} units with h(x) = {factor:g} x and F = 0: {share:.3g} is left.",
        share=share,
    )


def gate(bias: float, claimed: float) -> Finding:
    """A gate with this bias has this value at the start. It holds within 20 %."""
    value = 1 / (1 + math.exp(-bias))
    return decided(abs(value / claimed - 1) < 0.2, f"sigmoid({bias:g}) = {value:.3g}.", value=value)


def _dropped(units: int, rate: float) -> np.ndarray:
    """Return the gradient of a sum after dropout shortcuts that keep the mean; the branches
    are 0. Each entry is multiplied by its masks, so this is the output for ones.
    """
    import keras

    x = keras.ops.ones((1_000_000,))
    for seed in range(units):
        x = keras.layers.Dropout(rate, seed=seed)(x, training=True)
    return np.asarray(keras.ops.convert_to_numpy(x), "float64")


def dropout_mean(units: int = 10, rate: float = 0.5) -> Finding:
    """The expected gradient after dropout shortcuts shrinks as (1-p)^L. It holds if the
    mean is closer to that than to 1, with the scaling 1 / (1-p) that the claim gives.
    """
    gradient = _dropped(units, rate)
    mean, alive = float(gradient.mean()), float((gradient != 0).mean())
    return conditional(
        "the kept entries are not divided by 1-p, as in the paper",
        abs(alive / (1 - rate) ** units - 1) < 0.2,
        mean < 0.5,
        f"{units} shortcuts, p = {rate:g}, a million entries: the mean of the gradient is "
        f"{mean:.2f}; {alive:.5f} of its entries are left, (1-p)^{units} = "
        f"{(1 - rate) ** units:.5f}.",
        mean=mean,
        alive=alive,
    )


def dropout_variance(units: int = 10, rate: float = 0.5) -> Finding:
    """The variance of a gradient after dropout shortcuts grows as 2^L for p = 0.5. It
    holds within 20 %.
    """
    gradient = _dropped(units, rate)
    variance, expected = float(gradient.var()), 2.0**units
    return decided(
        abs(variance / expected - 1) < 0.2,
        f"{units} shortcuts, p = {rate:g}, a million entries: variance {variance:.0f}; "
        f"2^{units} = {expected:.0f}.",
        variance=variance,
    )


def zero_branch(arrangement: str, inputs: int = 100) -> Finding:
    """A unit whose weights are 0 returns its input. It holds if it does for 100 random
    inputs, up to rounding.
    """
    from keras import ops

    import keras_preact as kp

    unit = kp.ResidualUnit(8, arrangement=arrangement, kernel_initializer="zeros")
    x = np.random.default_rng(0).normal(size=(inputs, 4, 4, 8)).astype("float32")
    y = ops.convert_to_numpy(unit(x, training=True))
    errors = np.linalg.norm((y - x).reshape(inputs, -1), axis=1)
    share = errors / np.linalg.norm(x.reshape(inputs, -1), axis=1)
    return decided(
        bool(share.max() < 1e-6),
        f"{inputs} inputs: on average, y - x has {share.mean():.3g} of the norm of x, standard "
        f"deviation {share.std():.2g}.",
        mean=float(share.mean()),
        std=float(share.std()),
    )


def _chapter_network() -> "keras.Model":
    """Return four units as the chapters write them: the shortcut takes the activated x."""
    import keras

    keras.utils.set_random_seed(0)

    def norm_relu(x: Any) -> Any:
        return keras.layers.ReLU()(keras.layers.BatchNormalization()(x))

    def conv(x: Any) -> Any:
        return keras.layers.Conv2D(16, 3, padding="same", use_bias=False)(x)

    inputs = keras.Input((8, 8, 1))
    x = conv(inputs)
    for _ in range(4):
        out = norm_relu(x)
        x = keras.layers.Add()([conv(norm_relu(conv(out))), out])
    pooled = keras.layers.GlobalAveragePooling2D()(norm_relu(x))
    return keras.Model(inputs, keras.layers.Dense(10)(pooled))


def chapter_code() -> Finding:
    """In the code of the chapters, `identity = out` after `out = relu(bn(x))`, the shortcut
    is a pure identity. It holds if the audit finds an identity path.
    """
    import keras_preact as kp

    images, labels = digits()
    report = kp.analysis.audit(_chapter_network(), images, labels=labels)
    finding = report["identity path"]
    return decided(
        finding.status == "PASS",
        f"The audit says {finding.status}. {finding.detail.partition('. ')[0]}. The arrangement is "
        f"{report.arrangement}.",
    )


def last_norm_is_needed() -> Finding:
    """A pre-activation network needs a last BN-ReLU. It holds if without it the classifier
    reads a sum that grows with the depth.
    """
    import keras

    images, _ = digits()
    sizes = {}
    for name in ("full_preactivation", "full_preactivation_raw_ends"):
        model = network(arrangement=name)
        read = keras.Model(model.input, model.layers[-1].input)(images, training=True)
        sizes[name] = float(np.sqrt(np.mean(keras.ops.convert_to_numpy(read) ** 2)))
    with_norm, without = sizes.values()
    return decided(
        without > 2 * with_norm,
        f"ResNet-110 before training: the classifier reads numbers of the size {without:.2f}, "
        f"with the last BN-ReLU {with_norm:.2f}.",
        **sizes,
    )


def branch_ignores_scale(factor: float = 10.0) -> Finding:
    """The weights of a pre-activation unit need not adapt to the scale of its input. It
    holds if F changes by less than 1 % when x is multiplied by 10.
    """
    import keras
    from keras import ops

    import keras_preact as kp

    keras.utils.set_random_seed(0)
    unit = kp.ResidualUnit(8)
    x = np.random.default_rng(0).normal(size=(16, 4, 4, 8)).astype("float32")
    before, after = (
        ops.convert_to_numpy(unit.trace(each, training=True).residual) for each in (x, factor * x)
    )
    change = float(np.linalg.norm(after - before) / np.linalg.norm(before))
    return decided(
        change < 0.01, f"x times {factor:g}: F(x) changes by {change:.1e} of its norm.",
        change=change,
    )  # fmt: skip


def orthogonal_keeps_norms(width: int = 256) -> Finding:
    """Orthogonal weights keep the norms of signals: ||Wx|| = ||x||. It holds for a layer
    without an activation; a ReLU takes half of the square.
    """
    import keras

    w = keras.ops.convert_to_numpy(keras.initializers.Orthogonal(seed=0)((width, width)))
    x = np.random.default_rng(0).normal(size=(width, 1000))
    linear = np.linalg.norm(w @ x) / np.linalg.norm(x)
    active = np.linalg.norm(np.maximum(w @ x, 0)) / np.linalg.norm(x)
    return conditional(
        "no ReLU follows",
        bool(abs(linear - 1) < 1e-4),
        bool(abs(active - 1) < ABOUT),
        f"{width} channels: Wx has {linear:.4f} of the norm of x; after a ReLU {active:.3f}, which "
        f"makes {active**100:.0e} after 100 layers.",
        linear=float(linear),
        relu=float(active),
    )


def parameters_of_shortcuts() -> Finding:
    """1x1 convolutions on L shortcuts add L d^2 weights. It holds if the convolutions of
    ResNet-110 are exactly its additional weights.
    """
    import keras_preact as kp

    plain, conv = (
        kp.models.resnet_cifar(110, arrangement="original", shortcut=name)
        for name in ("identity", "conv1x1")
    )
    added = conv.count_params() - plain.count_params()
    # channels in and out of the 54 units; the first unit of a stage has another input
    widths = [(16, 16)] * 18 + [(16, 32), *[(32, 32)] * 17, (32, 64), *[(64, 64)] * 17]
    expected = sum(before * after for before, after in widths)
    return decided(
        added == expected,
        f"ResNet-110, 16, 32 and 64 channels: 54 shortcuts have {added:,} weights.",
        added=added,
    )


def transformer_is_a_sum() -> Finding:
    """Pre-norm transformers have the same identity path. It holds if Eq. 4 and 5 hold in
    one, up to rounding.
    """
    import keras

    import keras_preact as kp

    keras.utils.set_random_seed(0)
    model = kp.models.transformer(6, width=32, patch_size=2, input_shape=(8, 8, 1))
    found = kp.analysis.check_identities(model, *digits())
    forward, gradient = np.nanmax(found.forward_error), np.nanmax(found.gradient_error)
    return decided(
        max(forward, gradient) < ROUNDING,
        f"A transformer of 12 units: Eq. 4 holds to {forward:.1g}, Eq. 5 to {gradient:.1g}.",
        forward=float(forward),
        gradient=float(gradient),
    )
