"""The stem of a network: the layers from the input to the first residual unit."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import keras

from keras_preact import _checks, initializers
from keras_preact.arrangements import NORM_ACTIVATION
from keras_preact.layers import chains, spatial
from keras_preact.layers.whitening import Whitening2D, whitened_channels
from keras_preact.units import ResidualUnit


@dataclasses.dataclass(frozen=True)
class Stem:
    """The layers before the first unit: a weight layer or several, the arrangement's
    stem components, and for some stems a pooling.

    Args:
        kernel_size: Kernel size of the convolutions; None: a dense layer.
        strides: Strides of the first convolution.
        pooling: Padding of a 3x3 max pooling at stride 2: `"infinity"` (minus infinity)
            or `"zeros"`; None: no pooling.
        whitens: Whether the convolution is a `Whitening2D`. Its width follows from its
            input.
        sequence: Whether the input is `(length, channels)`. The stem turns it into a map
            of width 1.
        normalized: Whether a normalisation and an activation come before the components
            of the arrangement.
        narrower: Widths of the convolutions before the last one, as shares of its
            width. Each has a normalisation and an activation after it.
    """

    kernel_size: int | None
    strides: int = 1
    pooling: str | None = None
    whitens: bool = False
    sequence: bool = False
    normalized: bool = False
    narrower: tuple[float, ...] = ()

    @property
    def total_stride(self) -> int:
        return self.strides * (2 if self.pooling else 1)

    def layers(
        self, filters: int, channels: int, unit: ResidualUnit, kernel, axis: int
    ) -> list[keras.Layer]:
        """Make the layers from the input to the first unit.

        Args:
            filters: Width of the last weight layer.
            channels: Number of channels of the input.
            unit: A unit of the network, for its options.
            kernel: The network's kernel initialiser.
            axis: Axis of the channels.
        """
        # whitening normalises already
        names = [name for name in unit.arrangement.stem if not (self.whitens and name == "norm")]
        if self.normalized:
            names = [*NORM_ACTIVATION, *names]
        after = unit.components.make(names, axis, filters, "stem_{}")
        if self.whitens and self.kernel_size:
            whitening = Whitening2D(
                self.kernel_size,
                name="stem_conv",
                data_format=unit.data_format,
                kernel_initializer=initializers.spawn(kernel, "stem"),
                dtype=unit.dtype_policy,
            )
            return [whitening, *after]
        chain: list[keras.Layer] = []
        if self.sequence:
            chain.append(keras.layers.Reshape((-1, 1, channels), name="stem_map"))
        for i, share in enumerate(self.narrower, 1):
            width = max(1, int(filters * share))
            between = unit.components.make(NORM_ACTIVATION, axis, width, f"stem_{{}}_{i}")
            chain += [self._weight(i, width, unit, kernel, between), *between]
        last = self._weight(len(self.narrower) + 1, filters, unit, kernel, after)
        return [*chain, last, *after, *self._pool(unit)]

    def _weight(
        self, i: int, filters: int, unit: ResidualUnit, kernel, after: list[keras.Layer]
    ) -> keras.Layer:
        """Make the i-th weight layer, from 1, with the layers of `after` after it."""
        place = "stem" if i == 1 else f"stem_{i}"
        name = "stem_dense" if self.kernel_size is None else "stem_conv"
        return chains.weight(
            filters,
            (self.kernel_size, 1) if self.sequence and self.kernel_size else self.kernel_size,
            strides=self.strides if i == 1 else 1,
            use_bias=unit.components.has_bias(after),
            bias_initializer=initializers.spawn(unit.bias_initializer, place),
            kernel_initializer=initializers.spawn(kernel, place),
            kernel_regularizer=unit.kernel_regularizer,
            standardize=getattr(unit.block, "standardize_weights", False),
            data_format=unit.data_format,
            name=name if i == 1 else f"{name}_{i}",
            dtype=unit.dtype_policy,
        )

    def _pool(self, unit: ResidualUnit) -> list[keras.Layer]:
        if not self.pooling:
            return []
        smooth = unit.downsampling.pooling("stem", 2, unit.data_format, unit.dtype_policy)
        pool = spatial.PaddedMaxPooling2D(
            3,
            1 if smooth else 2,
            zeros=self.pooling == "zeros",
            data_format=unit.data_format,
            name="stem_pool",
            dtype=unit.dtype_policy,
        )
        return [pool, *smooth]

    def width(self, filters: int, channels: int) -> int:
        """Return the channels after the stem for `channels` input channels."""
        if self.whitens and self.kernel_size:
            return whitened_channels(self.kernel_size, channels)
        return filters

    def check_input(self, shape: Sequence, total_stride: int, data_format: str) -> int:
        """Check the shape of an input, without the batch; return its number of channels.

        Args:
            shape: The shape.
            total_stride: Product of all strides of the network.
            data_format: Order of the axes.
        """
        is_image = self.kernel_size is not None
        axes: tuple[str, ...] = ("features",)
        if self.sequence:
            if data_format != "channels_last":
                raise ValueError(
                    "A network for sequences takes (length, channels): use "
                    "data_format='channels_last', and transpose other sequences. Received: "
                    f"input_shape={shape}, data_format={data_format!r}"
                )
            axes = ("length", "channels")
        elif is_image:
            axes = ("height", "width", "channels")
            if data_format == "channels_first":
                axes = ("channels", "height", "width")
        channels = axes.index("channels" if is_image else "features")
        if len(shape) != len(axes) or shape[channels] is None:
            raise ValueError(
                f"`input_shape` must be ({', '.join(axes)}) with a known number of "
                f"{'channels' if is_image else 'features'}. Received: input_shape={shape}, "
                f"data_format={data_format!r}"
            )
        for size, axis in zip(shape, axes, strict=True):
            if size is not None:
                _checks.positive_int(size, f"input_shape ({axis})")
            if axis in ("height", "width", "length") and size is not None and size < total_stride:
                raise ValueError(
                    f"The strides of this network divide the {axis} by {total_stride}, so it must "
                    f"be at least {total_stride}. Received: input_shape={shape}"
                )
        return shape[channels]


#: `Stem` by name: for small images, for ImageNet as published, as in TF-slim and as in pytorchcv,
#: of ResNet-C and D (arXiv 1812.01187, Fig. 2b) and of timm's ResNet-T, for sequences, for vectors,
#: for short training.
STEMS: Mapping[str, Stem] = MappingProxyType(
    {
        "3x3": Stem(3),
        "7x7": Stem(7, strides=2, pooling="infinity"),
        "7x7_zero_padded": Stem(7, strides=2, pooling="zeros"),
        "7x7_normalized": Stem(7, strides=2, pooling="infinity", normalized=True),
        "deep": Stem(3, strides=2, pooling="infinity", narrower=(1 / 2, 1 / 2)),
        "tiered": Stem(3, strides=2, pooling="infinity", narrower=(3 / 8, 1 / 2)),
        "sequence": Stem(3, sequence=True),
        "sequence_pooled": Stem(7, strides=2, pooling="infinity", sequence=True),
        "dense": Stem(None),
        "whitening": Stem(2, whitens=True),
    }
)
