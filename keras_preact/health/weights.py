"""What is watched: every trainable weight of a model by name, with those of stacked units one by one."""

import dataclasses
import re

import keras
import numpy as np

from keras_preact.stacks import UnitStack
from keras_preact.units import ResidualUnit


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a weight stands.

    Args:
        name: Path of the weight. In a stack that of the unit's own: `stage1_unit3/branch/conv_1/kernel`.
        group: Its unit, or its layer where it is in none.
        in_unit: Whether `group` is a residual unit.
    """

    name: str
    group: str
    in_unit: bool

    @property
    def section(self) -> str:
        """What a warning is given once for: the units of a stage (`stage1`), or the layer."""
        return re.sub(r"_?(unit)?_?\d*$", "", self.group) or self.group if self.in_unit else self.group


def owners(model: keras.Model) -> dict[int, keras.Layer]:
    """Return id of a variable to the `ResidualUnit` or `UnitStack` that it belongs to."""
    kinds = (ResidualUnit, UnitStack)
    found = (layer for layer in model._flatten_layers() if isinstance(layer, kinds))
    return {id(variable): layer for layer in found for variable in layer.variables}


def places(path: str, owner: keras.Layer | None) -> list[Place]:
    """Return the places of a variable with this `path`: as many as units where `owner` is a stack."""
    if owner is None:
        return [Place(path, path.rsplit("/", 1)[0], in_unit=False)]
    scopes = path.split("/")
    at = scopes.index(owner.name)
    units = owner.unit_names if isinstance(owner, UnitStack) else [owner.name]
    groups = ["/".join([*scopes[:at], unit]) for unit in units]
    inside = "/".join(scopes[at + 1 :])
    return [Place(f"{group}/{inside}", group, in_unit=True) for group in groups]


class Watched:
    """The trainable weights of a model in order; a stacked one counts as many times as the stack has units.

    Attributes:
        variables: The variables.
        stacked: For each of them, whether its leading axis is one of units.
        places: `Place` of each weight; n of them.
        kernels: Which of them are kernels, `(n,)`.
    """

    def __init__(self, model: keras.Model):
        owner = owners(model)
        self.variables: list[keras.Variable] = list(model.trainable_variables)
        self.stacked = [isinstance(owner.get(id(variable)), UnitStack) for variable in self.variables]
        self.places: list[Place] = []
        kernels: list[bool] = []
        for variable, stacked in zip(self.variables, self.stacked, strict=True):
            own = places(variable.path, owner.get(id(variable)))
            self.places += own
            kernels += [len(variable.shape) - stacked > 1] * len(own)
        self.kernels = np.array(kernels, bool)

    def group_norms(self, norms: np.ndarray) -> dict[str, float]:
        """Return the norm of each group from those of its weights; of the units alone where there are any."""
        units = any(place.in_unit for place in self.places)
        squares: dict[str, float] = {}
        for place, norm in zip(self.places, norms, strict=True):
            if place.in_unit or not units:
                squares[place.group] = squares.get(place.group, 0.0) + float(norm) ** 2
        return {group: square**0.5 for group, square in squares.items()}
