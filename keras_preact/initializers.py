"""Weight initialisers: the released code's, delta-orthogonal, Fixup, DeepNorm; and seeds
for networks.
"""

import hashlib

import keras
from keras import ops

from keras_preact import _checks


def released_he(seed: int | None = None) -> keras.initializers.Initializer:
    """He initialisation as in the released code: normal, not truncated, with the
    variance `2 / fan_out`.

    `keras.initializers.HeNormal` differs: it is truncated, with `2 / fan_in`.

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
    """An orthogonal matrix in the centre of the kernel, with zeros around it: the
    convolution keeps the norm of its input.

    `keras.initializers.Orthogonal` makes the flattened kernel orthogonal, but not the
    convolution. For a dense layer both are the same.

    Args:
        gain: Factor on the matrix.
        seed: An integer for the same values every time; None for new ones.

    Shapes: `(size, size, channels in, channels out)` with an odd size, or `(features
        in, features out)`. Norms are kept if there are at least as many channels out
        as in.

    Raises:
        ValueError: for an even kernel size, which has no centre.

    Example:

    >>> import numpy as np
    >>> kernel = keras.ops.convert_to_numpy(DeltaOrthogonal(seed=0)((3, 3, 4, 8)))
    >>> np.allclose(kernel[1, 1] @ kernel[1, 1].T, np.eye(4), atol=1e-5)
    True
    >>> np.abs(kernel).sum((2, 3)).round(1)[0].tolist()
    [0.0, 0.0, 0.0]

    Source: Algorithm 1 of arXiv 1806.05393.
    """

    def __init__(self, gain: float = 1.0, seed: int | None = None):
        self.gain = float(gain)
        self.seed = _checks.plain(seed)

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
    """The released He initialisation, except in branches, where it depends on the number
    of units in the network.

    Attributes:
        scales_scores: Whether query and key of attention are scaled, as the other
            weights.

    Args:
        units: L, the number of units. None: the network sets it.
        seed: An integer for the same values every time; None for new ones.
    """

    def __init__(self, units: int | None = None, seed: int | None = None):
        if units is not None:
            _checks.positive_int(units, "units")
        self.units, self.seed = _checks.plain((units, seed))

    scales_scores = True

    def __call__(self, shape, dtype=None):
        return self.scaled(1.0)(shape, dtype)

    def scaled(self, factor: float) -> keras.initializers.Initializer:
        """Return the initialiser with this factor on the variance."""
        scale = 2.0 * factor
        return keras.initializers.VarianceScaling(scale, "fan_out", "untruncated_normal", self.seed)

    def of_branch(self, index: int, weights: int, scores=False) -> keras.initializers.Initializer:
        """Return the initialiser of weight `index` (1, 2, ...) of a branch; `scores` is
        for query and key.
        """
        units = self.units
        if units is None:
            name = type(self).__name__
            raise ValueError(
                f"A unit by itself needs {name}(units=...), the number of units in its network. "
                "Received: units=None"
            )
        is_scaled = self.scales_scores or not scores
        factor = self.variance_factor(index, weights, units) if is_scaled else 1.0
        return self.scaled(factor) if factor else keras.initializers.Zeros()

    @staticmethod
    def variance_factor(index: int, weights: int, units: int) -> float:
        """Return the factor on the variance of a branch's weight."""
        raise NotImplementedError

    def get_config(self):
        return {"units": self.units, "seed": self.seed}


@keras.saving.register_keras_serializable("keras_preact")
class Fixup(_ForDepth):
    """Fixup: initial values that let a residual network train without normalisation.

    In a network of L units with m weights per branch, the last weight of a branch
    starts at 0 and the others with He's values times `L ** (-1 / (2 m - 2))`. The
    classifier starts at 0. Fixup's scalar shifts and factors are an arrangement:
    `kp.models.resnet_cifar(110, **kp.models.FIXUP)` has both.

    Args:
        units: L. None: the network sets it.
        seed: An integer for the same values every time; None for new ones.

    Source: Sec. 3 of arXiv 1901.09321.
    """

    @staticmethod
    def variance_factor(index: int, weights: int, units: int) -> float:
        return 0.0 if index == weights else units ** (-1 / (weights - 1))


