"""Draw the activations of every channel by depth as a heat map."""

from typing import Any

import numpy as np

from keras_preact import _optional
from keras_preact.analysis.channels import ChannelProfile
from keras_preact.analysis.figures import style


def channel_heat_map(profile: ChannelProfile, baseline: ChannelProfile | None = None) -> Any:
    """Draw the size of every channel (upwards) at every depth (to the right) as a
    colour, on a logarithmic scale if the sizes span more than a decade.

    Args:
        profile: The sizes.
        baseline: The sizes of another network with the same channels and units. If
            given, the figure shows `profile` minus `baseline`.

    Returns:
        A `matplotlib.figure.Figure`. Channels of 0, infinite ones and cells without a
        channel are white.

    Raises:
        ValueError: for a baseline with other channels or another number of units.

    Example:

    >>> import numpy as np
    >>> from keras_preact.analysis import ChannelProfile, figures
    >>> size = np.array([[1.0, 2.0], [np.nan, 0.5]])
    >>> profile = ChannelProfile(("stage1_unit1", "stage2_unit1"), size)
    >>> figures.channel_heat_map(profile).axes[0].get_ylabel()
    'Channel'
    """
    if baseline is None:
        return _drawn(*_sizes(profile.size), label=r"Mean of $|x_l|$")
    if baseline.size.shape != profile.size.shape:
        raise ValueError(
            "`baseline` must have the channels and units of `profile`. Received: "
            f"{baseline.size.shape} and {profile.size.shape}"
        )
    with np.errstate(invalid="ignore"):  # of infinite sizes
        difference = profile.size - baseline.size
    known = difference[np.isfinite(difference)]
    most = float(np.abs(known).max()) if known.size else 0.0
    larger = 100 * float(np.mean(known > 0)) if known.size else 0.0
    return _drawn(
        np.ma.masked_invalid(difference),
        f"Difference of the sizes: {larger:.3g} % of the channels are larger",
        _colors().Normalize(-(most or 1.0), most or 1.0),
        cmap="RdBu_r",
        label=r"Difference of the means of $|x_l|$",
    )


def _sizes(size: np.ndarray) -> tuple[np.ndarray, str, Any]:
    """Return the cells, the title and the scale of colours of a figure of sizes."""
    measured = size[np.isfinite(size)]
    positive = measured[measured > 0]
    least, most = (positive.min(), positive.max()) if positive.size else (0.0, 1.0)
    is_log = 0 < least < most / style.DECADE
    dead = 100 * float(np.mean(measured == 0)) if measured.size else 0.0
    sizes = style.spread((least, most)) if positive.size else "all 0"
    title = f"Mean size of a channel: {sizes}; {dead:.3g} % are 0"
    scale = _colors().LogNorm(least, most) if is_log else _colors().Normalize(min(least, 0.0), most)
    return np.ma.masked_where(~(np.isfinite(size) & (size > 0)), size), title, scale


def _colors() -> Any:
    return _optional.load("matplotlib.colors")


def _drawn(cells: np.ndarray, title: str, scale: Any, *, label: str, cmap: str = "cividis") -> Any:
    """Draw cells as colours."""
    figure = style.new_figure()
    axes = style.styled(figure.subplots(), title, "Depth $l$", "Channel")
    axes.grid(False)
    rows, columns = cells.shape
    picture = axes.imshow(
        cells,
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        cmap=cmap,
        norm=scale,
        extent=(0.5, columns + 0.5, -0.5, rows - 0.5),
    )
    style.colour_bar(figure, axes, picture, label)
    style.by_depth(axes)
    axes.margins(0)
    return figure
