"""Claims of the theory of wide and deep networks at initialisation."""

import functools
from typing import Any

import numpy as np

from .finding import Finding, conditional, decided
from .signals import SCALED, digits, network, times

#: Units per stage of the networks whose Jacobians are decomposed.
UNITS = (3, 9, 18)
#: A condition number is "about 1" below this.
ABOUT_ONE = 10.0


@functools.cache
def _conditions(shortcut: str, initializer: str = "") -> list[float]:
    """Return the condition numbers of the map from the first to the last unit of stage 2 on
    one digit, for networks of 3, 9 and 18 units per stage.
    """
    import keras_preact as kp

    image = digits()[0][:1]
    found = []
    for units in UNITS:
        options: dict[str, Any] = {"kernel_initializer": initializer} if initializer else {}
        model = network(6 * units + 2, shortcut=shortcut, **options)
        start = kp.analysis.between(model, None, units + 1)(image)
        stage = kp.analysis.between(model, units + 1, 2 * units)
        found.append(kp.analysis.spectrum(stage, start).condition_number)
    return found


def _listed(values: list[float]) -> str:
    return ", ".join(times(value) if value < 1e6 else "over 1,000,000" for value in values)


def condition_of_plain() -> Finding:
    """The condition number of the Jacobian of a network without shortcuts grows in
    proportion to the depth. It holds if it grows by a factor of 2 to 18 from 2 to 17 units.
    """
    values = _conditions("none")
    growth = values[-1] / values[0]
    return decided(
        2 <= growth <= 18,
        f"After 2, 8 and 17 units of stage 2, no shortcuts: {_listed(values)}.",
        values=values,
    )


def condition_of_residual() -> Finding:
    """With identity shortcuts the condition number of the Jacobian is about 1, whatever
    the depth. It holds if it is below 10 after 2, 8 and 17 units.
    """
    plain = _conditions("identity")
    scaled = _conditions("identity", "keras_preact>DepthScaledHe")
    return conditional(
        SCALED,
        max(scaled) < ABOUT_ONE,
        max(plain) < ABOUT_ONE,
        f"After 2, 8 and 17 units of stage 2: {_listed(plain)}; with scaled weights "
        f"{_listed(scaled)}.",
        plain=plain,
        scaled=scaled,
    )


def chi_is_one() -> Finding:
    """Identity shortcuts give chi = 1, so that gradients keep their size. It holds if chi
    is 0.95 to 1.05 in each of 50 units.
    """
    import keras_preact as kp

    bare, normalised, scaled = (
        [theory.chi(length) for length in theory.lengths(1.0, 50)[:-1]]
        for theory in (
            kp.analysis.MeanField("relu", 2.0, 0.0, "identity", normalization, 2, factor)
            for normalization, factor in (("none", 1.0), ("batch", 1.0), ("none", 1 / 50))
        )
    )
    return conditional(
        "each branch is multiplied by 1 / sqrt(units)",
        max(scaled) < 1.05,
        max(normalised) < 1.05 or max(bare) < 1.05,
        f"He weights, ReLU, 50 units: chi is {bare[0]:.2f} in each; with batch normalisation "
        f"{normalised[0]:.2f} in the first unit and {normalised[-1]:.2f} in the last; with "
        f"branches of variance 1/50 {scaled[0]:.2f}.",
        bare=bare[0],
        first=normalised[0],
        last=normalised[-1],
        scaled=scaled[0],
    )


def phases(depth: int = 50, width: int = 500) -> Finding:
    """Below chi = 1 gradients vanish, above they explode, at 1 they keep their size. It
    holds if simulated tanh networks agree with the theory's phase.
    """
    import keras_preact as kp

    texts, holds = [], []
    for variance, bias in ((0.5, 0.0), (1.0, 0.0), (2.0, 0.05)):
        theory = kp.analysis.MeanField("tanh", variance, bias)
        ratio = _gradient_ratio(variance, bias, depth, width)
        chi = theory.chi(max(theory.q_star, 1e-12))
        texts.append(f"chi {chi:.2f}: x {ratio:.1e}")
        phase = "ordered" if ratio < 0.1 else "chaotic" if ratio > 10 else "critical"
        holds.append(phase == theory.phase)
    return decided(
        all(holds),
        f"tanh, {width} channels, squared gradient after {depth} layers: {'; '.join(texts)}.",
    )


def _gradient_ratio(variance: float, bias: float, depth: int, width: int) -> float:
    """Return the squared norm of the gradient at the first layer over the last one's."""
    random = np.random.default_rng(0)
    h, layers = random.normal(size=width) * 0.1, []
    for _ in range(depth):
        w = random.normal(size=(width, width)) * np.sqrt(variance / width)
        layers.append((w, 1 - np.tanh(h) ** 2))
        h = w @ np.tanh(h) + random.normal(size=width) * np.sqrt(bias)
    gradient = random.normal(size=width)
    last = np.sum(gradient**2)
    for w, slope in reversed(layers):
        gradient = slope * (w.T @ gradient)
    return float(np.sum(gradient**2) / last)


