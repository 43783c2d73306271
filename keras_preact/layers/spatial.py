"""Layers over height and width that pad all sides alike, as Torch does, whatever the
stride.
"""

import keras
from keras import ops

from keras_preact.backend import products


@keras.saving.register_keras_serializable("keras_preact")
class PaddedConv2D(keras.layers.Conv2D):
    """A convolution that pads `(kernel - 1) / 2 * dilation` on every side, whatever the
    stride.

    `padding="same"` pads nothing at the top and left of an even map at stride 2, where
    Torch, and with it the released code, pads one row on each side: weights would not
    carry over, and the map would be sampled off its centre.

    Args:
        filters: Channels out.
        kernel_size: Odd; the kernel is square.
        standardize: Whether to convolve with the standardised kernel: of every filter,
            less its mean and over its standard deviation (weight standardisation, arXiv
            1903.10520). Computed in float32 whatever the policy.
        **kwargs: As in `keras.layers.Conv2D`, without `padding`.

    Input: `(batch, height, width, channels)`, output: `(batch, ceil(height / strides),
        ceil(width / strides), filters)`; with
    `data_format="channels_first"` the channels stand second in both.
    """

    #: What is added to the variance of a filter: that of the published BiT networks (arXiv
    #: 1912.11370).
    EPSILON = 1e-8

    def __init__(self, filters, kernel_size, *, standardize: bool = False, **kwargs):
        kwargs.pop("padding", None)  # a config holds it
        super().__init__(filters, kernel_size, padding="same", **kwargs)
        self.standardize = standardize
        #: Whether to convolve by matrix products, which is faster in a loop that XLA compiles for a
        #: CPU; a stack sets it. The values are the same.
        self.as_products = False
        self.pad = 0
        if self.strides != (1, 1):  # at stride 1 "same" is symmetric, and spares a copy of the map
            self.padding, self.pad = "valid", self.kernel_size[0] // 2

    def build(self, input_shape):
        super().build(input_shape)
        if self.standardize:
            self._kernel._autocast = False  # the mean of a filter in 16 bits would be off

    def convolution_op(self, inputs, kernel, training=None):
        if self.standardize:
            kernel = standardized(ops.convert_to_tensor(kernel), self.EPSILON, inputs.dtype)
        if self._is_one_product(training):
            stride = self.strides[0]
            inputs = inputs if stride == 1 else inputs[:, ::stride, ::stride]
            return products.multiply(inputs, ops.convert_to_tensor(kernel)[0, 0])
        if keras.backend.backend() == "torch":
            return self._on_torch(inputs, kernel)
        if self.strides != (1, 1) or not self.as_products:
            return super().convolution_op(inputs, kernel)
        # JAX 0.10, two cores, gradient of 17 units of each stage of ResNet-164 in a scan, batch 16:
        # 484, 222, 139 ms with products, 2266, 2257, 1755 ms with convolutions; outside a loop
        # those take 592, 276, 183 ms. What is kept for the gradient is the input, not its nine
        # shifts.
        convolve = keras.remat(
            lambda images, kernel: products.convolve(
                images, kernel, self.groups, self.dilation_rate[0]
            )
        )
        kernel = ops.convert_to_tensor(kernel)
        if self.data_format == "channels_last":
            return convolve(inputs, kernel)
        return ops.moveaxis(convolve(ops.moveaxis(inputs, 1, -1), kernel), -1, 1)

    def _is_one_product(self, training) -> bool:
        """Whether to multiply by the matrix of a 1x1 kernel.

        Gradients of all the 1x1 convolutions of ResNet-50 take 1.4 to 1.7 times as long
        as convolutions on JAX, 1.0 to 1.2 (in bfloat16 to 1.5) on TensorFlow, 0.9 to 1.3
        (in bfloat16 2.0 to 2.8) on torch. TensorFlow's graphs for inference keep the
        convolution, which is fused with a bias and a ReLU behind it.
        """
        return (
            self.kernel_size == (1, 1)
            and self.groups == 1
            and self.data_format == "channels_last"
            and (bool(training) or keras.backend.backend() != "tensorflow")
        )

    def _on_torch(self, inputs, kernel):
        """Convolve as torch does it: Keras 3.15 copies every map twice, into torch's
        default layout and back, and a third time to pad it.
        """
        import torch

        last = self.data_format == "channels_last"
        images = inputs.permute(0, 3, 1, 2) if last else inputs
        y = torch.nn.functional.conv2d(
            images,
            ops.convert_to_tensor(kernel).permute(3, 2, 0, 1),
            stride=self.strides,
            padding=self.kernel_size[0] // 2 * self.dilation_rate[0],
            dilation=self.dilation_rate,
            groups=self.groups,
        )
        return y.permute(0, 2, 3, 1) if last else y

    def call(self, inputs, training=None):
        if self.pad and keras.backend.backend() != "torch":  # torch's convolution pads
            inputs = pad_sides(inputs, self.pad, self.data_format)
        outputs = self.convolution_op(inputs, self.kernel, training)
        if self.use_bias:
            # Keras 3.15 on TensorFlow adds a bias of shape (1, n, 1, 1) to the last axis, not the
            # channels, if that is n wide.
            first = self.data_format == "channels_first"
            outputs = outputs + ops.reshape(self.bias, (1, -1, 1, 1) if first else (1, 1, 1, -1))
        return outputs if self.activation is None else self.activation(outputs)

    def compute_output_shape(self, input_shape):
        return strided_shape(input_shape, self.strides[0], self.data_format, self.filters)

    def get_config(self):
        return super().get_config() | {"standardize": self.standardize}


