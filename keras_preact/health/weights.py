"""The trainable weights of a model by name. A stacked weight has a name per unit."""

import dataclasses

import keras
import numpy as np

from keras_preact.stacks import UnitStack
from keras_preact.units import ResidualUnit


@dataclasses.dataclass(frozen=True)
class WeightPlace:
    """The place of a weight.

    Args:
        name: Path of the weight; in a stack, the path in the unit:
            `stage1_unit3/branch/conv_1/kernel`.
        group: Path of its unit, or of its layer if it is in no unit.
        in_unit: Whether `group` is a residual unit.
    """

    name: str
    group: str
    in_unit: bool


def owners(model: keras.Model) -> dict[int, keras.Layer]:
    """Return the `ResidualUnit` or `UnitStack` of each variable, by the variable's id."""
    kinds = (ResidualUnit, UnitStack)
    found = (layer for layer in model._flatten_layers() if isinstance(layer, kinds))
    return {id(variable): layer for layer in found for variable in layer.variables}


def places(path: str, owner: keras.Layer | None) -> list[WeightPlace]:
    """Return the place of a variable with this `path`, for a stack one per unit."""
    if owner is None:
        return [WeightPlace(path, path.rsplit("/", 1)[0], in_unit=False)]
    scopes = path.split("/")
    at = scopes.index(owner.name)
    units = owner.unit_names if isinstance(owner, UnitStack) else [owner.name]
    groups = ["/".join([*scopes[:at], unit]) for unit in units]
    inside = "/".join(scopes[at + 1 :])
    return [WeightPlace(f"{group}/{inside}", group, in_unit=True) for group in groups]


class Watched:
    """The trainable weights of a model in order. A stacked weight counts once per unit.

    Attributes:
        variables: The variables.
        stacked: Whether the leading axis of each variable counts units.
        places: `WeightPlace` of each of the n weights.
        kernels: Mask of the weights that are kernels, `(n,)`.
    """

    def __init__(self, model: keras.Model):
        owner = owners(model)
        self.variables: list[keras.Variable] = list(model.trainable_variables)
        self.stacked = [
            isinstance(owner.get(id(variable)), UnitStack) for variable in self.variables
        ]
        self.places: list[WeightPlace] = []
        kernels: list[bool] = []
        for variable, stacked in zip(self.variables, self.stacked, strict=True):
            weight_places = places(variable.path, owner.get(id(variable)))
            self.places += weight_places
            kernels += [len(variable.shape) - stacked > 1] * len(weight_places)
        self.kernels = np.array(kernels, bool)

    def group_norms(self, norms: np.ndarray) -> dict[str, float]:
        """Return the norm of each group from the norms of its weights. If there are
        units, only they are groups.
        """
        units = any(place.in_unit for place in self.places)
        squares: dict[str, float] = {}
        for place, norm in zip(self.places, norms, strict=True):
            if place.in_unit or not units:
                squares[place.group] = squares.get(place.group, 0.0) + float(norm) ** 2
        return {group: square**0.5 for group, square in squares.items()}