def correlations(depth: int = 30, width: int = 500) -> Finding:
    """Inputs become alike in the ordered phase only, and chi* is the slope of the
    correlation map at its fixed point. It holds if simulated tanh networks end within 0.05
    of the theory's correlation, and a difference of the map within 1 % of chi*.
    """
    import keras_preact as kp

    texts, holds = [], []
    for variance, bias in ((0.8, 0.1), (4.0, 0.1)):
        theory = kp.analysis.MeanField("tanh", variance, bias)
        end = float(np.mean([_correlation(variance, bias, depth, width, i) for i in range(5)]))
        step = 1e-4
        slope = (
            theory.correlation_map(theory.c_star) - theory.correlation_map(theory.c_star - step)
        ) / step
        texts.append(
            f"{theory.phase}: from 0.5 to {end:.2f}, theory {theory.c_star:.2f}, chi* "
            f"{theory.chi_star:.2f}"
        )
        alike = theory.c_star > 0.99
        holds += [
            abs(end - theory.c_star) < 0.05,
            alike == (theory.phase == "ordered"),
            abs(slope / theory.chi_star - 1) < 0.01,
        ]
    return decided(
        all(holds),
        f"tanh, {width:,} channels, {depth} layers, mean of 5 networks: {'; '.join(texts)}.",
    )


def _correlation(variance: float, bias: float, depth: int, width: int, seed: int) -> float:
    """Return the correlation of two signals that starts at 0.5."""
    random = np.random.default_rng(seed)
    h = random.normal(size=(width, 2)) @ np.array([[1.0, 0.5], [0.0, 0.75**0.5]])
    for _ in range(depth):
        w = random.normal(size=(width, width)) * np.sqrt(variance / width)
        h = w @ np.tanh(h) + random.normal(size=(width, 1)) * np.sqrt(bias)
    a, b = h.T
    return float(a @ b / np.sqrt(a @ a * (b @ b)))


def bound_is_smallest() -> Finding:
    """The product of all sigma_max(W)^2, a factor of norm-based bounds, is smallest for
    singular values of 1. It is false if other weights make it smaller, and the network
    computes the same: batch normalisation undoes a factor on the weight before it.
    """
    from keras import ops

    import keras_preact as kp

    model = network(20)
    images, _ = digits()

    def computed() -> np.ndarray:
        return np.asarray(ops.convert_to_numpy(model(images, training=True)), "float64")

    output, before = computed(), kp.analysis.weight_spectra(model).log_product
    for weight in model.trainable_weights:
        if weight.path.endswith(("stem_conv/kernel", "branch/conv_1/kernel")):
            weight.assign(0.2 * weight)
    after = kp.analysis.weight_spectra(model).log_product
    change = float(np.abs(computed() - output).max() / np.abs(output).max())
    return decided(
        after >= 0 or change > 0.01,
        f"ResNet-20: the logarithm is 0 for singular values of 1, {before:.1f} before training, "
        f"and {after:.1f} if all weights before a normalisation are divided by 5. The outputs "
        f"change by {100 * change:.1g} %.",
        before=before,
        after=after,
        change=change,
    )


def singular_values_are_one() -> Finding:
    """Training with identity shortcuts brings singular values near 1. It holds if the
    median condition number of the kernels of ResNet-20 falls.
    """
    import keras

    import keras_preact as kp

    keras.utils.set_random_seed(0)
    start, trained = (
        kp.analysis.weight_spectra(kp.create_model("cifar_resnet20_preact", weights=weights))
        for weights in (None, "cifar10")
    )
    middle = [float(np.median(each.condition_number)) for each in (start, trained)]
    return decided(
        middle[1] < middle[0],
        f"ResNet-20 on CIFAR-10: the median condition number of a kernel is {middle[0]:.1f} before "
        f"and {middle[1]:.1f} after training; the largest singular value is "
        f"{start.sigma_max.max():.1f} and {trained.sigma_max.max():.1f}.",
        start=middle[0],
        trained=middle[1],
    )


def he_keeps_lengths(depth: int = 50, width: int = 500) -> Finding:
    """With He initialisation, signals of a ReLU network keep their size. It holds if the
    mean square after 50 layers is 0.5 to 2 times the first one, the median of 9 networks.
    """
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(9):
        h = random.normal(size=width)
        first = np.mean(h**2)
        for _ in range(depth):
            h = random.normal(size=(width, width)) * np.sqrt(2 / width) @ np.maximum(h, 0)
        ratios.append(float(np.mean(h**2) / first))
    middle = float(np.median(ratios))
    return decided(
        0.5 < middle < 2,
        f"{width:,} channels, {depth} layers: the mean square changes by {middle:.2f}, the median "
        "of 9 networks.",
        ratio=middle,
    )


def saturation(beyond: float = 4.0, below: float = 0.02) -> Finding:
    """The slope of a sigmoid is about 0 for |x| > 4. It holds if it is below 0.02; its
    largest value is 0.25.
    """
    slope = 1 / (1 + np.exp(-beyond)) / (1 + np.exp(beyond))
    return decided(
        bool(slope < below), f"The slope at {beyond:g} is {slope:.4f}, 0.25 at 0.", slope=slope
    )
