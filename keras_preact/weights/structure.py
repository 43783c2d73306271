"""Whether a network computes what another library's does: equal names and shapes of
weights do not say so.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_preact import _layers
from keras_preact.models.network import ResidualNetwork, Stage

#: What a network's config holds that no converter's result depends on: sizes that it takes over,
#: and what acts in training or on the way of computing alone.
FREE = frozenset(
    {
        *(
            "name",
            "frozen_layers",
            "stages",
            "stem_filters",
            "block",
            "input_shape",
            "classes",
            "include_top",
            "pooling",
        ),
        *(
            "classifier_activation",
            "data_format",
            "dtype",
            "stacked",
            "execution",
            "remat",
            "unroll",
        ),
        *(
            "dropout",
            "dropout_at",
            "stochastic_depth",
            "kernel_initializer",
            "bias_initializer",
            "zero_init_last",
        ),
    }
)


def check_computes_as(model: ResidualNetwork, options: Mapping[str, Any], target: str) -> None:
    """Check that a network has the structure of `target`.

    Args:
        model: The network.
        options: Of `ResidualNetwork`, beside those that are `FREE`: what `target` has.
        target: In words.

    Raises:
        ValueError: with the options that differ.
    """
    if not isinstance(model, ResidualNetwork):
        raise ValueError(f"`model` must be a ResidualNetwork. Received: model={model!r}")
    config = model.get_config()
    small: dict[str, Any] = {
        "input_shape": (None, None, 3),
        "data_format": "channels_last",
        "classes": 1,
        "stem_filters": 8,
    }
    wanted = ResidualNetwork([Stage(8, 1)], block=config["block"], **small, **options).get_config()
    free = FREE | (
        {"stride_on"} if config["block"] == "basic" else set()
    )  # which always has it in front
    different = {
        key: (config[key], wanted[key])
        for key in wanted.keys() - free
        if _comparable(key, config[key]) != _comparable(key, wanted[key])
    }
    if different:
        described = "; ".join(
            f"{key}={ours!r} where it has {theirs!r}"
            for key, (ours, theirs) in sorted(different.items())
        )
        raise ValueError(
            f"The network {model.name!r} does not compute what {target} does: {described}"
        )


def stages(model: ResidualNetwork) -> list[Stage]:
    """Return the stages of a network."""
    return [Stage(*stage) for stage in model.get_config()["stages"]]


def in_format(
    shape: Sequence[int | None], source: str | None, target: str | None
) -> tuple[int | None, ...]:
    """Return the shape of an image in another data format; None is Keras' own."""
    source, target = (
        keras.config.image_data_format() if name is None else name for name in (source, target)
    )
    if source == target:
        return tuple(shape)
    return (shape[-1], *shape[:-1]) if target == "channels_first" else (*shape[1:], shape[0])


def _comparable(key: str, value):
    """Return what of an option acts on the outputs."""
    if key == "normalization":
        layers = _layers.Normalization(value).make(-1, 64, name="norm")
        acting = ("epsilon", "center", "scale", "groups", "rms_scaling", "renorm")
        return [
            (type(layer).__name__, {k: v for k, v in layer.get_config().items() if k in acting})
            for layer in layers
        ]
    if key == "shortcut":
        return (
            value["class_name"],
            value["config"].get("shortcut"),
            value["config"].get("residual"),
        )
    return "projection" if (key, value) == ("shape_shortcut", "auto") else value
