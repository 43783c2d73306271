"""Load and extract a network's weights by a table of names, all of them or none."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import keras
import numpy as np
from keras import ops

from keras_preact._paths import below
from keras_preact.dropout import is_rate
from keras_preact.stacks import LayerStack


@dataclasses.dataclass(frozen=True)
class Transform:
    """How the axes of an array change between a source and this package.

    Args:
        to_ours: Function from the source's array to ours.
        to_theirs: Its inverse.
    """

    to_ours: Callable[[np.ndarray], np.ndarray]
    to_theirs: Callable[[np.ndarray], np.ndarray]


SAME = Transform(lambda array: array, lambda array: array)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row of the table from our names to a source's.

    Args:
        ours: Our name, a path from `named`.
        theirs: The name in the source.
        transform: How the axes change.
    """

    ours: str
    theirs: str
    transform: Transform = SAME


#: Paths of our weights that may have another shape in the source: the stem for other channels, the
#: classifier for other classes.
STEM = "stem_conv/kernel"
CLASSIFIER = "head_classifier/"

#: A message lists this many names of each kind; the attributes of a `WeightsMismatch` hold all.
SHOWN = 12


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """One weight of a network: a variable, or one unit's slice of a stack's variable.

    Args:
        variable: The variable that holds the values.
        index: Number of the unit within a stack. None: the whole variable.
    """

    variable: keras.Variable
    index: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.variable.shape if self.index is None else self.variable.shape[1:])

    def value(self) -> np.ndarray:
        value = ops.convert_to_numpy(self.variable.value)
        return np.array(value if self.index is None else value[self.index])

    def assign(self, value: np.ndarray) -> None:
        assign({self: value})


def assign(values: Mapping[Place, np.ndarray]) -> None:
    """Assign values to many weights. Each variable is written once."""
    stacked: dict[int, tuple[keras.Variable, np.ndarray]] = {}
    for place, value in values.items():
        variable = place.variable
        if place.index is None:
            variable.assign(value)
            continue
        if id(variable) not in stacked:
            stacked[id(variable)] = variable, np.array(ops.convert_to_numpy(variable.value))
        stacked[id(variable)][1][place.index] = value
    for variable, array in stacked.values():
        variable.assign(array)


def named(model: keras.Model) -> dict[str, Place]:
    """Return every weight of a network by its path. Stacked units have their own paths.

    Args:
        model: A network of residual units. Seed states do not count as weights.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(20, stacked=True, input_shape=(8, 8, 1))
    >>> place = kp.weights.named(model)["stage1_unit3/branch/conv_1/kernel"]
    >>> place.shape, place.value().dtype
    ((3, 3, 16, 16), dtype('float32'))
    """
    places: dict[str, Place] = {}
    for layer in model.layers:
        names, _, weights, _ = variables_of(layer)
        for i, name in enumerate(names):
            index = i if isinstance(layer, LayerStack) else None
            places |= {f"{name}/{path}": Place(weight, index) for path, weight in weights.items()}
    return places


def variables_of(
    layer: keras.Layer,
) -> tuple[list[str], keras.Layer, dict[str, keras.Variable], list[keras.Variable]]:
    """Return the name of a layer, or the names of a stack's units; the layer or the
    stack's template; the weights by their path below it; and the states of the seeds.
    """
    names, owner, pairs = [layer.name], layer, [(weight, weight) for weight in layer.variables]
    if isinstance(layer, LayerStack):
        names, owner, pairs = layer.unit_names, layer.template, layer.stacked_variables
    ids = {id(weight) for weight in owner.weights}
    weights = {below(owner, weight): variable for weight, variable in pairs if id(weight) in ids}
    others = [variable for weight, variable in pairs if id(weight) not in ids]
    # a copy starts with the rates of its configuration, which may be others
    return names, owner, weights, [variable for variable in others if not is_rate(variable)]


