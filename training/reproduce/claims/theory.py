"""Claims of the theory of wide and deep networks at initialisation."""

import functools

import numpy as np

from ..profiles import first_images
from .finding import Finding, conditional, decided
from .signals import network, times

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

    image = first_images("digits", 1)[0]
    found = []
    for units in UNITS:
        options = {"kernel_initializer": initializer} if initializer else {}
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
        "the last weight of each branch is scaled by 1 / sqrt(units) (`DepthScaledHe`)",
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
