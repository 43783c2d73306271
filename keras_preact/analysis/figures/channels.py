"""Measure the activations of every channel by depth, and draw their heat map."""

import dataclasses
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_preact.analysis import _inputs
from keras_preact.analysis.figures import style
from keras_preact.analysis.observed import Observed, other_axes
from keras_preact.units import Trace


@dataclasses.dataclass(frozen=True, eq=False)
class ChannelProfile:
    """Mean sizes of the channels of x_1 ... x_L.

    Attributes:
        units: Names of the units, in order.
        size: Mean of |x| over examples and positions, `(channels, L)`, for the channels
            of the widest x_l; NaN if an x_l lacks a channel.
    """

    units: tuple[str, ...]
    size: np.ndarray


def channel_profile(model: keras.Model, x, *, training: bool = True) -> ChannelProfile:
    """Measure the channels of every x_l on a batch, without changing the network.

    Args:
        model: See `kp.analysis.propagation`.
        x: A batch of inputs, or a list for a model with several inputs.
        training: Whether normalisations use the statistics of the batch, and dropout
            drops.

    Raises:
        ValueError: as `kp.analysis.propagation`.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(8, input_shape=(8, 8, 1))
    >>> profile = channel_profile(model, np.ones((2, 8, 8, 1)))
    >>> profile.size.shape, int(np.isnan(profile.size[:, 0]).sum())  # unit 1 has 16 channels
    ((64, 3), 48)
    """
    observed = Observed(model, x, training=training)
    _inputs.watch(model, x)
    with keras.StatelessScope():
        _, sizes = observed.run(_size)
    columns = [ops.convert_to_numpy(column) for columns in sizes for column in columns]
    size = np.full((max(map(len, columns)), len(columns)), np.nan)
    for i, column in enumerate(columns):
        size[: len(column), i] = column
    return ChannelProfile(observed.names, size)


def _size(trace: Trace, axis: int):
    size = ops.abs(ops.cast(trace.output, "float32"))
    return ops.mean(size, axis=other_axes(size, axis))


def channel_heat_map(profile: ChannelProfile) -> Any:
    """Draw the size of every channel (upwards) at every depth (to the right) as a
    colour, on a logarithmic scale if the sizes span more than a decade.

    Returns:
        A `matplotlib.figure.Figure`. Channels of 0 and cells without a channel are
        white.

    Example:

    >>> import numpy as np
    >>> from keras_preact.analysis import figures
    >>> size = np.array([[1.0, 2.0], [np.nan, 0.5]])
    >>> profile = figures.ChannelProfile(("stage1_unit1", "stage2_unit1"), size)
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
