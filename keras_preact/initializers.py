"""Weight initialisers: the released code's, delta-orthogonal, Fixup; and how one
initialiser serves many weights.
"""

import hashlib

import keras
from keras import ops

from keras_preact import _checks


def released_he(seed: int | None = None) -> keras.initializers.Initializer:
    """He initialisation as the released code has it: normal, not truncated, with the
    variance `2 / fan_out`.

    `keras.initializers.HeNormal` is another one: truncated, with `2 / fan_in`.

    Example:

    >>> kernel = released_he(seed=0)((3, 3, 16, 64))  # height, width, channels in, channels out
    >>> round(float(keras.ops.std(kernel)), 2), (2 / (3 * 3 * 64)) ** 0.5
    (0.06, 0.05892556509887896)

    Source: appendix of arXiv 1603.05027, which follows arXiv 1502.01852; `fan_out` from
        resnet-1k-layers.
    """
    return keras.initializers.VarianceScaling(
        2.0, mode="fan_out", distribution="untruncated_normal", seed=seed
    )


def released_linear(seed: int | None = None) -> keras.initializers.Initializer:
    """The released code's classifier weights: uniform within `1 / sqrt(fan_in)` (its
    bias is zero).
    """
    return keras.initializers.VarianceScaling(
        1 / 3, mode="fan_in", distribution="uniform", seed=seed
    )


