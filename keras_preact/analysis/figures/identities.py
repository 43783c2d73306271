"""Eq. 4 and 5 by depth: what the identity shortcuts carry, and what they let through."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_preact.analysis.figures import _style
from keras_preact.analysis.figures.propagation import DEPTH, UNIT
from keras_preact.analysis.identities import DirectPath, IdentityCheck


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
    >>> figure = figures.gradient_split(IdentityCheck(("unit1", "unit2"), np.array([1, 1]), *parts))
    >>> [len(axes.lines) for axes in figure.axes]
    [2, 2]

    Source: Eq. 4 and 5 of arXiv 1603.05027.
    """
    panels_of = (
        (
            "Gradient through the shortcuts and through the branches",
            "Norm",
            {
                "through shortcuts": check.direct_norm,
                "through branches": check.residual_norm,
            },
        ),
        (
            f"Eq. 4 is off by {_most(check.forward_error)}, Eq. 5 by "
            f"{_most(check.gradient_error)} at most",
            "Relative error",
            {"Eq. 4 (forward)": check.forward_error, "Eq. 5 (backward)": check.gradient_error},
        ),
    )
    figure = _style.new_figure(9.0, 5.4)
    x = np.arange(len(check.units))
    panels = figure.subplots(2, 1, sharex=True)
    hues = iter(_style.COLOURS)
    for axes, (title, label, series) in zip(panels, panels_of, strict=True):
        _style.styled(axes, title, UNIT, label)
        for name, values in series.items():
            _style.lines(axes, {name: (x, values)}, color=next(hues), marker="o", markersize=3.5)
        _style.decades(axes, series.values())
        _style.stages(axes, check.units)
        _style.by_depth(axes)
    if (check.forward_error > 0).any() or (check.gradient_error > 0).any():
        panels[1].set_yscale("log", nonpositive="mask")  # rounding, or of the size of 1
        _style.plain_numbers(panels[1].yaxis)
    panels[0].set_xlabel("")
    _style.name_lines(figure, *panels)
    return figure


def direct_paths(paths: Mapping[str, DirectPath]) -> Any:
    """Draw which part of a gradient's norm (above) and of its entries (below) comes
    back through the shortcuts alone.

    Args:
        paths: Label to what `kp.analysis.direct_path` returned.

    Raises:
        ValueError: for no network.

    Source: Sec. 3 of arXiv 1603.05027.
    """
    if not paths:
        raise ValueError("There must be a network to draw. Received: an empty mapping")
    figure = _style.new_figure(7.0, 5.4)
    panels = figure.subplots(2, 1, sharex=True)
    for axes, field, what, label in (
        (
            panels[0],
            "gain",
            "of the gradient's norm returns through the shortcuts",
            "Norm / norm at $x_E$",
        ),
        (panels[1], "survival", "of its entries return", "Share of the entries (%)"),
    ):
        values = {name: getattr(path, field) for name, path in paths.items()}
        least = min(float(np.nanmin(each)) for each in values.values())
        _style.styled(axes, f"At least {100 * least:.3g} % {what}", DEPTH, label)
        _style.lines(axes, {name: (np.arange(len(each)), each) for name, each in values.items()})
        _style.decades(axes, values.values())
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
        _style.by_depth(axes)
    _style.shares(panels[1].yaxis)
    panels[0].set_xlabel("")
    _style.name_lines(figure, *panels)
    return figure


def _most(errors: np.ndarray) -> str:
    there = errors[~np.isnan(errors)]
    return f"{there.max():.1e}" if there.size else "nothing"
