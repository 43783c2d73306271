"""Squeeze-and-excitation: channels scaled by gates that read the whole map."""

import keras
from keras import ops

from keras_preact import _checks, initializers
from keras_preact._objects import in_config
from keras_preact.layers import chains, spatial


@keras.saving.register_keras_serializable("keras_preact")
class SqueezeExcitation(chains.SameShape):
    """Multiplies every channel by a gate: `x * sigmoid(W_2 relu(W_1 mean(x) + b_1) +
    b_2)`.

    Args:
        reduction: Reduction ratio: `W_1` has `channels // reduction` outputs, at least
            one.
        kernel_initializer: Initialiser of both weights; each draws its own values.
        kernel_regularizer: Regulariser of both kernels.
        data_format: `"channels_last"` or `"channels_first"`.

    Input and output: `(batch, height, width, channels)`, or channels first. The weights
    are `reduce` and `expand`, dense layers.

    Example:

    >>> import numpy as np
    >>> from keras_preact.squeeze_excitation import SqueezeExcitation
    >>> layer = SqueezeExcitation(reduction=4)
    >>> tuple(layer(np.ones((2, 5, 5, 16), "float32")).shape), tuple(layer.reduce.kernel.shape)
    ((2, 5, 5, 16), (16, 4))

    Source: arXiv 1709.01507, Sec. 3; at the end of the branch, as in its Fig. 3.
    """

    def __init__(
        self,
        reduction: int = 16,
        *,
        kernel_initializer=None,
        kernel_regularizer=None,
        data_format: str | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        _checks.positive_int(reduction, "reduction")
        self.reduction = _checks.plain(reduction)
        self.kernel_initializer = (
            keras.initializers.get(kernel_initializer) or initializers.released_he()
        )
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.data_format = spatial.data_format_of(data_format)

    def build(self, input_shape):
        channels = input_shape[spatial.channel_axis(self.data_format, len(input_shape))]
        self.reduce = self._dense(max(1, channels // self.reduction), "reduce", "relu")
        self.expand = self._dense(channels, "expand", "sigmoid")
        self.reduce.build((input_shape[0], channels))
        self.expand.build((input_shape[0], self.reduce.units))

    def _dense(self, units: int, name: str, activation: str) -> keras.Layer:
        kernel = initializers.spawn(self.kernel_initializer, name)
        return keras.layers.Dense(
            units,
            activation=activation,
            kernel_initializer=kernel,
            kernel_regularizer=self.kernel_regularizer,
            name=name,
            dtype=self.dtype_policy,
        )

    def call(self, x):
        last = self.data_format == "channels_last"
        gate = self.expand(self.reduce(ops.mean(x, axis=(1, 2) if last else (2, 3))))
        return x * (gate[:, None, None, :] if last else gate[:, :, None, None])

    def get_config(self):
        return super().get_config() | {
            "reduction": self.reduction,
            "kernel_initializer": in_config(self.kernel_initializer),
            "kernel_regularizer": in_config(self.kernel_regularizer),
            "data_format": self.data_format,
        }
