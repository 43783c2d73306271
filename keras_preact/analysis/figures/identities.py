"""Draw Eq. 4 and 5 by depth: what the identity shortcuts carry and let through."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_preact.analysis.figures import style
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
        title = f"At least {100 * min(map(np.nanmin, series.values())):.3g} % {what}"
        panels.append(style.Panel(title, label, series, percent=field == "survival"))
    figure = style.depth_figure(panels, DEPTH, height=5.4)
    for axes in figure.axes:
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
    return figure


def _most(errors: np.ndarray) -> str:
    measured = errors[~np.isnan(errors)]
    return f"{measured.max():.1e}" if measured.size else "nothing"
