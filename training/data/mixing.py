"""Mixup (arXiv 1710.09412) and CutMix (arXiv 1905.04899): two images become one, and
their labels in the same proportion.

As in the code of both papers, one number is drawn for all images of a batch. Keras'
layers are not used: the random numbers of `keras.layers.MixUp` depend on how often it
was called. `keras.layers.CutMix` computes labels from a box with corners between
pixels, and not from the number of pixels that it changes.
"""

import dataclasses
import math

import numpy as np

from . import order

#: Shares of mixup are whole multiples of 1 / STEPS, so that products with bytes, and their sums,
#: are exact in float32.
STEPS = 2**16


@dataclasses.dataclass(frozen=True)
class Mixture:
    """How images and their partners are mixed.

    Args:
        own: Share of the image itself, and of its label. Its partner has the rest.
        box: Rows and columns that come from the partner; None: all pixels are mixed.
    """

    own: float
    box: tuple[slice, slice] | None = None


class Mixing:
    """Mixes the images of a batch; the numbers follow from the seed and the step.

    Args:
        mixup: Alpha of the Beta distribution that mixup's shares are drawn from; 0: no
            mixup.
        cutmix: The same for CutMix. If both are positive, each batch gets one of the two,
            with equal probability.
        seed: Seed of the stream.
        classes: Number of classes.
    """

    def __init__(self, mixup: float, cutmix: float, seed: int, classes: int):
        self._mixup, self._cutmix, self._seed = mixup, cutmix, seed
        self.classes = classes

    def draw(self, step: int, height: int, width: int) -> Mixture:
        """Return how the images of a step are mixed."""
        random = order.generator(self._seed, order.MIXING, step)
        paste = random.random() < 0.5 if self._mixup and self._cutmix else bool(self._cutmix)
        alpha = self._cutmix if paste else self._mixup
        own = random.beta(alpha, alpha)
        if not paste:
            return Mixture(round(own * STEPS) / STEPS)
        side = math.sqrt(1 - own)
        box = tuple(
            _interval(int(random.integers(0, length)), int(side * length), length)
            for length in (height, width)
        )
        pasted = math.prod(interval.stop - interval.start for interval in box)
        return Mixture(1 - pasted / (height * width), (box[0], box[1]))

    def __call__(
        self, step: int, images: np.ndarray, labels: np.ndarray, partners: np.ndarray
    ) -> tuple:
        """Return mixed images and their targets (n, classes), float32, from the images and
        labels of a step.

        Args:
            step: The global step.
            images: (m, height, width, channels), uint8 or float32. Mixed bytes are
                rounded to the nearest, halves to even.
            labels: Integers (m,).
            partners: (2, n): the number of each returned image, and the number of the
                image that it is mixed with.
        """
        mixture = self.draw(step, *images.shape[1:3])
        first, second = partners
        targets = np.eye(self.classes, dtype="float32")[labels]
        targets = targets[first] * np.float32(mixture.own) + targets[second] * np.float32(
            1 - mixture.own
        )
        if mixture.box is not None:
            mixed = images[first]
            mixed[:, *mixture.box] = images[second][:, *mixture.box]
            return mixed, targets
        share = np.float32(mixture.own)
        mixed = images[first] * share
        mixed += images[second] * (1 - share)
        if images.dtype == np.uint8:
            np.rint(mixed, out=mixed)
        return mixed.astype(images.dtype, copy=False), targets


def _interval(centre: int, length: int, side: int) -> slice:
    """Return the slice of `length` pixels around `centre`, cut off at the ends of a side."""
    return slice(max(centre - length // 2, 0), min(centre + length // 2, side))
