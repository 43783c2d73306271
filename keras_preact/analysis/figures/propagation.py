"""Signal propagation by depth: gradients, activations, what branch and shortcut add,
what is cut off and what is dead.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_preact.analysis.figures import _style
from keras_preact.analysis.propagation import Propagation

DEPTH = "Depth $l$ (0: input of the first unit)"
UNIT = "Unit $l$"


def gradient_norms(signals: Mapping[str, Propagation]) -> Any:
    """Draw `||dE/dx_l||` by depth, a line for each network, on a logarithmic axis where
    they span more than a decade.

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
    >>> nets = {name: kp.models.resnet_cifar(8, arrangement=name, input_shape=(8, 8, 1)) for name in list(kp.ARRANGEMENTS)[:2]}
    >>> signals = {name: kp.analysis.propagation(net, images, np.arange(4)) for name, net in nets.items()}
    >>> figure = figures.gradient_norms(signals)
    >>> [line.get_label() for line in figure.axes[0].lines][:2]
    ['original', 'bn_after_addition']

    Source: Eq. 5 of arXiv 1603.05027.
    """
    ratios = [each.gradient_ratio for each in _checked(signals).values()]
    title = (
        f"The gradient at the first unit is {_style.spread(ratios)} times that after the last unit"
    )
    return _by_depth(signals, "gradient_norm", title, r"Norm of $\partial E/\partial x_l$")


def activation_norms(signals: Mapping[str, Propagation]) -> Any:
    """Draw the norms of x_0 ... x_L by depth, a line for each network. See
    `gradient_norms`.
    """
    growth = [each.x_norm[-1] / each.x_norm[0] for each in _checked(signals).values()]
    title = f"The signal after the last unit is {_style.spread(growth)} times that before the first unit"
    return _by_depth(signals, "x_norm", title, "Norm of $x_l$")


def weight_gradients(signals: Mapping[str, Propagation]) -> Any:
    """Draw the norms of the gradients of each unit's kernels by depth, an axes for each
    network. See `gradient_norms`.

    Raises:
        ValueError: for a network whose units have no kernel.
    """
    count = len(_checked(signals))
    figure = _style.new_figure(7.0, 1.2 + 2.6 * count)
    panels = figure.subplots(count, 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (label, each) in zip(panels, signals.items(), strict=True):
        kernels = {
            name: norms for name, norms in each.weight_gradients.items() if name.endswith("kernel")
        }
        if not kernels:
            raise ValueError(
                f"No unit of {label!r} has a kernel. Received: "
                f"{', '.join(each.weight_gradients) or 'no weights'}"
            )
        _style.styled(
            axes, f"Gradients of the kernels: {label}", UNIT, r"Norm of $\partial E/\partial W_l$"
        )
        there = {
            name: np.flatnonzero(~np.isnan(norms)) for name, norms in kernels.items()
        }  # not every unit has each
        _style.lines(
            axes, {name: (there[name], norms[there[name]]) for name, norms in kernels.items()}
        )
        _style.decades(axes, kernels.values())
        _style.stages(axes, each.units)
        _style.by_depth(axes)
    for axes in panels[:-1]:
        axes.set_xlabel("")
    _style.name_lines(figure, *panels)
    return figure


def residual_ratio(signals: Mapping[str, Propagation]) -> Any:
    """Draw the norm of what each branch adds over that of what its shortcut adds. See
    `gradient_norms`.

    A plain network has no shortcut: its ratio is infinite and not drawn.
    """
    finite = [each.ratio[np.isfinite(each.ratio)] for each in _checked(signals).values()]
    median = float(np.median(np.concatenate(finite))) if any(map(len, finite)) else float("inf")
    title = f"A branch adds {median:.3g} times what its shortcut carries (median)"
    figure = _style.new_figure()
    axes = _style.styled(figure.subplots(), title, UNIT, "Norm of the branch / of the shortcut")
    ratios = {
        label: np.where(np.isfinite(each.ratio), each.ratio, np.nan)
        for label, each in signals.items()
    }
    _style.lines(axes, {label: (np.arange(len(ratio)), ratio) for label, ratio in ratios.items()})
    _style.decades(axes, ratios.values())
    return _finished(figure, [axes], signals)


def truncation(signals: Mapping[str, Propagation]) -> Any:
    """Draw by depth which share of the sums f sets to 0 (above) and which share of the
    channels is dead (below).

    See `gradient_norms`. Source: Sec. 4.1 of arXiv 1603.05027: with f = ReLU, "the
    signal is impacted if it is negative".
    """
    _checked(signals)
    figure = _style.new_figure(7.0, 5.4)
    panels = figure.subplots(2, 1, sharex=True)
    texts = (
        ("cut", "Sums that f sets to 0: at most", "Sums (%)"),
        ("dead", "Dead channels: at most", "Channels (%)"),
    )
    for axes, (field, what, label) in zip(panels, texts, strict=True):
        shares = {name: getattr(each, field) for name, each in signals.items()}
        worst = max(float(share.max()) for share in shares.values())
        _style.styled(axes, f"{what} {100 * worst:.3g} %", UNIT, label)
        _style.lines(axes, {name: (np.arange(len(share)), share) for name, share in shares.items()})
        axes.set_ylim(-0.02, max(0.1, min(1.02, 1.1 * worst)))
        _style.shares(axes.yaxis)
    panels[0].set_xlabel("")
    return _finished(figure, panels, signals)


def _by_depth(signals: Mapping[str, Propagation], field: str, title: str, label: str) -> Any:
    figure = _style.new_figure()
    axes = _style.styled(figure.subplots(), title, DEPTH, label)
    values = {name: getattr(each, field) for name, each in signals.items()}
    _style.lines(axes, {name: (np.arange(len(norms)), norms) for name, norms in values.items()})
    _style.decades(axes, values.values())
    return _finished(figure, [axes], signals)


def _finished(figure, panels: Sequence, signals: Mapping[str, Propagation]) -> Any:
    first, *others = signals.values()
    if all(each.units == first.units for each in others):
        _style.stages(panels[0], first.units)
    for axes in panels:
        _style.by_depth(axes)
    _style.name_lines(figure, *panels)
    return figure


def _checked(signals: Mapping[str, Propagation]) -> Mapping[str, Propagation]:
    if not signals:
        raise ValueError("There must be a network to draw. Received: an empty mapping")
    return signals
