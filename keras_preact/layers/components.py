"""Components: the settings that all layers of a network share, which make the normalisations
and activations of its stem, units and head.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import keras

from keras_preact import initializers
from keras_preact.layers import chains
from keras_preact.layers.batch_norm import BatchNormalization

#: A value of `use_bias`: no bias if a normalisation right after the weight would remove it.
UNLESS_NORM = "unless_norm"


@dataclasses.dataclass(frozen=True)
class Components:
    """What the components of an arrangement are in a network.

    Args:
        normalization: Result of `chains.get_normalization`.
        activation: Result of `chains.get_activation`.
        use_bias: Whether weights have a bias: True, False or `UNLESS_NORM`.
        data_format: `"channels_last"` or `"channels_first"`.
        dtype: The dtype policy.
    """

    normalization: chains.Normalization
    activation: Callable
    use_bias: bool | str
    data_format: str
    dtype: Any

    def make(
        self, names: Iterable[str], axis: int, channels: int, name="{}", *, gamma_initializer=None
    ) -> list[keras.Layer]:
        """Make components of an arrangement.

        Args:
            names: Names of the components, such as `("norm", "activation")`.
            axis: Axis of the channels.
            channels: Number of channels.
            name: Name of each layer, with `{}` for the name of the component.
            gamma_initializer: Initialiser of gamma, for the normalisations that have
                one; None for their own.
        """
        layers: list[keras.Layer] = []
        names = tuple(names)
        for i, component in enumerate(names):
            layer_name = name.format(component) + "_again" * names[:i].count(component)
            settings: dict = {"name": layer_name, "dtype": self.dtype}
            if component == "norm":
                layers += chains.normalization(
                    self.normalization,
                    axis,
                    channels,
                    gamma_initializer=gamma_initializer,
                    **settings,
                )
                if layers and isinstance(layers[-1], BatchNormalization):
                    is_relu = self.activation is keras.activations.relu
                    # at inference TensorFlow may compute both in one kernel
                    layers[-1].relu_follows = is_relu and names[i + 1 : i + 2] == ("activation",)
            elif component == "activation":
                layers.append(chains.activation_layer(self.activation, **settings))
            else:
                layers.append({"shift": chains.Shift, "scale": chains.Scale}[component](**settings))
        return layers

    def has_bias(self, after: list[keras.Layer]) -> bool:
        """Whether a weight has a bias if the layers of `after` follow it."""
        if self.use_bias == UNLESS_NORM:
            return not (after and chains.is_norm(after[0]))
        return bool(self.use_bias)


@dataclasses.dataclass(frozen=True)
class Weights:
    """The settings of the weights of a unit.

    Args:
        kernel_initializer, bias_initializer: Initialisers; each weight draws its own
            values.
        kernel_regularizer: Regulariser of the kernels, or None.
        data_format, dtype: The settings that `Components` has, too.
    """

    kernel_initializer: Any
    kernel_regularizer: Any
    bias_initializer: Any
    data_format: str
    dtype: Any

    def at(self, place: str, bias: str | None = None) -> dict[str, Any]:
        """Return the settings of the weight at a place of the unit.

        Args:
            place: Name of the weight. Seeds are derived from it.
            bias: The place for the seed of the bias, if it is another one.
        """
        own = initializers.spawn(self.bias_initializer, bias or place, "bias")
        return {**self.kernel_at(place), "bias_initializer": own}

    def kernel_at(self, place: str) -> dict[str, Any]:
        """Return the settings of a weight without those of its bias."""
        return {
            "kernel_initializer": initializers.spawn(self.kernel_initializer, place),
            "kernel_regularizer": self.kernel_regularizer,
            "data_format": self.data_format,
            "dtype": self.dtype,
        }
