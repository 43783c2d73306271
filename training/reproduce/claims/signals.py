"""Claims about signals and gradients in networks before training: Eq. 4 to 8."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import depth
from ..profiles import ARGUMENTS, NETWORKS, Name, first_images
from .finding import Finding, Unmeasured, conditional, decided

if TYPE_CHECKING:
    from keras_preact.analysis import DirectPath, IdentityCheck, Propagation
    from keras_preact.models import ResidualNetwork

#: Rounding errors of float32 in Eq. 4 and 5 are smaller, other errors are larger.
ROUNDING = 1e-4
#: Norms have "similar sizes" up to this factor.
SIMILAR = 10.0
#: The condition under which signals and gradients keep their size.
SCALED = "the last weight of each branch is scaled by 1 / sqrt(units) (`DepthScaledHe`)"
#: The networks that do not meet it, and that meet it.
BOTH: tuple[Name, Name] = ("preact", "preact_scaled")


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the first 32 digits, as a network reads them, and their labels."""
    images, labels, _ = first_images("digits", 32)
    return images, labels


def network(depth: int = 110, *, seed: int = 0, **arguments: Any) -> "ResidualNetwork":
    """Return a network with a quarter of the channels for 8 x 8 digits."""
    import keras

    import keras_preact as kp

    keras.utils.set_random_seed(seed)
    model: ResidualNetwork = kp.models.resnet_cifar(
        depth, **dict(ARGUMENTS) | {"block": "basic"} | arguments
    )
    return model


@functools.cache
def _identities(arrangement: str, shortcut: str = "identity") -> "IdentityCheck":
    import keras_preact as kp

    model = network(arrangement=arrangement, shortcut=shortcut)
    return kp.analysis.check_identities(model, *digits(), composite=shortcut != "identity")


@functools.cache
def _direct(arrangement: str) -> "DirectPath":
    import keras_preact as kp

    return kp.analysis.direct_path(network(arrangement=arrangement), *digits())


@functools.cache
def propagation(arrangement: str) -> "Propagation":
    """Return the signals of ResNet-110 on 32 digits."""
    import keras_preact as kp

    return kp.analysis.propagation(network(arrangement=arrangement), *digits())


def forward_sum(arrangement: str) -> Finding:
    """x_L = x_l + sum of F(x_i) (Eq. 4). It holds if both sides differ by rounding errors
    only, in every stage of ResNet-110.
    """
    error = float(np.nanmax(_identities(arrangement).forward_error))
    return decided(
        error < ROUNDING,
        f"ResNet-110, {arrangement}: the sides differ by up to {error:.1g} of the sum.",
        error=error,
    )


def gradient_sum(arrangement: str) -> Finding:
    """The gradient at x_l is the gradient at x_L plus what arrives through the branches
    (Eq. 5). It holds up to rounding errors, in every stage of ResNet-110.
    """
    error = float(np.nanmax(_identities(arrangement).gradient_error))
    return decided(
        error < ROUNDING,
        f"ResNet-110, {arrangement}: the sides differ by up to {error:.1g} of the gradient.",
        error=error,
    )


def scaled_sum() -> Finding:
    """With scaled shortcuts, x_L is the sum of Eq. 6, with powers of lambda. It holds up to
    rounding errors, in every stage of ResNet-110 with lambda = 0.5.
    """
    found = _identities("full_preactivation", "constant_scaling")
    forward, gradient = np.nanmax(found.forward_error), np.nanmax(found.gradient_error)
    return decided(
        max(forward, gradient) < ROUNDING,
        f"ResNet-110, lambda = 0.5: the sides differ by up to {forward:.1g} (signal) and "
        f"{gradient:.1g} (gradient).",
        forward=float(forward),
        gradient=float(gradient),
    )


def lower_bound() -> Finding:
    """A gradient at x_l is never smaller than at x_L. It is false if one unit with an
    identity shortcut makes it smaller.
    """
    import keras_preact as kp

    unit = kp.ResidualUnit(3, block="single", arrangement=kp.Arrangement(), normalization="none")
    unit.build((1, 4, 4, 3))
    kernel = np.zeros((3, 3, 3, 3))
    kernel[1, 1] = -0.9 * np.eye(3)  # F(x) = -0.9 x
    unit.trainable_weights[0].assign(kernel)
    left = kp.analysis.spectrum(unit, np.ones((1, 4, 4, 3), "float32")).values[0]
    ends = _identities("full_preactivation").ends  # -1: the shape changes
    norms = propagation("full_preactivation").gradient_norm
    least = min(float(norms[i] / norms[end + 1]) for i, end in enumerate(ends) if end >= 0)
    return decided(
        bool(left >= 1),
        f"A unit with F(x) = -0.9 x lets {left:.2f} of every gradient through. In ResNet-110 "
        f"before training the bound happens to hold: the smallest ratio is {least:.2f}.",
        through=float(left),
        start=least,
    )


