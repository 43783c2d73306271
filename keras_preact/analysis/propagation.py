"""Signal propagation: what every unit of a network makes of its input, and of the gradient on the way back."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_preact import _autodiff
from keras_preact._observers import Observer
from keras_preact.analysis import _inputs
from keras_preact.analysis.graph import Addition, Graph
from keras_preact.stacks import UnitStack
from keras_preact.units import ResidualUnit

#: What is seen of every unit, in the order of `_look`.
_FIGURES = (
    *("x_norm", "x_mean", "x_std"),
    *("residual_norm", "residual_mean", "residual_std"),
    *("shortcut_norm", "cut", "dead"),
)


@dataclasses.dataclass(frozen=True)
class Propagation:
    """The signals of a network of L units on a batch. Norms of x and F: per example, the root of the mean of their squares.

    Attributes:
        units: Names of the units, in order.
        x_norm, x_mean, x_std: Of x_0 ... x_L, `(L+1,)`: x_0 is what the first unit reads, x_L what the last one returns.
        residual_norm, residual_mean, residual_std: Of what the branch adds, `(L,)`.
        shortcut_norm: Of what the shortcut adds, `(L,)`; 0 in a plain network.
        cut: Share of the sums that the mapping after the addition sets to zero, `(L,)`: the truncation of Sec. 4.1. 0
            where it is the identity.
        dead: Share of the channels that are 0 for all examples, at all positions, where the branch's first weight reads, `(L,)`.
        gradient_norm: `||dE/dx_l||` of x_0 ... x_L for the whole batch, `(L+1,)`.
        weight_gradients: Name of a weight below its unit to the norms of its gradients, `(L,)`; nan where a unit has none.
        loss: E.
    """

    units: tuple[str, ...]
    x_norm: np.ndarray
    x_mean: np.ndarray
    x_std: np.ndarray
    residual_norm: np.ndarray
    residual_mean: np.ndarray
    residual_std: np.ndarray
    shortcut_norm: np.ndarray
    cut: np.ndarray
    dead: np.ndarray
    gradient_norm: np.ndarray
    weight_gradients: Mapping[str, np.ndarray]
    loss: float

    @property
    def ratio(self) -> np.ndarray:
        """Norm of what the branch adds over that of what the shortcut adds, `(L,)`; infinite in a plain network."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.residual_norm / self.shortcut_norm

    @property
    def gradient_ratio(self) -> float:
        """`||dE/dx_0|| / ||dE/dx_L||`; where the shape changes on the way, sizes of maps of other sizes are compared."""
        return float(self.gradient_norm[0] / self.gradient_norm[-1])

    def to_dict(self) -> dict:
        """Return the figures as JSON can hold them."""
        plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in vars(self).items()}
        plain["units"] = list(self.units)
        plain["weight_gradients"] = {name: norms.tolist() for name, norms in self.weight_gradients.items()}
        return plain