def standardized(kernel, epsilon: float, dtype):
    """Return `kernel`, less the mean of each filter and over its standard deviation, in
    `dtype`.
    """
    centred = kernel - ops.mean(kernel, axis=(0, 1, 2), keepdims=True)
    # not `ops.moments`, which on torch takes the square of the mean from the mean of the squares
    variance = ops.mean(ops.square(centred), axis=(0, 1, 2), keepdims=True)
    return ops.cast(centred * ops.rsqrt(variance + epsilon), dtype)


@keras.saving.register_keras_serializable("keras_preact")
class PaddedMaxPooling2D(keras.layers.MaxPooling2D):
    """Max pooling that pads `(pool_size - 1) / 2` on every side, with minus infinity as
    Torch does.

    Args:
        pool_size, strides: As in `keras.layers.MaxPooling2D`.
        zeros: Whether to pad with zeros, which hide negative values at the edge: the
            TF-slim networks do.
        **kwargs: As in `keras.layers.MaxPooling2D`, without `padding`.

    Input and output: as `PaddedConv2D`, with the channels unchanged.
    """

    def __init__(self, pool_size, strides, *, zeros: bool = False, **kwargs):
        kwargs.pop("padding", None)
        super().__init__(pool_size, strides, padding="valid", **kwargs)
        self.zeros = zeros

    def call(self, inputs):
        value = 0.0 if self.zeros else float("-inf")
        return super().call(pad_sides(inputs, self.pool_size[0] // 2, self.data_format, value))

    def compute_output_shape(self, input_shape):
        return strided_shape(input_shape, self.strides[0], self.data_format)

    def get_config(self):
        return super().get_config() | {"zeros": self.zeros}


@keras.saving.register_keras_serializable("keras_preact")
class WindowPooling2D(keras.Layer):
    """Averages over a square window with fixed weights, at a stride: the map is
    smoothed before it is sampled.

    Args:
        window: Two or three weights along a side: `(1, 1)` is average pooling, `(1, 2,
            1)` a binomial blur.
        strides: Step.
        data_format: `"channels_last"` or `"channels_first"`.

    Pixels beyond the edge are the map's own, so that a constant map stays as it is:
    three mirror the map around its outermost pixels; two, of which none is beyond the
    left, repeat the last: an average there is that of what is left of the map.

    Input and output: as `PaddedConv2D`, with the channels unchanged; a map has at least
    2 pixels a side for a window of 3.
    """

    def __init__(self, window, strides: int = 1, data_format: str | None = None, **kwargs):
        super().__init__(**kwargs)
        self.window = list(window)
        self.strides = strides
        self.data_format = data_format_of(data_format)

    def call(self, x):
        for axis in (1, 2) if self.data_format == "channels_last" else (2, 3):
            x = self._along(x, axis)
        return x

    def _along(self, x, axis: int):
        def part(*limits):
            return x[(*[slice(None)] * axis, slice(*limits))]

        length = len(self.window)
        # put together, as Keras' `pad` does not mirror all axes on torch
        padded = [part(1, 2), x, part(-2, -1)] if length == 3 else [x, part(-1, None)]
        x = ops.concatenate(padded, axis=axis)
        total = 0
        for i, weight in enumerate(self.window):
            total = total + part(i, (i - length + 1) or None, self.strides) * (
                weight / sum(self.window)
            )
        return total

    def compute_output_shape(self, input_shape):
        return strided_shape(input_shape, self.strides, self.data_format)

    def get_config(self):
        return super().get_config() | {
            "window": self.window,
            "strides": self.strides,
            "data_format": self.data_format,
        }


def data_format_of(data_format: str | None) -> str:
    """Return `data_format`, or Keras' setting for None."""
    return keras.config.image_data_format() if data_format is None else data_format


def channel_axis(data_format: str, rank: int) -> int:
    """Return the axis of the channels."""
    return 1 if data_format == "channels_first" and rank == 4 else -1


def pad_sides(images, pad: int, data_format: str, value: float = 0.0):
    """Pad height and width of `(batch, height, width, channels)`, or channels first, on
    both sides.
    """
    sides = [(0, 0), (pad, pad), (pad, pad)]
    sides.insert(1 if data_format == "channels_first" else 3, (0, 0))
    return ops.pad(images, sides, constant_values=value)


def strided_shape(
    shape: tuple, strides: int, data_format: str, channels: int | None = None
) -> tuple:
    """Return the shape behind a step of `strides` (an image's size divided by it,
    rounded up) into `channels`.

    A shape that is not an image's keeps its sizes; without `channels` their number
    stays.
    """
    axis = channel_axis(data_format, len(shape))
    new = list(shape)
    if len(shape) == 4:
        for i in (1, 2) if axis == -1 else (2, 3):
            new[i] = None if new[i] is None else -(-new[i] // strides)
    if channels is not None:
        new[axis] = channels
    return tuple(new)
