"""Whitening2D: a first convolution that is computed from the images."""

import keras
import numpy as np

#: Added to every variance, for images whose pixels were normalised to a variance of about 1.
EPSILON = 5e-4
#: Number of images to process at a time; their patches are in memory together.
CHUNK = 256
#: Arguments of a convolution that whitening cannot change.
FIXED = {"strides": 1, "padding": "valid", "dilation_rate": 1, "groups": 1, "use_bias": False}


def whitened_channels(kernel_size: int, channels: int) -> int:
    """Return the output channels of a `Whitening2D` for `channels` input channels."""
    return 2 * kernel_size**2 * channels


@keras.saving.register_keras_serializable("keras_preact")
class Whitening2D(keras.layers.Conv2D):
    """A convolution that projects small patches onto their principal components, scaled
    to a variance of 1. Each component appears twice, once with each sign.

    Its kernel is not trained: `adapt` computes it from images. Before that it is random.
    Neighbouring pixels are nearly equal, so a network spends much of a short training
    on their differences. After whitening, the differences have the same variance as the
    mean.

    Args:
        kernel_size: Height and width of the patches.
        **kwargs: Arguments of `keras.layers.Conv2D`, except `filters`, `strides`,
            `padding`, `dilation_rate`, `groups`, `use_bias` and `trainable`, which is always
            False.

    Input: `(batch, height, width, channels)`, output: `(batch, height - kernel_size + 1,
        width - kernel_size + 1, 2 * kernel_size ** 2 * channels)`; with
        `data_format="channels_first"` the channels are the second axis of both.

    Example:

    >>> import numpy as np
    >>> from keras_preact.layers.whitening import Whitening2D
    >>> images = np.random.default_rng(0).normal(size=(64, 8, 8, 3)).cumsum(1).astype("float32")
    >>> layer = Whitening2D(2)
    >>> layer.adapt(images)
    >>> y = np.array(layer(images))
    >>> y.shape, y[..., :12].std(axis=(0, 1, 2)).round(1).min()
    ((64, 7, 7, 24), np.float32(1.0))

    Source: Sec. 3.2 of arXiv 2404.00498.
    """

    def __init__(self, kernel_size: int = 2, **kwargs):
        for name in ("filters", "trainable"):  # a config contains them
            kwargs.pop(name, None)
        for name, value in FIXED.items():
            received = kwargs.pop(name, value)
            if received not in (value, (value, value), [value, value]):
                raise ValueError(
                    f"`{name}` of a Whitening2D is always {value!r}: leave it out. Received: "
                    f"{name}={received!r}"
                )
        super().__init__(None, kernel_size, trainable=False, **FIXED, **kwargs)
        if self.kernel_size[0] != self.kernel_size[1]:
            raise ValueError(
                "`kernel_size` must be one number, the same for height and width. Received: "
                f"kernel_size={kernel_size!r}"
            )

    @property
    def trainable(self) -> bool:
        return False

    @trainable.setter
    def trainable(self, value: bool):
        """Do nothing, because a model sets this property of all its layers."""

    def build(self, input_shape):
        channels = input_shape[1 if self.data_format == "channels_first" else -1]
        self.filters = whitened_channels(self.kernel_size[0], channels)
        super().build(input_shape)

    def adapt(self, images) -> None:
        """Compute the kernel.

        Args:
            images: An array of the shape and scale that the layer reads; a few thousand
                are enough.

        Raises:
            ValueError: for no image, images of another shape and values that are not finite.
        """
        images = np.asarray(images, "float32")
        if images.ndim != 4:
            raise ValueError(
                f"`images` must have 4 dimensions, including the batch. Received: "
                f"shape={images.shape}"
            )
        if not self.built:
            self.build(images.shape)
        if self.data_format == "channels_first":
            images = np.moveaxis(images, 1, -1)
        channels = self.kernel.shape[2]
        if not len(images) or images.shape[-1] != channels or not np.isfinite(images).all():
            raise ValueError(
                f"`images` must contain at least one image, with {channels} channels and finite "
                f"values. Received: shape={images.shape}"
            )
        size = self.kernel_size[0]
        count, total, products = 0, 0.0, 0.0
        for start in range(0, len(images), CHUNK):
            windows = np.lib.stride_tricks.sliding_window_view(
                images[start : start + CHUNK], (size, size), axis=(1, 2)
            )
            # from (n, rows, columns, channel, y, x) to patches in the order of a kernel
            patches = np.moveaxis(windows, 3, -1).reshape(-1, size * size * channels)
            patches = patches.astype("float64")
            count += len(patches)
            total = total + patches.sum(axis=0)
            products = products + patches.T @ patches
        mean = total / count
        variances, components = np.linalg.eigh(products / count - np.outer(mean, mean))
        # the sign of a component is arbitrary, and may differ between machines
        largest = np.abs(components).argmax(axis=0)
        components = components * np.sign(components[largest, np.arange(len(largest))])
        # the largest first; rounding can leave the smallest below 0
        scaled = (components / np.sqrt(np.maximum(variances, 0) + EPSILON))[:, ::-1]
        kernel = np.concatenate([scaled, -scaled], axis=1)
        self.kernel.assign(kernel.reshape(self.kernel.shape).astype("float32"))
