"""Measure the activations of every channel by depth."""

import dataclasses

import keras
import numpy as np
from keras import ops

from keras_preact.analysis import _inputs
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
        x: A batch of inputs, or a list or a dictionary for several inputs.
        training: Whether normalisations use the statistics of the batch, and dropout
            drops.

    Raises:
        ValueError: as `kp.analysis.propagation`.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(8, input_shape=(8, 8, 1))
    >>> profile = kp.analysis.channel_profile(model, np.ones((2, 8, 8, 1)))
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
