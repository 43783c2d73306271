"""A transformer that classifies images or sequences. Its residual units are attention and
MLP in turn.
"""

import inspect
from collections.abc import Sequence
from typing import Unpack

import keras
from keras import ops

from keras_preact import _checks, initializers
from keras_preact.layers import chains, spatial
from keras_preact.models import base
from keras_preact.models.network import image_shape
from keras_preact.models.network_options import TransformerOptions
from keras_preact.transformer import TransformerUnit
from keras_preact.units import ResidualUnit


@keras.saving.register_keras_serializable("keras_preact")
class Patches(keras.Layer):
    """Cuts images into squares and flattens each square to a token. The order is row by
    row from the top, both for squares in the image and for pixels in a square.

    Args:
        size: Side of a square in pixels; divides height and width.
        data_format: `"channels_last"` or `"channels_first"`; None for Keras' setting.

    Input: `(batch, height, width, channels)`, or with the channels second; output:
        `(batch, tokens, size * size * channels)`.

    Source: Sec. 3.1 of arXiv 2010.11929.
    """

    def __init__(self, size: int, data_format: str | None = None, **kwargs):
        super().__init__(**kwargs)
        _checks.positive_int(size, "size")
        self.size = _checks.plain(size)
        self.data_format = spatial.data_format_of(data_format)

    def build(self, input_shape):
        sides = input_shape[2:] if self.data_format == "channels_first" else input_shape[1:-1]
        if any(side is None or side % self.size for side in sides):
            raise ValueError(
                f"Height and width must be known multiples of {self.size}, the size of a square. "
                f"Received: an input of shape {tuple(input_shape)}, "
                f"data_format={self.data_format!r}"
            )

    def call(self, x):
        if self.data_format == "channels_first":
            x = ops.moveaxis(x, 1, -1)
        _, height, width, channels = x.shape
        rows, columns = height // self.size, width // self.size
        x = ops.reshape(x, (-1, rows, self.size, columns, self.size, channels))
        return ops.reshape(
            ops.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, rows * columns, self.size**2 * channels)
        )

    def compute_output_shape(self, input_shape):
        batch, *sides = input_shape
        channels = sides.pop(0 if self.data_format == "channels_first" else -1)
        return batch, (sides[0] // self.size) * (sides[1] // self.size), self.size**2 * channels

    def get_config(self):
        return super().get_config() | {"size": self.size, "data_format": self.data_format}


@keras.saving.register_keras_serializable("keras_preact")
class Positions(chains.SameShape):
    """Adds a trained vector to each token, a different one at each position.

    Args:
        seed: Seed of the initial values, which are normal with a standard deviation of
            0.02.

    Input and output: `(batch, tokens, features)`.

    Source: Sec. 3.1 of arXiv 2010.11929.
    """

    def __init__(self, seed: int | None = None, **kwargs):
        super().__init__(**kwargs)
        self.seed = seed
        self.initializer = keras.initializers.RandomNormal(stddev=0.02, seed=seed)

    def build(self, input_shape):
        self.positions = self.add_weight(
            shape=tuple(input_shape[1:]), initializer=self.initializer, name="positions"
        )

    def call(self, x):
        return x + self.positions

    def get_config(self):
        return super().get_config() | {"seed": self.seed}


@keras.saving.register_keras_serializable("keras_preact")
class TransformerNetwork(base.UnitNetwork):
    """A transformer for classification; `transformer` is its builder.

    Args:
        depth: Number of layers. Each has two units: attention and MLP.
        width: Features of a token.
        num_heads: Number of attention heads.
        input_shape: Shape of an image in the order of `data_format`, or `(tokens,
            features)`; without the batch.
        patch_size: Side of the squares that become tokens; None for an input of tokens.
        classes: Outputs of the classifier.
        classifier_activation: None for logits, or `"softmax"`, ...
        mean, std, data_format, dtype, name: See `ResidualNetwork`.
        stochastic_depth: Rate of the last unit; unit l of L has `l / L` times this rate.
            None: no stochastic depth.
        **unit_options: Options of `TransformerUnit`: arrangement, shortcut, mlp, hidden,
            normalization, dropout, dropout_varies, causal, use_bias, bias_initializer,
            kernel_initializer.

    Attributes: `segments`, `units`, `unit_outputs` and `logits`, see `UnitNetwork`.

    Layers: `preprocessing`, `stem_patches`, `stem_dense`, `stem_positions`,
        `stem_norm`, `layer1_attention`, `layer1_mlp`,
    `layer2_attention`, ..., `head_norm`, `head_pool` (the mean over the tokens),
    `head_classifier`, `head_predictions`, as far as they exist.

    Source: arXiv 2002.04745; the embedding of images: arXiv 2010.11929.
    """

    def __init__(
        self,
        depth: int,
        *,
        width: int,
        num_heads: int,
        input_shape: Sequence[int | None],
        patch_size: int | None,
        classes: int,
        classifier_activation=None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        data_format: str | None = None,
        dtype=None,
        name: str | None = None,
        stochastic_depth: float | None = None,
        **unit_options,
    ):
        _checks.positive_int(depth, "depth")
        _checks.positive_int(classes, "classes")
        depth, classes, input_shape = _checks.plain((depth, classes, tuple(input_shape)))
        data_format = spatial.data_format_of(data_format)
        policy = keras.config.dtype_policy() if dtype is None else keras.dtype_policies.get(dtype)
        input_shape = _check_input_shape(input_shape, patch_size, data_format)
        parameters = inspect.signature(TransformerUnit).parameters.values()
        names = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
        for unknown in unit_options.keys() - set(names):
            raise ValueError(_checks.unknown_option(unknown, names))
        # One unit checks the options, and turns them into the form of a config.
        template = TransformerUnit(
            width,
            num_heads=num_heads,
            stochastic_depth=stochastic_depth,
            dtype=policy,
            **unit_options,
        )
        kernel = initializers.of_network(template.kernel_initializer, 2 * depth)

        excluded = ("name", "trainable", "dtype", "frozen_layers")
        arguments = {
            "depth": depth,
            "patch_size": patch_size,
            "classes": classes,
            "data_format": data_format,
            **{key: value for key, value in template.get_config().items() if key not in excluded},
        }
        super().__init__(
            input_shape,
            axis=spatial.channel_axis(data_format, len(input_shape) + 1),
            mean=mean,
            std=std,
            stem=_stem(template, kernel, patch_size, data_format),
            segments=_make_units(template, depth, kernel),
            head=_head(template),
            classes=classes,
            activation=classifier_activation,
            kernel=kernel,
            policy=policy,
            arguments=arguments,
            name=name,
        )


def _stem(template: TransformerUnit, kernel, patch_size: int | None, data_format: str) -> list:
    """Return the layers from the pixels or tokens to the first unit."""
    unit, policy = template.attention, template.dtype_policy
    patches = (
        [Patches(patch_size, data_format, name="stem_patches", dtype=policy)] if patch_size else []
    )
    embedding = keras.layers.Dense(
        unit.filters,
        use_bias=bool(unit.use_bias),
        kernel_initializer=initializers.spawn(kernel, "stem"),
        bias_initializer=initializers.spawn(unit.bias_initializer, "stem"),
        kernel_regularizer=unit.kernel_regularizer,
        name="stem_dense",
        dtype=policy,
    )
    seed = initializers.seed_of(kernel)
    seed = None if seed is None else initializers.derive_seed(seed, "positions")
    positions = Positions(seed, name="stem_positions", dtype=policy)
    after = unit.components.make(unit.arrangement.stem, -1, unit.filters, "stem_{}")
    return [*patches, embedding, positions, *after]


def _head(template: TransformerUnit) -> list[keras.Layer]:
    """Return the layers from the last unit to the classifier."""
    unit = template.attention
    pool = keras.layers.GlobalAveragePooling1D(
        data_format="channels_last", name="head_pool", dtype=template.dtype_policy
    )
    return [*unit.components.make(unit.arrangement.head, -1, unit.filters, "head_{}"), pool]


def _make_units(template: TransformerUnit, depth: int, kernel) -> list[ResidualUnit]:
    last_rate = template.attention.stochastic_depth
    units: list[ResidualUnit] = []
    for layer in range(1, depth + 1):
        for unit in template.units:
            name = f"layer{layer}_{unit.name}"
            index = len(units) + 1
            rate = None if last_rate is None else last_rate * index / (2 * depth)
            own = unit.at(
                name,
                shortcut=unit.h.of_unit(index, 2 * depth),
                kernel_initializer=initializers.spawn(kernel, name),
                stochastic_depth=rate,
            )
            units.append(own)
    return units


def _check_input_shape(shape, patch_size: int | None, data_format: str) -> tuple[int, ...]:
    shape = tuple(shape)
    axes = ["tokens", "features"]
    if patch_size is not None:
        _checks.positive_int(patch_size, "patch_size")
        axes = ["height", "width"]
        axes.insert(0 if data_format == "channels_first" else 2, "channels")
    are_known = [_checks.is_int(size) and size > 0 for size in shape]
    if len(shape) != len(axes) or not all(are_known):
        raise ValueError(
            f"With patch_size={patch_size}, `input_shape` must be ({', '.join(axes)}), all "
            f"positive integers: every position has its own vector. Received: "
            f"input_shape={shape}, patch_size={patch_size}"
        )
    return shape


def transformer(
    depth: int,
    *,
    width: int = 64,
    num_heads: int = 4,
    classes: int = 10,
    input_shape: Sequence[int] | None = None,
    patch_size: int | None = 4,
    **options: Unpack[TransformerOptions],
) -> TransformerNetwork:
    """Build a transformer of pre-activation residual units. `arrangement="post_norm"`
    builds the original transformer's units instead.

    Args:
        depth: Number of layers. Each has an attention and an MLP unit.
        width: Features of a token.
        num_heads: Number of attention heads; divides `width`.
        classes: Outputs of the classifier.
        input_shape: 32 x 32 x 3 by default, in the order of `data_format`; `(tokens,
            features)` with `patch_size=None`.
        patch_size: Side of the squares of an image that become tokens.
        **options: Options of `TransformerNetwork` and `TransformerUnit`.

    Raises:
        ValueError: for sizes that do not fit, and if `TransformerUnit` raises one.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.models.transformer(2, width=16, input_shape=(8, 8, 1))
    >>> [unit.name for unit in model.units]
    ['layer1_attention', 'layer1_mlp', 'layer2_attention', 'layer2_mlp']
    >>> [tuple(x.shape) for x in model.unit_outputs][-1], model.output_shape
    ((None, 4, 16), (None, 10))

    Source: arXiv 2002.04745.
    """
    options.setdefault("name", f"transformer{depth}")
    shape = image_shape(input_shape, 32, options.get("data_format"))
    return TransformerNetwork(
        depth,
        width=width,
        num_heads=num_heads,
        classes=classes,
        input_shape=shape,
        patch_size=patch_size,
        **options,
    )
