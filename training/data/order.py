"""The order of a training stream: an endless sequence of permutations, each a function
of the seed and the epoch.
"""

import functools

import numpy as np

# Purposes of random numbers. A generator is seeded with the seed, the purpose and a number.
ORDER, AUGMENTATION, SHARDS, OPERATIONS, MIXING, FLIPS = range(6)


def generator(seed: int, purpose: int, number: int) -> np.random.Generator:
    """Return the random generator of an epoch, a step or a place in the stream.
    Generators with different arguments are independent of each other.
    """
    return np.random.default_rng((seed, purpose, number))


class Order:
    """Shuffles the images again in every epoch: the image at place `p` of the stream is
    number `p % size` of the permutation of epoch `p // size`.

    Args:
        size: Number of images.
        seed: Seed, not negative.
        purpose: Purpose of the random numbers. Orders with different purposes are
            independent.
    """

    def __init__(self, size: int, seed: int, purpose: int = ORDER):
        self.size = size
        self._permutation = functools.lru_cache(maxsize=4)(
            lambda epoch: generator(seed, purpose, epoch).permutation(size)
        )

    def permutation(self, epoch: int) -> np.ndarray:
        """Return the numbers of the images of an epoch, in their order."""
        return self._permutation(int(epoch))

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return the number of the image at each place."""
        epochs, within = np.divmod(places, self.size)
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            indices[in_epoch] = self.permutation(epoch)[within[in_epoch]]
        return indices
