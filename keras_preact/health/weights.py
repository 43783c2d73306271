"""The trainable weights of a model by name. A stacked weight has a name per unit."""

import dataclasses

import keras
import numpy as np
from keras import ops

from keras_preact.backend import keras_private
from keras_preact.stacks import LayerStack
from keras_preact.units import ResidualUnit


@dataclasses.dataclass(frozen=True)
class WeightPlace:
    """The place of a weight.

    Args:
        name: Path of the weight; in a stack, the path in the unit:
            `stage1_unit3/branch/conv_1/kernel`.
        group: Path of its unit, or of its layer if it is in no unit.
        in_unit: Whether `group` is a residual unit, or a unit of a stack.

    The names of nested models are the first parts of `name` and `group`, because their
    layers may have the names of other layers.
    """

    name: str
    group: str
    in_unit: bool


class Places:
    """Finds the places of the weights of a model."""

    def __init__(self, model: keras.Model):
        #: The `ResidualUnit` or `LayerStack` of each variable, by the variable's id.
        self.owners: dict[int, keras.Layer] = {}
        #: Names of the nested models that hold a variable, by its id: `encoder/`.
        self._models: dict[int, str] = {}
        self._add(model, "")

    def _add(self, layer: keras.Layer, models: str) -> None:
        for inner in keras_private.sublayers(layer, nested=False):
            within = f"{models}{inner.name}/" if isinstance(inner, keras.Model) else models
            if isinstance(inner, ResidualUnit | LayerStack):
                self.owners |= {id(variable): inner for variable in inner.variables}
            if within != models:
                self._models |= {id(variable): within for variable in inner.variables}
            self._add(inner, within)

    def of(self, variable: keras.Variable, path: str | None = None) -> list[WeightPlace]:
        """Return the place of a variable, for a stack one per unit.

        Args:
            variable: The variable.
            path: Path that replaces the variable's.
        """
        path, models = path or variable.path, self._models.get(id(variable), "")
        path = path if path.startswith(models) else models + path
        owner = self.owners.get(id(variable))
        if owner is None:
            return [WeightPlace(path, path.rsplit("/", 1)[0], in_unit=False)]
        scopes = path.split("/")
        at = scopes.index(owner.name, models.count("/"))
        units = owner.unit_names if isinstance(owner, LayerStack) else [owner.name]
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
        find = Places(model)
        self.variables: list[keras.Variable] = list(model.trainable_variables)
        self.stacked = [
            isinstance(find.owners.get(id(variable)), LayerStack) for variable in self.variables
        ]
        self.places: list[WeightPlace] = []
        kernels: list[bool] = []
        for variable, stacked in zip(self.variables, self.stacked, strict=True):
            weight_places = find.of(variable)
            self.places += weight_places
            kernels += [len(variable.shape) - stacked > 1] * len(weight_places)
        self.kernels = np.array(kernels, bool)

    def zero_kernels(self) -> set[str]:
        """Return the names of the kernels that are 0."""
        zero = []
        for variable, stacked in zip(self.variables, self.stacked, strict=True):
            axes = tuple(range(int(stacked), len(variable.shape)))
            are_zero = ops.convert_to_numpy(ops.all(ops.equal(variable, 0), axis=axes))
            zero += np.atleast_1d(are_zero).tolist()
        rows = zip(self.places, zero & self.kernels, strict=True)
        return {place.name for place, is_zero in rows if is_zero}

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