@keras.saving.register_keras_serializable("keras_preact")
class DeltaOrthogonal(keras.initializers.Initializer):
    """An orthogonal matrix in the centre of the kernel, zeros around: the convolution
    keeps the norm of its input.

    `keras.initializers.Orthogonal` makes the flattened kernel orthogonal, which does
    not make the convolution so. For a dense layer the two are the same.

    Args:
        gain: Factor on the matrix.
        seed: As in Keras.

    Shapes: `(size, size, channels in, channels out)` with an odd size, or `(features
        in, features out)`. Norms are kept where
    at least as many channels go out as come in; where fewer do, those of the directions
    that are left.

    Raises:
        ValueError: for a kernel without a centre.

    Example:

    >>> import numpy as np
    >>> kernel = keras.ops.convert_to_numpy(DeltaOrthogonal(seed=0)((3, 3, 4, 8)))
    >>> np.allclose(kernel[1, 1] @ kernel[1, 1].T, np.eye(4), atol=1e-5), np.abs(kernel).sum((2, 3)).round(1)[0].tolist()
    (True, [0.0, 0.0, 0.0])

    Source: Algorithm 1 of arXiv 1806.05393.
    """

    def __init__(self, gain: float = 1.0, seed: int | None = None):
        self.gain = float(gain)
        self.seed = seed

    def __call__(self, shape, dtype=None):
        *sizes, inputs, outputs = shape
        if any(size % 2 == 0 for size in sizes):
            raise ValueError(
                "A delta-orthogonal kernel has a centre: its sizes must be odd. Received: "
                f"shape={tuple(shape)}"
            )
        matrix = keras.initializers.Orthogonal(self.gain, seed=self.seed)((inputs, outputs), dtype)
        matrix = ops.reshape(matrix, (*[1] * len(sizes), inputs, outputs))
        return ops.pad(matrix, [(size // 2, size // 2) for size in sizes] + [(0, 0), (0, 0)])

    def get_config(self):
        return {"gain": self.gain, "seed": self.seed}


class _ForDepth(keras.initializers.Initializer):
    """He initialisation as released, except in the branches, where it depends on the
    number of units in the network.

    Args:
        units: L, the number of units; None where a network fills it in.
        seed: As in Keras.
    """

    def __init__(self, units: int | None = None, seed: int | None = None):
        if units is not None:
            _checks.positive_int(units, "units")
        self.units = units
        self.seed = seed

    def __call__(self, shape, dtype=None):
        return released_he(self.seed)(shape, dtype)

    def of_branch(self, index: int, weights: int) -> keras.initializers.Initializer:
        """Return the initialiser of weight `index` (1, 2, ...) of a branch of so many
        weights.
        """
        units = self.units
        if units is None:
            name = type(self).__name__
            raise ValueError(
                f"A unit by itself needs {name}(units=...), the number of units in its network. "
                "Received: units=None"
            )
        scale = 2.0 * self.variance_factor(index, weights, units)
        if scale == 0:
            return keras.initializers.Zeros()
        return keras.initializers.VarianceScaling(scale, "fan_out", "untruncated_normal", self.seed)

    @staticmethod
    def variance_factor(index: int, weights: int, units: int) -> float:
        """Return what the variance of a weight of a branch is multiplied by."""
        raise NotImplementedError

    def get_config(self):
        return {"units": self.units, "seed": self.seed}


@keras.saving.register_keras_serializable("keras_preact")
class Fixup(_ForDepth):
    """Fixup: initial values with which a residual network trains without normalisation.

    In a branch of m weights, in a network of L units, the last weight starts at 0 and
    every other one with He's values times `L ** (-1 / (2 m - 2))`. The classifier
    starts at 0. The rest of Fixup, scalar shifts and a scalar factor, is an
    arrangement: `kp.models.resnet_cifar(110, **kp.models.FIXUP)` has both.

    Args:
        units: L; None where a network fills it in.
        seed: As in Keras.

    Source: Sec. 3 of arXiv 1901.09321.
    """

    @staticmethod
    def variance_factor(index: int, weights: int, units: int) -> float:
        return 0.0 if index == weights else units ** (-1 / (weights - 1))


@keras.saving.register_keras_serializable("keras_preact")
class DepthScaledHe(_ForDepth):
    """He's values, those of the last weight of every branch times `1 / sqrt(L)`: L
    branches add up to the size of one.

    Gradients then have one size at both ends of thousands of units. With the released
    initialisation, those of a pre-activation network with batch normalisation grow
    towards its start as a power of the number of units.

    Args:
        units: L, the number of units; None where a network fills it in.
        seed: As in Keras.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(110, kernel_initializer=DepthScaledHe(), input_shape=(8, 8, 1))
    >>> model.get_config()["kernel_initializer"]["config"]
    {'units': None, 'seed': None}

    Source: Sec. 2.3 of Radford et al., "Language Models are Unsupervised Multitask
        Learners", 2019; the analysis is that of
    arXiv 1803.01719.
    """

    @staticmethod
    def variance_factor(index: int, weights: int, units: int) -> float:
        return 1 / units if index == weights else 1.0


def of_branch(initializer, index: int, weights: int) -> keras.initializers.Initializer:
    """Return the initialiser of one weight of a branch: for most initialisers,
    themselves.
    """
    return (
        initializer.of_branch(index, weights) if isinstance(initializer, _ForDepth) else initializer
    )


def of_classifier(initializer) -> keras.initializers.Initializer:
    """Return the initialiser of the classifier of a network whose other kernels
    `initializer` fills.
    """
    if isinstance(initializer, Fixup):
        return keras.initializers.Zeros()
    return spawn(released_linear(seed_of(initializer)), "head")


def of_network(initializer, units: int) -> keras.initializers.Initializer:
    """Return the initialiser for the kernels of a network of so many units."""
    if isinstance(initializer, _ForDepth) and initializer.units is None:
        return type(initializer)(units, initializer.seed)
    return initializer


def seed_of(initializer: keras.initializers.Initializer) -> int | None:
    """Return the seed that `initializer` was given, itself or in a `SeedGenerator`;
    None if it was given none.
    """
    seed = initializer.get_config().get("seed")
    if isinstance(seed, dict):
        seed = seed["config"]["seed"]
    return seed if isinstance(seed, int) else None


def spawn(
    initializer: keras.initializers.Initializer, *place: object
) -> keras.initializers.Initializer:
    """Return a copy of `initializer` that draws values of its own at `place`.

    A Keras initialiser is stateless: called twice, it returns the same values twice, so
    that layers sharing one would start equal. A copy of an unseeded one gets a new
    random seed; a seeded one gets a seed that follows from its own and `place`.
    """
    config = initializer.get_config()
    seed = seed_of(initializer)
    if seed is not None:
        config["seed"] = derive_seed(seed, *place)
    return type(initializer).from_config(config)


def derive_seed(seed: int, *place: object) -> int:
    """Return a seed for `place` that follows from `seed`: another one at every place,
    the same on every machine.

    The order of derivations does not matter: weight `a` of unit `b` gets the seed of
    unit `b`'s weight `a`.
    """
    digest = hashlib.sha256(repr(place).encode()).digest()
    return (seed + int.from_bytes(digest[:4], "little")) % 2**31
