"""Stand-ins for data sets: random images, to see without data that everything works."""

import numpy as np

from .images import Images

#: Data set to the shape of its images and its number of classes.
SHAPES = {"cifar10": ((32, 32, 3), 10), "cifar100": ((32, 32, 3), 100), "digits": ((8, 8, 1), 10)}


def images(name: str, count: int = 64) -> Images:
    """Return so many random images to train on, and 16 to test with."""
    shape, classes = SHAPES[name]
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (count + 16, *shape), "uint8")
    labels = random.integers(0, classes, count + 16)
    names = tuple(map(str, range(classes)))
    return Images(
        f"{name}, random", names, pixels[:count], labels[:count], pixels[count:], labels[count:]
    )
