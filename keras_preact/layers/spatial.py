"""Convolution and pooling layers that pad all sides equally at any stride, as Torch
does.
"""

import functools
from collections.abc import Callable, Sequence

import keras
from keras import ops

from keras_preact import _checks
from keras_preact.backend import keras_private, products


@keras.saving.register_keras_serializable("keras_preact")
class PaddedConv2D(keras.layers.Conv2D):
    """A convolution that pads `(kernel - 1) / 2 * dilation` on every side at any stride.

    Keras' `padding="same"` pads nothing at the top and left of an even map at stride 2.
    Torch, and so the released code, pads one row on each side. With Keras' padding,
    weights would not carry over, and the map would be sampled off its centre.

    Args:
        filters: Number of output channels.
        kernel_size: Odd number, or a pair of odd numbers.
        standardize: Whether to use weight standardisation (arXiv 1903.10520): subtract
            the mean of each filter and divide by its standard deviation. It is computed
            in float32 under every policy.
        **kwargs: Arguments of `keras.layers.Conv2D`, except `padding`.

    Input: `(batch, height, width, channels)`, output: `(batch, ceil(height / strides),
        ceil(width / strides), filters)`; with
    `data_format="channels_first"` the channels are second in both.
    """

    #: Added to the variance of a filter, as in the published BiT networks (arXiv 1912.11370).
    EPSILON = 1e-8

    def __init__(self, filters, kernel_size, *, standardize: bool = False, **kwargs):
        kwargs.pop("padding", None)  # a config contains it
        super().__init__(filters, kernel_size, padding="same", **kwargs)
        if any(size % 2 == 0 for size in self.kernel_size):
            raise ValueError(
                "`kernel_size` must be odd, because all sides are padded equally: use "
                f"keras.layers.Conv2D for even sizes. Received: kernel_size={kernel_size!r}"
            )
        _check_square(self.strides, "strides")
        _check_square(self.dilation_rate, "dilation_rate")
        self.standardize = standardize
        #: Whether to convolve by matrix products, which is faster in a loop that XLA compiles for a
        #: CPU; a stack sets it. The values are the same.
        self.as_products = False
        self.pad = (0, 0)
        if self.strides != (1, 1):  # at stride 1 "same" is symmetric, and spares a copy of the map
            self.padding = "valid"
            self.pad = (self.kernel_size[0] // 2, self.kernel_size[1] // 2)

    def build(self, input_shape):
        super().build(input_shape)
        if self.standardize:
            keras_private.keep_dtype(
                keras_private.own_kernel(self)
            )  # the mean of a filter would be inaccurate in 16 bits
        if keras.backend.backend() == "torch":
            _lay_filters_first(keras_private.own_kernel(self).value)

    def convolution_op(self, inputs, kernel, training=None):
        if self.standardize:
            kernel = standardized(ops.convert_to_tensor(kernel), self.EPSILON, inputs.dtype)
        if self._is_one_product(training):
            inputs = sampled(inputs, self.strides[0], "channels_last")
            return products.multiply(inputs, ops.reshape(kernel, kernel.shape[2:]))
        strides = self.strides[0]
        if self.kernel_size == (1, 1) and kernel.shape[2] < 16:
            # With strides over few channels (seen with fewer than 8), the gradient of oneDNN, in
            # TensorFlow 2.21 and torch 2.13, writes beyond its arrays on a CPU with AVX2. It is
            # jit_avx2_1x1_convolution_bwd_weights_t, and some processes crash.
            inputs, strides = sampled(inputs, strides, self.data_format), 1
        if keras.backend.backend() == "torch":
            return self._on_torch(inputs, kernel, strides)
        if self.strides != (1, 1) or not self.as_products:
            return ops.conv(
                inputs, kernel, strides, self.padding, self.data_format, self.dilation_rate
            )
        # JAX 0.10, two cores, gradient of 17 units of each stage of ResNet-164 in a scan, batch 16:
        # 484, 222, 139 ms with products, 2266, 2257, 1755 ms with convolutions; outside a loop
        # convolutions take 592, 276, 183 ms. With remat, the gradient keeps the input instead of
        # its nine shifts.
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
        """Whether to compute a 1x1 convolution as one matrix product.

        The gradients of all 1x1 convolutions of ResNet-50 take longer with convolutions
        than with products: 1.4 to 1.7 times as long on JAX, 1.0 to 1.2 times (in
        bfloat16 up to 1.5) on TensorFlow. TensorFlow's graphs for inference keep the
        convolution, which is fused with the bias and the ReLU that follow it. On Torch
        the convolution is faster.
        """
        backend = keras.backend.backend()
        return (
            self.kernel_size == (1, 1)
            and self.groups == 1
            and self.data_format == "channels_last"
            and (backend == "jax" or (backend == "tensorflow" and bool(training)))
        )

    def _on_torch(self, inputs, kernel, strides: int):
        """Convolve and add the bias with torch's own function. Keras 3.15 copies every map twice,
        into torch's default layout and back, and a third time to pad it.
        """
        import torch

        convolve = functools.partial(
            torch.nn.functional.conv2d,
            weight=ops.convert_to_tensor(kernel, inputs.dtype).permute(3, 2, 0, 1),
            bias=ops.convert_to_tensor(self.bias, inputs.dtype) if self.use_bias else None,
            stride=strides,
            padding=[size // 2 * self.dilation_rate[0] for size in self.kernel_size],
            dilation=self.dilation_rate,
            groups=self.groups,
        )
        return _with_channels_first(convolve, inputs, self.data_format)

    def call(self, inputs, training=None):
        if any(self.pad) and keras.backend.backend() != "torch":  # torch's convolution pads
            inputs = pad_sides(inputs, self.pad, self.data_format)
        outputs = self.convolution_op(inputs, self.kernel, training)
        if self.groups > 1 and keras.backend.backend() == "tensorflow" and not training:
            # Without oneDNN, TensorFlow 2.21's fused kernel for a convolution and the normalisation
            # or ReLU after it does not support groups. This identity prevents the fusion.
            import tensorflow as tf

            outputs = tf.ensure_shape(outputs, outputs.shape)
        if self.use_bias and keras.backend.backend() != "torch":
            # `ops.add` lets TensorFlow fuse convolution and bias. But Keras 3.15 adds a bias of
            # shape (1, n, 1, 1) to the last axis instead of the channels if that has size n.
            first = self.data_format == "channels_first"
            bias = ops.reshape(self.bias, (1, -1, 1, 1) if first else (1, 1, 1, -1))
            outputs = outputs + bias if first else ops.add(outputs, bias)
        return outputs if self.activation is None else self.activation(outputs)

    def compute_output_shape(self, input_shape):
        return strided_shape(input_shape, self.strides[0], self.data_format, self.filters)

    def get_config(self):
        return super().get_config() | {"standardize": self.standardize}


def _lay_filters_first(kernel) -> None:
    """Store a torch kernel in the memory order of torch's convolution: the filters first
    and the channels last. The shape does not change.

    Otherwise every convolution copies its kernel element by element, forward and
    backward: inference of ResNet-50 at batch 1 takes a third longer, training 3 to 15 %.
    """
    kernel.data = kernel.data.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


def standardized(kernel, epsilon: float, dtype):
    """Subtract the mean of each filter, divide by its standard deviation, and return the
    kernel in `dtype`.
    """
    centred = kernel - ops.mean(kernel, axis=(0, 1, 2), keepdims=True)
    # not `ops.moments`, which on torch subtracts the squared mean from the mean of the squares
    variance = ops.mean(ops.square(centred), axis=(0, 1, 2), keepdims=True)
    return ops.cast(centred * ops.rsqrt(variance + epsilon), dtype)


@keras.saving.register_keras_serializable("keras_preact")
class PaddedMaxPooling2D(keras.layers.MaxPooling2D):
    """Max pooling that pads `(pool_size - 1) / 2` on every side, with minus infinity as
    Torch does. With a `pool_size` of 2 it pads only the bottom and right, as much as the
    last window needs.

    Args:
        pool_size, strides: Arguments of `keras.layers.MaxPooling2D`; the size is 2 or
            odd.
        zeros: Whether to pad with zeros, as the TF-slim networks do; zeros hide
            negative values at the edge. For an odd `pool_size`.
        **kwargs: Arguments of `keras.layers.MaxPooling2D`, except `padding`.

    Input and output: as `PaddedConv2D`, with the channels unchanged.
    """

    def __init__(self, pool_size, strides, *, zeros: bool = False, **kwargs):
        kwargs.pop("padding", None)
        super().__init__(pool_size, strides, **kwargs)
        _check_square(self.pool_size, "pool_size")
        _check_square(self.strides, "strides")
        if self.pool_size[0] % 2 == 0 and (zeros or self.pool_size[0] != 2):
            allowed = "odd with zeros=True" if zeros else "2 or odd"
            raise ValueError(f"`pool_size` must be {allowed}. Received: pool_size={pool_size!r}")
        self.zeros = zeros
        # "same" at size 3 and stride 2 would pad an even map only at the bottom and right
        self.padding = "same" if self.pool_size[0] == 2 else "valid"
        self.pad: int = 0 if self.padding == "same" else self.pool_size[0] // 2

    def call(self, inputs):
        value = 0.0 if self.zeros else float("-inf")
        pads = (self.pad, self.pad)
        padded = pad_sides(inputs, pads, self.data_format, value) if self.pad else inputs
        backend, last = keras.backend.backend(), self.data_format == "channels_last"
        if backend == "torch" and not isinstance(padded, keras.KerasTensor):
            return self._on_torch(padded)
        pools_pairs = self.pool_size == self.strides == (2, 2) and last
        if backend == "jax" and pools_pairs and padded.shape[1] % 2 == padded.shape[2] % 2 == 0:
            return _maximum_of_pairs(padded)
        return super().call(padded)

    def _on_torch(self, padded):
        """Pool with torch's own function. Keras 3.15 copies the map into torch's default
        layout and takes seven times as long.
        """
        from torch.nn import functional

        def pool(images):
            if self.padding == "same":
                images = _whole_pairs(images, self.strides[0])
            return functional.max_pool2d(images, self.pool_size, self.strides)

        return _with_channels_first(pool, padded, self.data_format)

    def compute_output_shape(self, input_shape):
        return strided_shape(input_shape, self.strides[0], self.data_format)

    def get_config(self):
        return super().get_config() | {"zeros": self.zeros}


def _maximum_of_pairs(x):
    """Return the maximum of every 2 x 2 pixels. Equal pixels share the gradient.

    On JAX this takes, with the gradient, a third to a seventh of the time of JAX's
    window reduction.
    """
    height, width, channels = x.shape[1:]
    rows = ops.reshape(x, (-1, height // 2, 2, width // 2, 2 * channels))
    x = ops.maximum(rows[:, :, 0], rows[:, :, 1])
    return ops.maximum(x[..., :channels], x[..., channels:])


@keras.saving.register_keras_serializable("keras_preact")
class BinomialPooling2D(keras.Layer):
    """Averages over square windows with binomial weights, at a stride. This smooths the
    map before it is sampled.

    Args:
        size: Pixels along a side of the window. 2 is average pooling, with the weights
            (1, 1) / 2; 3 is a blur with (1, 2, 1) / 4.
        strides: Stride of the windows.
        data_format: `"channels_last"` or `"channels_first"`.
        dilation: Distance between the pixels of a window, for a size of 2 and strides
            of 1.

    A constant map stays as it is: at the edge a window of 2 averages the pixels that it
    has, and a window of 3 mirrors the map around its outermost pixels, so a map needs at
    least 2 pixels per side.

    Input and output: as `PaddedConv2D`, with the channels unchanged.
    """

    def __init__(
        self, size: int, strides: int, data_format: str | None = None, dilation: int = 1, **kwargs
    ):
        super().__init__(**kwargs)
        _checks.one_of(size, (2, 3), "size")
        _checks.positive_int(strides, "strides")
        _checks.positive_int(dilation, "dilation")
        if dilation > 1 and (size, strides) != (2, 1):
            raise ValueError(
                "`dilation` needs size=2 and strides=1. Received: "
                f"dilation={dilation}, size={size}, strides={strides}"
            )
        self.size, self.strides, self.dilation = _checks.plain((size, strides, dilation))
        self.data_format = data_format_of(data_format)

    def call(self, x):
        if self.dilation > 1:
            return self._of_distant_pixels(x)
        if keras.backend.backend() == "torch" and not isinstance(x, keras.KerasTensor):
            return self._on_torch(x)
        # With its gradient in TensorFlow 2.21, the average takes a twentieth to a fiftieth, and the
        # blur a fifth to a ninth, of the time that sums of strided slices take.
        if self.size == 2:
            return ops.average_pool(x, 2, self.strides, "same", self.data_format)
        # an average of averages of two pixels
        x = pad_sides(x, (1, 1), self.data_format, mode="reflect")
        x = ops.average_pool(x, 2, 1, "valid", self.data_format)
        return ops.average_pool(x, 2, self.strides, "valid", self.data_format)

    def _of_distant_pixels(self, x):
        for axis in (2, 3) if self.data_format == "channels_first" else (1, 2):
            before = (slice(None),) * axis
            # beyond the edge, a window has only its first pixel
            moved = [
                x[(*before, slice(self.dilation, None))],
                x[(*before, slice(-self.dilation, None))],
            ]
            x = (x + ops.concatenate(moved, axis)) / 2
        return x

    def _on_torch(self, x):
        """Pool with torch's own function. Keras 3.15 copies the map into torch's default
        layout and takes 7 to 15 times as long.
        """
        from torch.nn import functional

        def pool(images):
            if self.size == 2:
                images = _whole_pairs(images, self.strides)
            else:
                images = functional.pad(images, (1, 1, 1, 1), "reflect")
                images = functional.avg_pool2d(images, 2, 1)
            return functional.avg_pool2d(images, 2, self.strides)

        return _with_channels_first(pool, x, self.data_format)

    def compute_output_shape(self, input_shape):
        return strided_shape(input_shape, self.strides, self.data_format)

    def get_config(self):
        return super().get_config() | {
            "size": self.size,
            "strides": self.strides,
            "data_format": self.data_format,
            "dilation": self.dilation,
        }


def _check_square(sizes: tuple[int, int], argument: str) -> None:
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"`{argument}` must be one number, the same for height and width. Received: "
            f"{argument}={sizes}"
        )


def data_format_of(data_format: str | None) -> str:
    """Return `data_format`, or Keras' setting for None."""
    if data_format is None:
        return keras.config.image_data_format()
    _checks.one_of(data_format, ("channels_last", "channels_first"), "data_format")
    return data_format


def channel_axis(data_format: str, rank: int) -> int:
    """Return the axis of the channels."""
    return 1 if data_format == "channels_first" and rank == 4 else -1


def reordered(
    shape: Sequence[int | None], old: str | None, new: str | None
) -> tuple[int | None, ...]:
    """Return the shape of images without the batch in another data format, None for Keras'
    setting; a shape of another rank stays as it is.
    """
    old, new = data_format_of(old), data_format_of(new)
    if old == new or len(shape) != 3:
        return tuple(shape)
    return (shape[-1], *shape[:-1]) if new == "channels_first" else (*shape[1:], shape[0])


def pad_sides(
    images,
    pads: tuple[int, int],
    data_format: str,
    value: float | None = None,
    mode: str = "constant",
):
    """Pad height and width of `(batch, height, width, channels)`, or channels first, on
    both sides: with zeros, with `value`, or in another `mode` of `ops.pad`.
    """
    sides = [(0, 0), *((pad, pad) for pad in pads)]
    sides.insert(1 if data_format == "channels_first" else 3, (0, 0))
    return ops.pad(images, sides, mode, value)


def _with_channels_first(function: Callable, images, data_format: str):
    """Apply a torch function that takes the channels first. Nothing is copied: the
    permuted images have torch's memory format channels_last.
    """
    if data_format == "channels_first":
        return function(images)
    return function(images.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def _whole_pairs(images, strides: int):
    """Repeat the last row and column of torch images, channels first, if the last window
    of 2 x 2 pixels needs them. This changes no maximum and no average.
    """
    from torch.nn import functional

    missing = [max(0, (-(-size // strides) - 1) * strides + 2 - size) for size in images.shape[2:]]
    sides = (0, missing[1], 0, missing[0])
    return functional.pad(images, sides, "replicate") if any(missing) else images


def sampled(images, strides: int, data_format: str):
    """Return every `strides`-th pixel of `(batch, height, width, channels)`, or channels
    first.
    """
    if strides == 1:
        return images
    if data_format == "channels_first":
        return images[:, :, ::strides, ::strides]
    if keras.backend.backend() != "tensorflow":
        return images[:, ::strides, ::strides]
    # Averages of one pixel: TensorFlow 2.21's strided slice with its gradient takes 5 to 10 times
    # as long (25 and 3.3 ms for a map of 8 x 56 x 56 x 256 in bfloat16). On the other backends the
    # slice is faster.
    return ops.average_pool(images, 1, strides, "valid", data_format)


def strided_shape(
    shape: tuple, strides: int, data_format: str, channels: int | None = None
) -> tuple:
    """Return the output shape of a layer with these `strides` and output `channels`.

    The height and width of images are divided by `strides` and rounded up; other shapes
    keep their sizes. None for `channels` keeps their number.
    """
    axis = channel_axis(data_format, len(shape))
    new = list(shape)
    if len(shape) == 4:
        for i in (1, 2) if axis == -1 else (2, 3):
            new[i] = None if new[i] is None else -(-new[i] // strides)
    if channels is not None:
        new[axis] = channels
    return tuple(new)
