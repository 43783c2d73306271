"""Draw the activations of every channel by depth as a heat map."""

from typing import Any

import numpy as np

from keras_preact.analysis.channels import ChannelProfile
from keras_preact.analysis.figures import style


def channel_heat_map(profile: ChannelProfile) -> Any:
    """Draw the size of every channel (upwards) at every depth (to the right) as a
    colour, on a logarithmic scale if the sizes span more than a decade.

    Returns:
        A `matplotlib.figure.Figure`. Channels of 0 and cells without a channel are
        white.

    Example:

    >>> import numpy as np
    >>> from keras_preact.analysis import ChannelProfile, figures
    >>> size = np.array([[1.0, 2.0], [np.nan, 0.5]])
    >>> profile = ChannelProfile(("stage1_unit1", "stage2_unit1"), size)
    >>> figures.channel_heat_map(profile).axes[0].get_ylabel()
    'Channel'
    """
    figure = style.new_figure()
    from matplotlib.colors import LogNorm, Normalize

    measured = profile.size[~np.isnan(profile.size)]
    positive = measured[measured > 0]
    least, most = (positive.min(), positive.max()) if positive.size else (0.0, 1.0)
    is_log = 0 < least < most / style.DECADE
    dead = 100 * float(np.mean(measured == 0)) if measured.size else 0.0
    sizes = style.spread((least, most)) if positive.size else "all 0"
    title = f"Mean size of a channel: {sizes}; {dead:.3g} % are 0"
    axes = style.styled(figure.subplots(), title, "Depth $l$", "Channel")
    axes.grid(False)
    rows, columns = profile.size.shape
    picture = axes.imshow(
        np.ma.masked_where(~(profile.size > 0), profile.size),
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        cmap="cividis",
        norm=LogNorm(least, most) if is_log else Normalize(min(least, 0.0), most),
        extent=(0.5, columns + 0.5, -0.5, rows - 0.5),
    )
    style.colour_bar(figure, axes, picture, r"Mean of $|x_l|$")
    style.by_depth(axes)
    axes.margins(0)
    return figure
