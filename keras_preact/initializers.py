"""Weight initialisers: the released code's, and how one initialiser serves many weights."""

import hashlib

import keras


def released_he(seed: int | None = None) -> keras.initializers.Initializer:
    """He initialisation as the released code has it: normal, not truncated, with the variance `2 / fan_out`.

    `keras.initializers.HeNormal` is another one: truncated, with `2 / fan_in`.

    Example:

    >>> kernel = released_he(seed=0)((3, 3, 16, 64))  # height, width, channels in, channels out
    >>> round(float(keras.ops.std(kernel)), 2), (2 / (3 * 3 * 64)) ** 0.5
    (0.06, 0.05892556509887896)

    Source: appendix of arXiv 1603.05027, which follows arXiv 1502.01852; `fan_out` from resnet-1k-layers.
    """
    return keras.initializers.VarianceScaling(2.0, mode="fan_out", distribution="untruncated_normal", seed=seed)


def released_linear(seed: int | None = None) -> keras.initializers.Initializer:
    """The released code's classifier weights: uniform within `1 / sqrt(fan_in)` (its bias is zero)."""
    return keras.initializers.VarianceScaling(1 / 3, mode="fan_in", distribution="uniform", seed=seed)


def seed_of(initializer: keras.initializers.Initializer) -> int | None:
    """Return the seed that `initializer` was given, itself or in a `SeedGenerator`; None if it was given none."""
    seed = initializer.get_config().get("seed")
    if isinstance(seed, dict):
        seed = seed["config"]["seed"]
    return seed if isinstance(seed, int) else None


def spawn(initializer: keras.initializers.Initializer, *place: object) -> keras.initializers.Initializer:
    """Return a copy of `initializer` that draws values of its own at `place`.

    A Keras initialiser is stateless: called twice, it returns the same values twice, so that layers sharing one would start
    equal. A copy of an unseeded one gets a new random seed; a seeded one gets a seed that follows from its own and `place`.
    """
    config = initializer.get_config()
    seed = seed_of(initializer)
    if seed is not None:
        config["seed"] = derive_seed(seed, *place)
    return type(initializer).from_config(config)


def derive_seed(seed: int, *place: object) -> int:
    """Return a seed for `place` that follows from `seed`: another one at every place, the same on every machine."""
    digest = hashlib.sha256(repr((seed, *place)).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
