"""Draw Eq. 4 and 5 by depth: what the identity shortcuts carry and let through."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_preact.analysis.figures import style
from keras_preact.analysis.figures.propagation import DEPTH, UNIT
from keras_preact.analysis.identities import CompositeGain, DirectPath, IdentityCheck


def gradient_split(check: IdentityCheck) -> Any:
    """Draw the parts of dE/dx_l through shortcuts and through branches (above), and the
    errors of Eq. 4 and 5 (below).

    Args:
        check: What `kp.analysis.check_identities` returned. Units that change the shape
            are gaps.

    Returns:
        A `matplotlib.figure.Figure`.

    Example:

    >>> import numpy as np
    >>> from keras_preact.analysis import figures
    >>> from keras_preact.analysis.identities import IdentityCheck
    >>> parts = np.array([[1e-7, 1e-7], [1.0, 1.0], [0.5, 0.2], [1e-7, 1e-7]])
    >>> check = IdentityCheck(("unit1", "unit2"), np.array([1, 1]), *parts)
    >>> [len(axes.lines) for axes in figures.gradient_split(check).axes]
    [2, 2]

    Source: Eq. 4 and 5 of arXiv 1603.05027.
    """
    parts = {"through shortcuts": check.direct_norm, "through branches": check.residual_norm}
    errors = {"Eq. 4 (forward)": check.forward_error, "Eq. 5 (backward)": check.gradient_error}
    forward, backward = map(_most, errors.values())
    panels = [
        style.Panel(
            "Gradient through the shortcuts and through the branches", "Norm", parts, check.units
        ),
        style.Panel(
            f"Eq. 4 is off by {forward}, Eq. 5 by {backward} at most",
            "Relative error",
            errors,
            check.units,
        ),
    ]
    # A unit between two units that change the shape is a single point.
    figure = style.depth_figure(panels, UNIT, 9.0, 5.4, marker="o", markersize=3.5)
    every = np.concatenate(list(errors.values()))
    if (positive := every[every > 0]).size:
        # errors are rounding errors, or of the order of 1: an axis up to 1 shows which
        figure.axes[1].set_ylim(positive.min() / 3, max(1.0, positive.max()))
        style.logarithmic(figure.axes[1])
    return figure


def direct_paths(paths: Mapping[str, DirectPath]) -> Any:
    """Draw the share of a gradient's norm (above) and of its entries (below) that
    returns through the shortcuts alone.

    Args:
        paths: Label to what `kp.analysis.direct_path` returned.

    Raises:
        ValueError: for no network.

    Source: Sec. 3 of arXiv 1603.05027.
    """
    style.need(paths)
    panels = []
    for field, what, label in (
        ("gain", "of the gradient's norm returns through the shortcuts", "Norm / norm at $x_E$"),
        ("survival", "of its entries return", "Share of the entries (%)"),
    ):
        series = {name: getattr(path, field) for name, path in paths.items()}
        values = np.concatenate(list(series.values()))
        measured = values[~np.isnan(values)]
        title = "No gradient to measure"
        if measured.size:
            title = f"At least {100 * measured.min():.3g} % {what}"
        panels.append(style.Panel(title, label, series, percent=field == "survival"))
    figure = style.depth_figure(panels, DEPTH, height=5.4)
    for axes in figure.axes:
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
    return figure


def composite_gains(gains: Mapping[str, CompositeGain]) -> Any:
    """Draw by unit how much the product of all shortcuts up to the end of a stage can
    enlarge a signal (solid) and a gradient (dashed), one colour per network.

    Args:
        gains: Label to what `kp.analysis.composite_gain` returned. Units that change the
            shape are gaps.

    Returns:
        A `matplotlib.figure.Figure`. The axis is logarithmic, with a line at 1, the gain
        of identities. It hides a gain of 0.

    Raises:
        ValueError: for no network.

    Example:

    >>> import numpy as np
    >>> from keras_preact.analysis import figures
    >>> from keras_preact.analysis.identities import CompositeGain
    >>> ends = np.array([1, 1])
    >>> gain = CompositeGain(("unit1", "unit2"), ends, np.array([4.0, 2.0]), np.array([2.0, 1.0]))
    >>> axes = figures.composite_gains({"two units": gain}).axes[0]
    >>> [line.get_ydata().tolist() for line in axes.lines[1:3]]
    [[4.0, 2.0], [2.0, 1.0]]

    Source: Sec. 3.1 and Fig. 3 of arXiv 2512.24880.
    """
    style.need(gains)
    kinds = {"signals": ("forward", "-"), "gradients": ("backward", "--")}
    found = {
        kind: np.concatenate([getattr(gain, field) for gain in gains.values()])
        for kind, (field, _) in kinds.items()
    }
    found = {kind: values[~np.isnan(values)] for kind, values in found.items()}
    ranges = (
        f"{style.spread(row) if row.size else 'none'} for {kind}" for kind, row in found.items()
    )
    title = f"Largest gain from a unit to the end of its stage:\n{', '.join(ranges)}"
    figure = style.new_figure()
    axes = style.styled(figure.subplots(), title, UNIT, "Gain of the shortcuts")
    axes.axhline(1, color=style.EDGE, linewidth=0.8, zorder=1)
    handles = {}
    for kind, (field, dashes) in kinds.items():
        for i, (name, gain) in enumerate(gains.items()):
            values = getattr(gain, field)
            look = {"color": style.colour(i), "linestyle": dashes, "marker": "o", "markersize": 3}
            style.lines(axes, {f"{name}, {kind}": (np.arange(len(values)), values)}, **look)
            handles[name] = style.sample({"color": style.colour(i), "linewidth": 2.5})
    for kind, (_, dashes) in kinds.items():
        handles[kind] = style.sample({"color": style.GREY, "linestyle": dashes})
    ends = np.concatenate([[1.0], *(values[values > 0] for values in found.values())])
    room = 1.1 * (ends.max() / ends.min()) ** 0.06
    axes.set_ylim(ends.min() / room, ends.max() * room)
    style.logarithmic(axes)
    units, *others = (gain.units for gain in gains.values())
    style.stages(axes, units if all(other == units for other in others) else ())
    style.by_depth(axes)
    style.legend(figure, handles)
    return figure


def _most(errors: np.ndarray) -> str:
    measured = errors[~np.isnan(errors)]
    return f"{measured.max():.1e}" if measured.size else "nothing"