@keras.saving.register_keras_serializable("keras_preact")
class DepthScaledHe(_ForDepth):
    """He's values, with the last weight of each branch scaled by `1 / sqrt(L)`: L
    branches add up to the size of one.

    Gradients then have the same size at both ends of thousands of units. With the
    released initialisation, gradients of a pre-activation network with batch
    normalisation grow towards its start as a power of the number of units.

    Args:
        units: L, the number of units. None: the network sets it.
        seed: An integer for the same values every time; None for new ones.

    Example:

    >>> import keras_preact as kp
    >>> he = DepthScaledHe()
    >>> model = kp.models.resnet_cifar(110, kernel_initializer=he, input_shape=(8, 8, 1))
    >>> model.get_config()["kernel_initializer"]["config"]
    {'units': None, 'seed': None}

    Source: Sec. 2.3 of Radford et al., "Language Models are Unsupervised Multitask
        Learners", 2019; analysis: arXiv 1803.01719.
    """

    @staticmethod
    def variance_factor(index: int, weights: int, units: int) -> float:
        return 1 / units if index == weights else 1.0


@keras.saving.register_keras_serializable("keras_preact")
class DeepNorm(_ForDepth):
    """Glorot's normal values times `(4 L) ** (-1 / 4)` in the branches of a transformer
    of L units, except in query and key.

    A layer of a transformer is two units. So this is the `(8 N) ** (-1 / 4)` of an
    encoder or a decoder with N layers. `kp.models.DEEP_NORM` has the shortcut and the
    arrangement that belong to it.

    Args:
        units: L. None: the network sets it.
        seed: An integer for the same values every time; None for new ones.

    Source: Fig. 2 of arXiv 2203.00555.
    """

    scales_scores = False

    def scaled(self, factor):
        return keras.initializers.VarianceScaling(
            factor, "fan_avg", "untruncated_normal", self.seed
        )

    @staticmethod
    def variance_factor(index: int, weights: int, units: int) -> float:
        return (4 * units) ** -0.5


def of_branch(
    initializer, index: int, weights: int, scores: bool = False
) -> keras.initializers.Initializer:
    """Return the initialiser of one weight of a branch. Only initialisers that depend
    on the number of units differ between the weights; `scores` is for query and key.
    """
    if isinstance(initializer, _ForDepth):
        return initializer.of_branch(index, weights, scores)
    return initializer


def of_classifier(initializer) -> keras.initializers.Initializer:
    """Return the classifier's initialiser for an initialiser of the other kernels."""
    if isinstance(initializer, Fixup):
        return keras.initializers.Zeros()
    return spawn(released_linear(seed_of(initializer)), "head")


def of_network(initializer, units: int) -> keras.initializers.Initializer:
    """Return the initialiser for the kernels of a network with this number of units."""
    if isinstance(initializer, _ForDepth) and initializer.units is None:
        return type(initializer)(units, initializer.seed)
    return initializer


def seed_of(initializer: keras.initializers.Initializer) -> int | None:
    """Return the seed of an initialiser or of its `SeedGenerator`; None if it has none."""
    if not isinstance(initializer, keras.initializers.Initializer):
        return None  # a function
    seed = initializer.get_config().get("seed")
    if isinstance(seed, dict):
        seed = seed["config"]["seed"]
    return seed if isinstance(seed, int) else None


def seeded(
    initializer: keras.initializers.Initializer, seed: int | None
) -> keras.initializers.Initializer:
    """Return the initialiser with this seed if it has none and can have one."""
    if seed is None or not isinstance(initializer, keras.initializers.Initializer):
        return initializer
    config = initializer.get_config()
    if "seed" not in config or config["seed"] is not None:
        return initializer
    return type(initializer).from_config(config | {"seed": seed})


def spawn(
    initializer: keras.initializers.Initializer, *place: object
) -> keras.initializers.Initializer:
    """Return a copy of `initializer` with its own values at `place`.

    A Keras initialiser is stateless: it returns the same values on each call, so layers
    that share one would start equal. The copy gets a random seed, or a seed derived
    from the initialiser's seed and `place`. A function is returned as it is.
    """
    if not isinstance(initializer, keras.initializers.Initializer):
        return initializer
    config = initializer.get_config()
    seed = seed_of(initializer)
    if seed is not None:
        config["seed"] = derive_seed(seed, *place)
    return type(initializer).from_config(config)


def derive_seed(seed: int, *place: object) -> int:
    """Return a seed derived from `seed`: different at each place, the same on each
    machine.
    """
    digest = hashlib.sha256(repr(place).encode()).digest()
    return (seed + int.from_bytes(digest[:4], "little")) % 2**31