class WeightsMismatch(ValueError):
    """The weights of a source and of a network do not fit each other.

    Attributes:
        missing: Paths of the network's weights that the source lacks.
        left_over: Names of the source's weights that the network lacks.
        shapes: Path to two shapes, the network's and the source's.
    """

    def __init__(
        self,
        what: str,
        *,
        missing: Sequence[str] = (),
        left_over: Sequence[str] = (),
        shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] | None = None,
    ):
        self.missing = list(missing)
        self.left_over = list(left_over)
        self.shapes = dict(shapes or {})
        sizes = [
            f"{path} is {ours} here and {theirs} there"
            for path, (ours, theirs) in self.shapes.items()
        ]
        problems = (
            ("missing", self.missing),
            ("left over", self.left_over),
            ("of another shape", sizes),
        )
        super().__init__(
            f"{what} " + "; ".join(_listed(problem, items) for problem, items in problems if items)
        )


def _listed(problem: str, items: Sequence[str]) -> str:
    hidden = len(items) - SHOWN
    more = f" and {hidden} more" if hidden > 0 else ""
    return f"{len(items)} {problem}: {', '.join(items[:SHOWN])}{more}"


def load(
    model: keras.Model,
    state: Mapping[str, np.ndarray],
    entries: Iterable[Entry],
    *,
    new_classifier: bool = False,
) -> None:
    """Load a source's weights into a network: all of them, or none.

    A stem for one channel gets the source's kernel summed over its channels. For other
    channels the kernel is repeated and scaled by `channels there / channels here`: an
    image with equal channels gives the same outputs. A classifier for another number of
    classes keeps its own weights.

    Args:
        model: A network of residual units.
        state: The source's names and arrays.
        entries: The table. Rows for weights that neither side has are ignored.
        new_classifier: Whether the classifier keeps its own weights if the source has
            none.

    Raises:
        WeightsMismatch: if a weight of either side has no counterpart, or shapes
            differ. The network then stays unchanged.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(20, input_shape=(8, 8, 1))
    >>> entries = [kp.weights.Entry(path, f"mine/{path}") for path in kp.weights.named(model)]
    >>> state = kp.weights.extract(model, entries)
    >>> kp.weights.load(model, state, entries)
    """
    places = named(model)
    table = {
        entry.ours: entry for entry in entries if entry.ours in places and entry.theirs in state
    }
    used = {entry.theirs for entry in table.values()}
    missing = [
        path
        for path in places
        if path not in table and not (new_classifier and path.startswith(CLASSIFIER))
    ]
    left_over = [name for name in state if name not in used]
    values: dict[str, np.ndarray] = {}
    shapes = {}
    for path, entry in table.items():
        shape = places[path].shape
        array = np.asarray(state[entry.theirs])
        try:
            value = entry.transform.to_ours(array)
        except ValueError:  # an array of another rank
            value = array
        if value.shape == shape:
            values[path] = value
        elif path == STEM and shape[:2] + shape[3:] == value.shape[:2] + value.shape[3:]:
            values[path] = of_other_channels(value, shape[2])
        elif not (path.startswith(CLASSIFIER) and shape[:-1] == value.shape[:-1]):
            shapes[path] = (shape, array.shape)
    if missing or left_over or shapes:
        raise WeightsMismatch(
            f"The weights do not fit the network {model.name!r}, which stays as it is:",
            missing=missing,
            left_over=left_over,
            shapes=shapes,
        )
    assign({places[path]: value for path, value in values.items()})


def of_other_channels(kernel: np.ndarray, channels: int) -> np.ndarray:
    """Adapt a stem's kernel, (height, width, in, out), to other input channels."""
    available = kernel.shape[2]
    if channels == 1:
        return kernel.sum(axis=2, keepdims=True)
    return kernel[:, :, np.arange(channels) % available] * (available / channels)


def extract(model: keras.Model, entries: Iterable[Entry]) -> dict[str, np.ndarray]:
    """Return a network's weights under a source's names and in its order of axes.

    Args:
        model: A network of residual units.
        entries: The table. Rows for weights that the network lacks are ignored.

    Raises:
        WeightsMismatch: for weights without a row; `missing` holds their paths.
    """
    places = named(model)
    table = {entry.ours: entry for entry in entries if entry.ours in places}
    if missing := [path for path in places if path not in table]:
        raise WeightsMismatch(
            f"The format has no names for weights of the network {model.name!r}:", missing=missing
        )
    return {
        entry.theirs: np.asarray(entry.transform.to_theirs(places[path].value()), order="C")
        for path, entry in table.items()
    }