def _measured(folder: Path, network: Name, layers: int) -> dict[str, Any]:
    """Return the finished measurement of a network before training."""
    for record in depth.read(folder):
        if (record["settings"]["network"], record["settings"]["layers"]) == (network, layers):
            return record
    raise Unmeasured(f"{NETWORKS[network].label} of {layers:,} layers: not measured.")


def _ratio(folder: Path, network: Name, layers: int) -> float:
    """Return the norm of the gradient at the first unit over that at the last one."""
    return float(_measured(folder, network, layers)["gradient_ratio"])


def times(ratio: float) -> str:
    """Return a ratio with two digits, without an exponent."""
    return f"{float(f'{ratio:.2g}'):,.0f}" if ratio >= 10 else f"{ratio:.2g}"


def gradients_are_similar(folder: Path, layers: int) -> Finding:
    """All layers receive gradients of a similar size. It holds if the first and the last
    unit differ by a factor of at most 10.
    """
    plain, scaled = (_ratio(folder, each, layers) for each in BOTH)
    return conditional(
        SCALED,
        1 / SIMILAR < scaled < SIMILAR,
        1 / SIMILAR < plain < SIMILAR,
        f"{layers:,} layers before training: the first unit's gradient is {times(plain)} times "
        f"the last one's; with scaled weights {times(scaled)} times.",
        plain=plain,
        scaled=scaled,
    )


def gradients_vanish(folder: Path, network: Name, layers: int) -> Finding:
    """The first layers of a network get much smaller gradients. It holds if the first
    unit's is below a tenth of the last one's.
    """
    ratio = _ratio(folder, network, layers)
    return decided(
        ratio < 1 / SIMILAR,
        f"{layers:,} layers, {NETWORKS[network].label}, before training: the first unit's gradient "
        f"is {times(ratio)} times the last one's.",
        ratio=ratio,
    )


def relu_blocks() -> Finding:
    """ReLUs after the additions block gradients on the shortcut. It holds if fewer entries
    arrive through the shortcuts of the original units than with pre-activation.
    """
    original, preact = (
        float(np.nanmin(_direct(name).survival)) for name in ("original", "full_preactivation")
    )
    return decided(
        original < preact,
        f"ResNet-110 before training: the shortcuts of a stage let {100 * original:.0f} % of the "
        f"entries of a gradient through; with pre-activation {100 * preact:.0f} %.",
        original=original,
        preactivation=preact,
    )


def relu_cuts() -> Finding:
    """Many sums are negative, so that the ReLU after the addition sets them to 0. It holds
    if it is a tenth or more.
    """
    cut = float(np.mean(propagation("original").cut))
    return decided(
        cut >= 0.1,
        f"ResNet-110 before training: {100 * cut:.0f} % of the sums are set to 0.",
        cut=cut,
    )


def not_negative() -> Finding:
    """The output of an original unit is never negative. It holds if the smallest entry of
    all outputs of ResNet-20 is 0 or more.
    """
    import keras

    model = network(20, arrangement="original")
    outputs = keras.Model(model.input, model.unit_outputs)(digits()[0])
    least = min(float(np.min(keras.ops.convert_to_numpy(each))) for each in outputs)
    return decided(least >= 0, f"ResNet-20: the smallest output is {least:g}.", least=least)


def signal_keeps_its_size(folder: Path, layers: int) -> Finding:
    """Identity shortcuts keep the size of signals. It holds if the last unit's output is at
    most twice as large as the first one's.
    """
    plain, scaled = (float(_measured(folder, each, layers)["growth"]) for each in BOTH)
    return conditional(
        SCALED,
        0.5 < scaled < 2,
        0.5 < plain < 2,
        f"{layers:,} layers before training: signals grow by a factor of {plain:.3g}, with "
        f"scaled weights of {scaled:.3g}.",
        plain=plain,
        scaled=scaled,
    )


def weights_get_normalised_input() -> Finding:
    """With pre-activation every weight layer reads normalised input, in the original unit
    not. It holds if the audit says so.
    """
    import keras_preact as kp

    images, labels = digits()
    values = {
        name: kp.analysis.audit(network(arrangement=name), images, labels=labels)[
            "normalised input"
        ]
        for name in ("full_preactivation", "original")
    }
    passed = {name: finding.status == "PASS" for name, finding in values.items()}
    return decided(
        passed["full_preactivation"] and not passed["original"],
        "; ".join(
            f"{name}: {finding.detail.partition('. ')[0].partition(' (')[0]}"
            for name, finding in values.items()
        )
        + ".",
    )