def propagation(
    model: keras.Model, x, labels=None, *, loss: Callable | None = None, training: bool = True
) -> Propagation:
    """Measure the signals of a network on a batch; the network stays as it is.

    Args:
        model: Any Keras model with residual units: one of this package, stacked or not, or one in whose graph two paths that
            start at one tensor are added.
        x: A batch of inputs, or a list for a model with several.
        labels: Classes, one for each example; or what `loss` takes.
        loss: A function `(labels, output)`. None: with labels the cross-entropy, of logits or of probabilities as the model
            returns them, else the mean over the batch of half the squared norm of the output.
        training: Whether normalisations use the batch and dropout drops. At the start of training their moving statistics
            say nothing yet.

    Raises:
        ValueError: for an empty or non-finite batch, a model without residual units, or one that cannot be traced.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(20, input_shape=(8, 8, 1))
    >>> signals = kp.analysis.propagation(model, np.random.default_rng(0).normal(size=(8, 8, 8, 1)), np.arange(8))
    >>> signals.x_norm.shape, signals.gradient_norm.shape, signals.units[-1]
    ((10,), (10,), 'stage3_unit3')

    Source: Eq. 3 to 5, Sec. 3 and 4.1 of arXiv 1603.05027.
    """
    x = _inputs.check_sample(x)
    first = x[0] if isinstance(x, list) else x
    labels = _inputs.check_labels(labels, len(first))
    graph = Graph(model, x, training, opaque=(ResidualUnit, UnitStack))
    sites = find_sites(graph)
    loss_of_output = _inputs.loss_of(graph, labels, loss)
    observer = Observer(_look, (len(_FIGURES),))
    start = sites[0].start
    shapes = {start: graph.specs[start].shape} | {n: shape for site in sites for n, shape in site.added(graph).items()}
    numbers = list(shapes)
    zeros = [np.zeros([len(first) if size is None else size for size in shapes[n]], "float32") for n in numbers]
    inputs = x if isinstance(x, list) else [x]

    def run(*added):
        observer.seen = []
        with observer.active():
            values = graph.run(inputs, dict(zip(numbers, added, strict=True)))
        seen = iter(observer.seen)
        figures = [next(seen) if site.addition is None else site.look(graph, values) for site in sites]
        outputs = [values[n] for n in graph.outputs]
        begin = ops.stack(_moments(values[start]))
        return loss_of_output(outputs[0] if len(outputs) == 1 else outputs), [begin, *figures]

    variables = model.trainable_variables
    value, [begin, *figures], gradients, on_weights = _autodiff.value_and_gradients(run, zeros, variables)
    figures = dict(zip(_FIGURES, np.concatenate([ops.convert_to_numpy(each) for each in figures]).T, strict=True))
    for name, initial in zip(_FIGURES[:3], ops.convert_to_numpy(begin), strict=True):
        figures[name] = np.concatenate([[initial], figures[name]])
    by_number = {n: ops.convert_to_numpy(gradient) for n, gradient in zip(numbers, gradients, strict=True)}
    norms = [_norms(by_number[start], 1)] + [_norms(by_number[site.output], site.depth) for site in sites]
    by_variable = dict(zip(map(id, variables), map(ops.convert_to_numpy, on_weights), strict=True))
    return Propagation(
        units=tuple(name for site in sites for name in site.names),
        gradient_norm=np.concatenate(norms),
        weight_gradients=_by_weight(graph, sites, by_variable),
        loss=float(value),
        **figures,
    )


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a graph has residual units: a unit of this package, a stack of them, or an addition.

    Args:
        step: Number of the step.
        names: Of its units.
        start, output: Numbers of the tensors x_l and x_{l+1}.
        layer: The unit or the stack; None for an addition.
        addition: The addition; None for a layer.
    """

    step: int
    names: tuple[str, ...]
    start: int
    output: int
    layer: Any = None
    addition: Addition | None = None

    @property
    def depth(self) -> int:
        return len(self.names)

    def added(self, graph: Graph) -> dict[int, tuple]:
        """Return the number and the shape of what has to be added to get the gradients of x_{l+1}."""
        shape = graph.specs[self.output].shape
        return {self.output: (self.depth, *shape) if isinstance(self.layer, UnitStack) else shape}

    def weights(self, graph: Graph) -> list[tuple[str, keras.Variable]]:
        """Return the trainable weights with their names below the unit."""
        if self.addition is None:
            return [(weight.path.split(f"{self.layer.name}/", 1)[-1], weight) for weight in self.layer.trainable_weights]
        layers = [step.operation for i in self.addition.residual_steps if (step := graph.steps[i]).has_kernel]
        return [(f"weight_{i}/{w.name}", w) for i, layer in enumerate(layers, 1) for w in layer.trainable_weights]

    def look(self, graph: Graph, values: Mapping[int, Any]):
        """Return what an `Observer` would see of an addition, `(1, figures)`."""
        assert self.addition is not None
        reader = next(graph.steps[i] for i in self.addition.residual_steps if graph.steps[i].has_kernel)
        figures = _look(
            activated=values[reader.inputs[0]],
            shortcut=values[self.addition.shortcut],
            residual=values[self.addition.residual],
            total=values[self.addition.total],
            output=values[self.output],
            axis=reader.channel_axis,
        )
        return ops.expand_dims(figures, 0)


def find_sites(graph: Graph) -> list[Site]:
    """Return the residual units of a graph that keeps this package's units as single steps.

    Raises:
        ValueError: where there is none.
    """
    sites = []
    for i, step in enumerate(graph.steps):
        if isinstance(step.operation, ResidualUnit | UnitStack):
            stack = isinstance(step.operation, UnitStack)
            names = step.operation.unit_names if stack else [step.name.rsplit("/", 1)[-1]]
            sites.append(Site(i, tuple(names), step.inputs[0], step.outputs[0], layer=step.operation))
    opaque = {site.step for site in sites}
    additions = [each for each in graph.additions if opaque.isdisjoint(each.residual_steps)]
    after_addition: list[str] = []
    for addition, after in itertools.zip_longest(additions, additions[1:]):
        output = addition.total
        if after is None:  # the last unit's f is that of the one before
            output = graph.follow(output, after_addition)
        elif after.shortcut == after.start:  # what stands between an addition and an untouched shortcut is f
            steps = graph.between(output, after.start)
            output, after_addition = after.start, [graph.steps[i].kind for i in steps]
        sites.append(Site(addition.step, (graph.steps[addition.step].name,), addition.start, output, addition=addition))
    if not sites:
        raise ValueError(
            "The model has no residual unit: no two paths from one tensor are added, of which at least one has weights. "
            f"Received: {len(graph.steps)} operations, {', '.join(step.name for step in graph.steps[:5])}, ..."
        )
    return sorted(sites, key=lambda site: site.step)


def _moments(tensor) -> list:
    """Return norm, mean and standard deviation, scalars."""
    tensor = ops.cast(tensor, "float32")
    return [ops.sqrt(ops.sum(ops.square(tensor)) / tensor.shape[0]), ops.mean(tensor), ops.std(tensor)]


def _look(*, activated, shortcut, residual, total, output, axis):
    """Return `_FIGURES` of one unit."""
    channels = axis % len(activated.shape)
    others = [i for i in range(len(activated.shape)) if i != channels]
    dead = ops.all(ops.equal(activated, 0), axis=others)
    cut = ops.logical_and(ops.equal(output, 0), ops.not_equal(total, 0))
    through = ops.zeros(()) if shortcut is None else _moments(shortcut)[0]
    shares = [ops.mean(ops.cast(share, "float32")) for share in (cut, dead)]
    return ops.stack([*_moments(output), *_moments(residual), through, *shares])


def _norms(gradient: np.ndarray, units: int) -> np.ndarray:
    return np.sqrt((gradient.reshape(units, -1).astype("float64") ** 2).sum(1))


def _by_weight(graph: Graph, sites: Sequence[Site], gradients: Mapping[int, np.ndarray]) -> dict[str, np.ndarray]:
    total = sum(site.depth for site in sites)
    table: dict[str, np.ndarray] = {}
    before = 0
    for site in sites:
        for name, weight in site.weights(graph):
            if id(weight) in gradients:
                row = table.setdefault(name, np.full(total, np.nan))
                row[before : before + site.depth] = _norms(gradients[id(weight)], site.depth)
        before += site.depth
    return table
