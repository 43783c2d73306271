"""The order of a training stream: an endless sequence of permutations, each a function
of the seed and the epoch.
"""

import functools

import numpy as np

# What random numbers are for: the second of the three numbers that a generator is made from.
ORDER, AUGMENTATION, SHARDS, OPERATIONS, MIXING, FLIPS = range(6)


def generator(seed: int, purpose: int, number: int) -> np.random.Generator:
    """Return the generator of an epoch, a step or a place; all of them are independent
    of each other.
    """
    return np.random.default_rng((seed, purpose, number))


class Order:
    """Every epoch a permutation: the image at place `p` is number `p % size` of the
    permutation of epoch `p // size`.

    Args:
        size: Number of images.
        seed: Not negative.
        purpose: Two orders of another purpose have nothing in common.
    """

    def __init__(self, size: int, seed: int, purpose: int = ORDER):
        self.size = size
        self._permutation = functools.lru_cache(maxsize=4)(
            lambda epoch: generator(seed, purpose, epoch).permutation(size)
        )

    def permutation(self, epoch: int) -> np.ndarray:
        """Return the images of an epoch in order."""
        return self._permutation(int(epoch))

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return the image at each place."""
        epochs, within = np.divmod(places, self.size)
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = self.permutation(epoch)[within[here]]
        return indices
