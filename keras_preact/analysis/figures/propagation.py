"""Draw signal propagation by depth: gradients, activations, branch and shortcut, values
that are cut off, and dead channels.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_preact.analysis.figures import style
from keras_preact.analysis.propagation import Propagation

DEPTH = "Depth $l$ (0: input of the first unit)"
UNIT = "Unit $l$"


def gradient_norms(signals: Mapping[str, Propagation]) -> Any:
    """Draw `||dE/dx_l||` by depth, one line per network. The axis is logarithmic if the
    norms span more than a decade.

    Args:
        signals: Label to what `kp.analysis.propagation` returned.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: for no network.
        ImportError: without matplotlib.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> from keras_preact.analysis import figures
    >>> images = np.random.default_rng(0).normal(size=(4, 8, 8, 1))
    >>> signals = {}
    >>> for name in ("original", "full_preactivation"):
    ...     net = kp.models.resnet_cifar(8, arrangement=name, input_shape=(8, 8, 1))
    ...     signals[name] = kp.analysis.propagation(net, images, np.arange(4))
    >>> figure = figures.gradient_norms(signals)
    >>> [line.get_label() for line in figure.axes[0].lines][:2]
    ['original', 'full_preactivation']

    Source: Eq. 5 of arXiv 1603.05027.
    """
    style.need(signals)
    ratios = style.spread(network.gradient_ratio for network in signals.values())
    title = f"The gradient at the first unit is {ratios} times that after the last unit"
    series = {label: network.gradient_norm for label, network in signals.items()}
    return _by_depth(
        signals, DEPTH, style.Panel(title, r"Norm of $\partial E/\partial x_l$", series)
    )


def activation_norms(signals: Mapping[str, Propagation]) -> Any:
    """Draw the norms of x_0 ... x_L by depth, one line per network. See
    `gradient_norms`.
    """
    style.need(signals)
    with np.errstate(divide="ignore", invalid="ignore"):  # of a network that died or diverged
        ratios = [network.x_norm[-1] / network.x_norm[0] for network in signals.values()]
    growth = style.spread(ratios)
    title = f"The signal after the last unit is {growth} times that before the first unit"
    series = {label: network.x_norm for label, network in signals.items()}
    return _by_depth(signals, DEPTH, style.Panel(title, "Norm of $x_l$", series))


def residual_ratio(signals: Mapping[str, Propagation]) -> Any:
    """Draw the norm of what each branch adds over the norm of what its shortcut adds.
    See `gradient_norms`.

    A plain network has no shortcut. Its ratio is infinite and not drawn.
    """
    style.need(signals)
    series = {
        label: np.where(np.isfinite(network.ratio), network.ratio, np.nan)
        for label, network in signals.items()
    }
    ratios = np.concatenate(list(series.values()))
    finite = ratios[~np.isnan(ratios)]
    median = np.median(finite) if finite.size else np.inf
    title = f"A branch adds {median:.3g} times what its shortcut carries (median)"
    return _by_depth(
        signals, UNIT, style.Panel(title, "Norm of the branch / of the shortcut", series)
    )


def alignment(signals: Mapping[str, Propagation]) -> Any:
    """Draw by unit the cosine between what the shortcut and what the branch add (above),
    and between what the shortcut adds and the output (below). See `gradient_norms`.

    A plain network has no shortcut. Its cosines are not drawn.
    """
    style.need(signals)
    panels = []
    for field, what, label in (
        ("residual_cosine", "Cosine between shortcut and branch", r"$\cos(h(x_l), F(x_l))$"),
        ("output_cosine", "Cosine between shortcut and output", r"$\cos(h(x_l), x_{l+1})$"),
    ):
        series = {name: getattr(network, field) for name, network in signals.items()}
        values = np.concatenate(list(series.values()))
        known = values[~np.isnan(values)]
        title = f"{what}: {style.spread(known) if known.size else 'no shortcuts'}"
        ends = (1.1 * known.min(initial=-0.01), 1.1 * known.max(initial=0.01))
        panels.append(style.Panel(title, label, series, limits=ends))
    return _by_depth(signals, UNIT, *panels, height=5.4)


def weight_gradients(signals: Mapping[str, Propagation]) -> Any:
    """Draw the norms of the gradients of each unit's kernels by depth, one panel per
    network. See `gradient_norms`.

    Raises:
        ValueError: for a network without kernels in its units.
    """
    style.need(signals)
    panels = []
    for label, network in signals.items():
        kernels = {
            name: norms
            for name, norms in network.weight_gradients.items()
            if name.endswith("kernel")
        }
        if not kernels:
            raise ValueError(
                f"No unit of {label!r} has a kernel. Received: "
                f"{', '.join(network.weight_gradients) or 'no weights'}"
            )
        title, axis = f"Gradients of the kernels: {label}", r"Norm of $\partial E/\partial W_l$"
        panels.append(style.Panel(title, axis, kernels, network.units, gaps=False))
    return style.depth_figure(panels, UNIT, 7.0, 1.2 + 2.6 * len(panels), sharey=True)


def truncation(signals: Mapping[str, Propagation]) -> Any:
    """Draw by depth the share of the sums that f sets to 0 (above) and the share of
    dead channels (below). See `gradient_norms`.

    Source: Sec. 4.1 of arXiv 1603.05027: with f = ReLU, "the signal is impacted if it
    is negative".
    """
    style.need(signals)
    panels = []
    for field, what, label in (
        ("cut", "Sums that f sets to 0", "Sums (%)"),
        ("dead", "Dead channels", "Channels (%)"),
    ):
        series = {name: getattr(network, field) for name, network in signals.items()}
        worst = max(float(share.max()) for share in series.values())
        title = f"{what}: at most {100 * worst:.3g} %"
        limits = (0.0, max(0.1, min(1.02, 1.1 * worst)))
        panels.append(style.Panel(title, label, series, percent=True, limits=limits))
    return _by_depth(signals, UNIT, *panels, height=5.4)


def _by_depth(signals, depth: str, *panels: style.Panel, height: float = 4.2) -> Any:
    """Draw panels, and mark the stages if all networks have the same units."""
    units, *others = (network.units for network in signals.values())
    top, *lower = panels
    if all(other == units for other in others):
        top = top._replace(units=units)
    return style.depth_figure([top, *lower], depth, height=height)
