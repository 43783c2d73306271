"""How pixels become the input of a network, as data, and whether a batch has the
expected range.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from keras_preact import _checks


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How images become the input of a network: resize, crop, then `(pixel - mean) /
    std`.

    An image of the network's size is neither resized nor cropped.

    Args:
        mean, std: One number per channel, in pixel values from 0 to 255; a number if there
            is one channel.
        size: Height and width of the network's images.
        resize: Length of the shorter side before the crop. None: this step is left out.
        crop: `"center"` cuts `size` x `size` pixels from the middle. None: the whole
            image is resized to `size` x `size`.
        interpolation: Method of resizing, a name of `tf.image.ResizeMethod`.

    Raises:
        ValueError: for a std that is not positive, numbers that are not finite, different
            numbers of means and stds, a `resize` below `size` or without `crop`.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> cifar = kp.preprocessing.PREPROCESSING["cifar10"]
    >>> cifar.normalize(np.zeros((1, 32, 32, 3), "uint8"))[0, 0, 0].astype(int).tolist()  # black
    [-1, -1, -1]
    >>> kp.preprocessing.Preprocessing(**cifar.to_dict()) == cifar
    True
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int
    resize: int | None = None
    crop: str | None = None
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        for field in ("mean", "std"):  # lists from JSON; a number is that of the only channel
            object.__setattr__(self, field, tuple(map(float, np.atleast_1d(getattr(self, field)))))
        for field in ("size", "resize"):
            object.__setattr__(self, field, _checks.plain(getattr(self, field)))
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError(
                f"`mean` and `std` must hold one number per channel. Received: mean={self.mean}, "
                f"std={self.std}"
            )
        for mean, std in zip(self.mean, self.std, strict=True):
            _checks.finite(mean, "mean")
            _checks.positive(std, "std")
        _checks.positive_int(self.size, "size")
        _checks.one_of(self.crop, (None, "center"), "crop")
        _checks.one_of(self.interpolation, (*_KERNELS, "area", "nearest"), "interpolation")
        if self.resize is None:
            return
        _checks.positive_int(self.resize, "resize")
        if self.crop is None or self.resize < self.size:
            raise ValueError(
                "`resize` needs crop='center' and must be at least `size`. Received: "
                f"resize={self.resize}, crop={self.crop!r}, size={self.size}"
            )

    def normalize(self, images: np.ndarray) -> np.ndarray:
        """Return `(images - mean) / std` as float32; `images` have values from 0 to 255
        and the channels last.
        """
        return (np.asarray(images, "float32") - np.asarray(self.mean, "float32")) / np.asarray(
            self.std, "float32"
        )

    def for_size(self, size: int) -> "Preprocessing":
        """Return the preprocessing of a network for images of `size` x `size` pixels:
        `resize` is scaled too, as `resize_image` does.

        Raises:
            ValueError: for a size that is not a positive integer.

        Example:

        >>> import keras_preact as kp
        >>> small = kp.preprocessing.PREPROCESSING["imagenet"].for_size(56)
        >>> small.size, small.resize, small.crop
        (56, 64, 'center')
        """
        _checks.positive_int(size, "size")
        resize = self.resize and round(size * self.resize / self.size)
        return dataclasses.replace(self, size=size, resize=resize)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields in a form that JSON can hold; `Preprocessing(**fields)` is
        equal to this one.
        """
        return dataclasses.asdict(self) | {"mean": list(self.mean), "std": list(self.std)}


#: After preprocessing, input has a mean near 0 and a standard deviation near 1. With a root mean
#: square above the first limit or a standard deviation below the second, its range is wrong.
LARGEST_SIZE, SMALLEST_STD = 5.0, 0.1
#: `SMALLEST_STD` of a network without preprocessing, which may see dark images from 0 to 1.
_SMALLEST_STD_AS_IS = 0.01
#: With at least this number of images, low contrast is no coincidence.
_ENOUGH = 8
_MOST_EXAMPLES, _MOST_VALUES = 64, 2_000_000


