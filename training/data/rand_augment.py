"""RandAugment (arXiv 1909.13719): every image gets a few of fourteen operations, which
are drawn for each image and all have one magnitude.

The operations are Pillow's, by which the paper defines them. `keras.layers.RandAugment`
is not used: it draws the operations once for all images of a call, equalises by the
histogram of the whole batch, ignores its seed, and draws different numbers each time in
a parallel tf.data pipeline.
"""

from collections.abc import Callable, Mapping

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from . import order

#: Largest magnitude, the end of AutoAugment's ranges.
LARGEST = 30
BILINEAR, NEAREST = Image.Resampling.BILINEAR, Image.Resampling.NEAREST

#: A pixel's colour, as Pillow takes it.
Fill = int | tuple[int, ...]


def _affine(
    matrix: Callable[[float, int, int], tuple[float, ...]], resampling: Image.Resampling = BILINEAR
) -> Callable[[Image.Image, float, Fill], Image.Image]:
    """Return an affine operation. `matrix` is a function of level, width and height; its
    result maps a position in the new image to one in the old image.
    """

    def operation(image, level, fill):
        return image.transform(
            image.size,
            Image.Transform.AFFINE,
            matrix(level, *image.size),
            resampling,
            fillcolor=fill,
        )

    return operation


def _enhanced(enhancer: Callable) -> Callable[[Image.Image, float, Fill], Image.Image]:
    return lambda image, level, fill: enhancer(image).enhance(1 + 0.9 * level)


def _pixels(level: float, side: int) -> int:
    """Return the translation along a side: up to 150 pixels of 331. Whole pixels do not
    blur the image.
    """
    return round(150 / 331 * level * side)


#: Operations on an image, by name. The level is from -1 to 1; its absolute value is a share of the
#: largest magnitude. The fill colour is for pixels from outside the image.
OPERATIONS: Mapping[str, Callable[[Image.Image, float, Fill], Image.Image]] = {
    "identity": lambda image, level, fill: image,
    "autocontrast": lambda image, level, fill: ImageOps.autocontrast(image),
    "equalize": lambda image, level, fill: ImageOps.equalize(image),
    "rotate": lambda image, level, fill: image.rotate(30 * level, BILINEAR, fillcolor=fill),
    "solarize": lambda image, level, fill: ImageOps.solarize(image, round(256 * (1 - abs(level)))),
    "color": _enhanced(ImageEnhance.Color),
    "posterize": lambda image, level, fill: ImageOps.posterize(image, 8 - round(4 * abs(level))),
    "contrast": _enhanced(ImageEnhance.Contrast),
    "brightness": _enhanced(ImageEnhance.Brightness),
    "sharpness": _enhanced(ImageEnhance.Sharpness),
    "shear_x": _affine(lambda level, width, height: (1, 0.3 * level, 0, 0, 1, 0)),
    "shear_y": _affine(lambda level, width, height: (1, 0, 0, 0.3 * level, 1, 0)),
    "translate_x": _affine(
        lambda level, width, height: (1, 0, _pixels(level, width), 0, 1, 0), NEAREST
    ),
    "translate_y": _affine(
        lambda level, width, height: (1, 0, 0, 0, 1, _pixels(level, height)), NEAREST
    ),
}
NAMES = tuple(OPERATIONS)


class RandAugment:
    """Applies operations that follow from the seed and an image's place in the stream.

    Args:
        count: Number of operations on an image, one after another. The same operation may
            be drawn twice.
        magnitude: Magnitude of all of them, from 0 to `LARGEST`.
        seed: Seed of the stream.
        fill: Colour of pixels from outside the image, one number from 0 to 255 per
            channel.
    """

    def __init__(self, count: int, magnitude: int, seed: int, fill: tuple[float, ...]):
        self._count, self._level, self._seed = count, magnitude / LARGEST, seed
        colour = tuple(int(value) for value in np.rint(fill))
        self._fill: Fill = colour[0] if len(colour) == 1 else colour

    def draw(self, place: int) -> list[tuple[str, float]]:
        """Return name and level of an image's operations. Half of the levels, at random,
        are negative.
        """
        random = order.generator(self._seed, order.OPERATIONS, place)
        names = random.integers(0, len(NAMES), self._count)
        signs = 2 * random.integers(0, 2, self._count) - 1
        return [
            (NAMES[name], float(sign) * self._level)
            for name, sign in zip(names, signs, strict=True)
        ]

    def __call__(self, images: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return altered images, for their places in the stream. `images` are (n, height,
        width, 1 or 3), uint8 or float32; float32 pixels are rounded.
        """
        pixels = (
            images if images.dtype == np.uint8 else np.rint(images).clip(0, 255).astype("uint8")
        )
        altered = np.empty_like(pixels)
        for i, place in enumerate(places):
            image = Image.fromarray(pixels[i].squeeze(-1) if pixels.shape[-1] == 1 else pixels[i])
            for name, level in self.draw(int(place)):
                image = OPERATIONS[name](image, level, self._fill)
            altered[i] = np.asarray(image).reshape(altered[i].shape)
        return altered.astype(images.dtype, copy=False)
