"""State of the layers inside a layer that makes them itself: frozen or not, quantized or
not. The inner layers' own configurations, which hold it, are not written.
"""

from collections.abc import Collection, Mapping
from typing import Any

import keras

from keras_preact._paths import below
from keras_preact.backend import keras_private


class HoldsLayers(keras.Layer):
    """Base class of layers that make layers. Their configuration holds the paths of the
    frozen layers inside, as `frozen_layers`. With quantized layers inside there is none.
    """

    _frozen_layers: Collection[str] = ()

    def freeze_inside_again(self) -> None:
        """Freeze what the configuration says, at the end of `build`."""
        freeze_inside(self, self._frozen_layers)

    def frozen_paths(self) -> list[str]:
        """Return the paths of the frozen layers inside, also before `build`."""
        return frozen_inside(self) if self.built else list(self._frozen_layers)

    def get_config(self) -> dict[str, Any]:
        check_not_quantized(self)
        return super().get_config() | {"frozen_layers": self.frozen_paths()}

    @classmethod
    def from_config(cls, config: dict[str, Any]):
        config = dict(config)
        paths = config.pop("frozen_layers", ())
        layer = super().from_config(config)
        layer._frozen_layers = tuple(paths)
        return layer


def frozen_inside(layer: keras.Layer) -> list[str]:
    """Return the paths of the frozen layers inside a built layer that is not frozen as a
    whole. Layers without weights do not count.
    """
    if not layer.trainable:
        return []
    return sorted(path for path, inner in _inside(layer).items() if not inner.trainable)


def freeze_inside(layer: keras.Layer, paths: Collection[str]) -> None:
    """Freeze the layers of these paths inside a built layer.

    Raises:
        ValueError: for a path without a layer.
    """
    if not paths:
        return
    inside = _inside(layer)
    if unknown := sorted(set(paths) - inside.keys()):
        raise ValueError(
            f"There is nothing to freeze at these paths inside {layer.name!r}. Received: "
            f"{', '.join(unknown)}"
        )
    for path in paths:
        inside[path].trainable = False


def check_not_quantized(layer: keras.Layer) -> None:
    """Raise a ValueError if a layer inside is quantized: the copy or the file of `layer`
    would lack the variables of the quantized weights.
    """
    inside = keras_private.sublayers(layer)
    if quantized := sorted({inner.name for inner in inside if inner.quantization_mode}):
        raise ValueError(
            f"{layer.name!r} cannot be saved or copied, because its configuration does not hold "
            "that layers inside it are quantized. Save it first and quantize what you load, or "
            f"export it in bfloat16 or int8. Received: quantized {', '.join(quantized)}"
        )


def _inside(layer: keras.Layer) -> dict[str, keras.Layer]:
    return {
        below(layer, inner): inner
        for inner in keras_private.sublayers(layer)
        if inner.path and inner.weights
    }


def check_frozen_together(units: Mapping[str, tuple[bool, Collection[str]]]) -> None:
    """Check that the same layers of all units are frozen.

    Args:
        units: Name of each unit to whether it is trainable, and the paths of the frozen
            layers inside it.
    """
    if len({trainable for trainable, _ in units.values()}) > 1:
        frozen = ", ".join(name for name, (trainable, _) in units.items() if not trainable)
        raise ValueError(f"Freeze all units of a stack, or none. Received: only {frozen} frozen")
    expected = next(iter(units.values()))[1]
    for name, (_, paths) in units.items():
        if different := sorted(set(paths) ^ set(expected)):
            raise ValueError(
                "Freeze the same layers in all units of a stack. Received: not the same state of "
                f"{', '.join(different)} in {next(iter(units))} and {name}"
            )