@dataclasses.dataclass(frozen=True)
class InputRange:
    """The input that a network expects: `(x - mean) / std` has a mean near 0 and a
    standard deviation near 1.

    Args:
        mean, std: A number or one per channel. 0 and 1 for a network without
            preprocessing.
        axis: Axis of the channels in a batch.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> expected = kp.preprocessing.InputRange(mean=125.0, std=64.0)
    >>> expected.bounds
    (0.0, 255.0)
    >>> pixels = np.random.default_rng(0).integers(0, 256, (16, 32, 32, 3))
    >>> expected.problem(pixels) is None, expected.problem(pixels / 255) is None
    (True, False)
    """

    mean: Any = 0.0
    std: Any = 1.0
    axis: int = -1

    @property
    def is_plain(self) -> bool:
        """Whether the network has no preprocessing."""
        return bool(np.all(np.equal(self.mean, 0)) and np.all(np.equal(self.std, 1)))

    @property
    def bounds(self) -> tuple[float, float]:
        """The expected range of the input: 0 to 255 for pixels, 0 to 1 for pixels
        divided by 255, else two standard deviations around the mean.
        """
        mean, std = float(np.mean(self.mean)), float(np.mean(self.std))
        if mean >= 0 and not self.is_plain:
            if mean + std > 32 and max(mean, std) <= 255:  # also x / 255 - 0.5
                return 0.0, 255.0
            if 0.2 < mean + std <= 1:
                return 0.0, 1.0
        return mean - 2 * std, mean + 2 * std

    def of_pixels(self, pixels):
        """Return pixels from 0 to 255, divided by 255 if the network expects 0 to 1."""
        return pixels / 255 if self.bounds == (0, 1) else pixels

    def problem(self, x) -> str | None:
        """Return what is wrong with the range of a batch and what to do, or None.

        After preprocessing, a root mean square above `LARGEST_SIZE` is always wrong.
        Else constant images, such as black ones, are accepted. Fewer than 8 images of
        low contrast are accepted too, unless the network has preprocessing and their
        values look scaled, like pixels divided by 255.

        Args:
            x: A batch as the network takes it. Only its first examples are checked. Of
                another shape, it has no problem of this kind.
        """
        x = readable(x)
        if x.dtype.kind not in "fiub" or x.ndim < 2 or not x.size or not self._fits(x.shape):
            return None
        most = max(_ENOUGH, min(_MOST_EXAMPLES, _MOST_VALUES * len(x) // x.size))
        # in float64: squares of large float32 numbers overflow
        x = np.moveaxis(x[:most].astype("float64"), self.axis, -1)
        z = (x - np.asarray(self.mean)) / np.asarray(self.std)
        statistics = wrong_scale(x, z, is_plain=self.is_plain)
        return None if statistics is None else self._in_words(x, *statistics)

    def _fits(self, shape: tuple[int, ...]) -> bool:
        channels = max(np.size(self.mean), np.size(self.std))
        has_axis = -len(shape) <= self.axis < len(shape)
        return channels == 1 or (has_axis and shape[self.axis] == channels)

    def _in_words(self, x: np.ndarray, mean: float, std: float) -> str:
        lowest, highest = float(x.min()), float(x.max())
        values = f"values from {lowest:.4g} to {highest:.4g}"
        after = f"a mean of {mean:.3g} and a standard deviation of {std:.3g}"
        if self.is_plain:
            return (
                f"The input has {values}, with {after}. This network has no preprocessing and "
                "expects a mean near 0 and a standard deviation near 1. Build it with the `mean` "
                "and `std` of your images, or normalise them first."
            )
        low, high = self.bounds
        factors = {(255.0, True): "Multiply it by 255", (1.0, False): "Divide it by 255"}
        remedy = factors.get((high, highest <= 1), "Pass input in that range")
        return (
            f"The input has {values}. This network expects values from {low:.4g} to {high:.4g}: "
            f"after its preprocessing the input has {after}, instead of about 0 and 1. {remedy}, "
            "or build the network with the `mean` and `std` of your images."
        )


def readable(array) -> np.ndarray:
    """Return an array whose dtype NumPy knows: bfloat16, which it takes for raw bytes,
    becomes float32.
    """
    array = np.asarray(array)
    return array.astype("float32") if array.dtype.name == "bfloat16" else array


def wrong_scale(x: np.ndarray, z: np.ndarray, *, is_plain: bool) -> tuple[float, float] | None:
    """Return mean and standard deviation of preprocessed input if they are not near 0
    and 1; None if they are, or if the batch is not enough to decide.

    Args:
        x: A batch, with the channels last.
        z: The same batch after preprocessing.
        is_plain: Whether there is no preprocessing.
    """
    if not np.isfinite(x).all():
        return None
    channels = z.reshape(-1, z.shape[-1])
    mean, std = float(z.mean()), float(np.sqrt(channels.var(axis=0).mean()))
    if np.hypot(mean, std) > LARGEST_SIZE:
        return mean, std
    varied = np.count_nonzero(np.ptp(x.reshape(len(x), -1), axis=1))
    if not varied or std >= (_SMALLEST_STD_AS_IS if is_plain else SMALLEST_STD):
        return None
    are_scaled = (x != np.round(x)).any() and (x.max() <= 1 or x.min() < 0)
    if varied < _ENOUGH and (is_plain or not are_scaled):
        return None
    return mean, std


#: Methods of `tf.image.resize` that smooth what they make smaller, with TensorFlow's name for their
#: kernel.
_KERNELS = {
    "bilinear": "triangle",
    "bicubic": "keyscubic",
    "gaussian": "gaussian",
    "lanczos3": "lanczos3",
    "lanczos5": "lanczos5",
    "mitchellcubic": "mitchellcubic",
}


def smoothly_resized(image, size, method: str = "bilinear"):
    """Resize an image with TensorFlow operations. The result is the one of
    `tf.image.resize(image, size, method, antialias=True)`, to the last bit, in about a
    third of the time.

    Args:
        image: Tensor `(h, w, c)` of any numeric dtype.
        size: Height and width of the result, integers or an integer tensor `(2,)`.
        method: Method of `tf.image.resize`.

    Returns:
        float32 `(height, width, c)`.

    Raises:
        ValueError: for another method.

    Example:

    >>> import tensorflow as tf
    >>> import keras_preact as kp
    >>> kp.preprocessing.smoothly_resized(tf.zeros((480, 640, 3), tf.uint8), (60, 80)).shape
    TensorShape([60, 80, 3])
    """
    import tensorflow as tf

    if method not in _KERNELS:
        return tf.cast(tf.image.resize(image, size, method=method, antialias=True), tf.float32)

    # TensorFlow's operation resizes the height, then the width. It is fast along the channels of a
    # pixel, and slow from pixel to pixel. So here it resizes heights alone, and a pixel is a whole
    # row: of the image, then of the image on its side.
    def turned(pixels, height):
        rows, columns, channels = tf.unstack(tf.shape(pixels))
        scaled = tf.raw_ops.ScaleAndTranslate(
            images=tf.reshape(pixels, (1, rows, 1, columns * channels)),
            size=tf.stack([height, 1]),
            scale=tf.stack([tf.cast(height, tf.float32) / tf.cast(rows, tf.float32), 1.0]),
            translation=(0.0, 0.0),
            kernel_type=_KERNELS[method],
            antialias=True,
        )
        return tf.transpose(tf.reshape(scaled, (height, columns, channels)), (1, 0, 2))

    height, width = size if isinstance(size, tuple) else tf.unstack(tf.cast(size, tf.int32))
    return turned(turned(image, height), width)


#: Largest ratio of the sides of an image that is resized in one step.
_ASPECT = 32


def resize_image(image, preprocessing: Preprocessing | None, size: int | tuple[int, int]):
    """Resize an image for a network as at evaluation, with TensorFlow operations.

    If `size` differs from `preprocessing.size`, `preprocessing.resize` is scaled too.

    Args:
        image: Tensor `(h, w, c)` of any numeric dtype.
        preprocessing: How to resize. None: the whole image is resized.
        size: Height and width of the result, or one number for both.

    Returns:
        float32 `(height, width, c)`, not normalised. An image of this size keeps its
        pixels, unless `preprocessing` enlarges and crops every image, as the usual test
        on ImageNet does.

    Example:

    >>> import tensorflow as tf
    >>> import keras_preact as kp
    >>> imagenet = kp.preprocessing.PREPROCESSING["imagenet"]
    >>> kp.preprocessing.resize_image(tf.zeros((480, 640, 3), tf.uint8), imagenet, 224).shape
    TensorShape([224, 224, 3])
    """
    import tensorflow as tf

    height, width = map(int, (size, size) if isinstance(size, int | np.integer) else size)
    wanted = (height, width)
    method = "bilinear" if preprocessing is None else preprocessing.interpolation

    def resize(pixels, extent):
        return smoothly_resized(pixels, extent, method)

    def whole():
        # A strip is shortened first. TensorFlow would enlarge it first, which may need any memory.
        shape = tf.shape(image)[:2]
        strip = shape // _ASPECT > tf.reverse(shape, [0])
        return tf.cond(
            tf.reduce_any(strip),
            lambda: resize(resize(image, tf.where(strip, wanted, shape)), wanted),
            lambda: resize(image, wanted),
        )

    def scaled_and_cut():
        assert preprocessing is not None
        box = [
            float(round(side * (preprocessing.resize or preprocessing.size) / preprocessing.size))
            for side in wanted
        ]
        shape = tf.shape(image)[:2]
        scale = tf.reduce_max(box / tf.cast(shape, tf.float32))
        # Only the middle of a strip is scaled. The same number of pixels is cut off at both ends.
        needed = tf.cast(tf.math.ceil(_ASPECT * tf.constant(box) / scale), tf.int32)
        kept = tf.minimum(shape, needed + (shape - needed) % 2)
        above, left = tf.unstack((shape - kept) // 2)
        middle = image[above : above + kept[0], left : left + kept[1]]
        scaled = tf.cast(tf.round(tf.cast(kept, tf.float32) * scale), tf.int32)
        return tf.image.resize_with_crop_or_pad(
            resize(middle, tf.maximum(scaled, wanted)), height, width
        )

    if preprocessing is not None and preprocessing.crop == "center":
        pixels = scaled_and_cut()
    else:
        pixels = tf.cond(
            tf.reduce_all(tf.shape(image)[:2] == wanted), lambda: tf.cast(image, tf.float32), whole
        )
    return tf.ensure_shape(pixels, (height, width, image.shape[-1]))


#: Data set to its preprocessing at evaluation.
#:
#: - cifar10, cifar100: mean and std of the training images, as in fb.resnet.torch
#:   (datasets/cifar10.lua, cifar100.lua).
#: - imagenet: mean and std of fb.resnet.torch (datasets/imagenet.lua), times 255; shorter side 256
#:   and centre crop of 224, the usual single-crop test.
#: - digits: mean and std of scikit-learn's 1,797 digits as `round(pixel * 255 / 16)`.
PREPROCESSING: Mapping[str, Preprocessing] = MappingProxyType(
    {
        "cifar10": Preprocessing((125.3, 123.0, 113.9), (63.0, 62.1, 66.7), 32),
        "cifar100": Preprocessing((129.3, 124.1, 112.4), (68.2, 65.4, 70.4), 32),
        "imagenet": Preprocessing(
            (123.675, 116.28, 103.53), (58.395, 57.12, 57.375), 224, resize=256, crop="center"
        ),
        "digits": Preprocessing((77.853723,), (95.850908,), 8),
    }
)
