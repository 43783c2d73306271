"""LayerStack and UnitStack: n equal layers, one after the other, as one layer, whose
cost to compile does not grow with n.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_preact import _checks, initializers
from keras_preact._paths import below
from keras_preact.backend import devices, loops
from keras_preact.layers import chains
from keras_preact.layers.spatial import PaddedConv2D
from keras_preact.units import ResidualUnit, Trace

EXECUTIONS = ("auto", "scan", "loop")
#: Tensors that are stacked by one operation.
GROUP = 100


@dataclasses.dataclass
class _Body:
    """What a stack must not track as its own: the layer that it calls with the values
    of each of its units in turn.

    Args:
        unit: The layer.
        stacked: For each variable of `unit`, in order, the values of all units.
        state: Indices of the variables that change in training without a gradient.
        weights: Indices of all but the states of seeds, which only training reads.
    """

    unit: keras.Layer
    stacked: list = dataclasses.field(default_factory=list)
    state: list[int] = dataclasses.field(default_factory=list)
    weights: list[int] = dataclasses.field(default_factory=list)


class _SeedStates(keras.random.SeedGenerator):
    """The states of the seed generators at one place of every unit."""

    def __init__(self, initializer: Callable, state: keras.Variable, shape: tuple):
        self.state = keras.Variable(
            initializer, shape, state.dtype, trainable=False, name=state.name
        )


@keras.saving.register_keras_serializable("keras_preact")
class LayerStack(keras.Layer):
    """`depth` equal layers, one after the other, as one layer that is compiled once.

    Any Keras layer that returns the shape that it gets can be stacked: a layer of
    keras-hub, or your own.

    Args:
        unit: The layer to repeat, as a pattern: it keeps the shape, and is called with
            one tensor.
        depth: How many there are.
        execution: `"scan"`: a loop that the backend compiles once (TensorFlow, JAX).
            `"loop"`: a Python loop, compiled as `depth` layers. `"auto"`: a scan on the
            backends that have one. Weights and checkpoints are the same.
        remat: Units per segment. Only the segment's input is kept for the gradient; the
            rest is recomputed. True for 1, False for none. Kept are `depth / remat`
            inputs and the inside of `remat` units: about `sqrt(depth)` needs the least
            memory. For bottlenecks it is `sqrt(depth / 5)`.
        unroll: Units in the body of a scan.
        **kwargs: `name`, `trainable`. The dtype policy is the unit's.

    Input and output: as the unit's, which are of one shape.

    Every unit starts with its own values, drawn by the unit's initialisers, and has its
    own seeds for dropout. The units' names count on from the name of
    `unit`: `stage1_unit2`, `stage1_unit3`, ... A weight has the same path as in a unit:
    `NAME/branch/conv_1/kernel`, of shape `(depth, 3, 3, channels in, channels out)`.

    The unit computes from its input and its variables alone: it must not keep anything
    in Python between calls. Regularisers are summed over the units; other losses,
    metrics and constraints are refused.

    On TensorFlow without a GPU a stack asks Keras not to compile with XLA, whose
    convolution gradients are slow in loops.

    Raises:
        ValueError: for a layer that changes the shape or breaks these rules, a depth
            below 1, an execution that the backend does not have.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import keras_preact as kp
    >>> stack = kp.LayerStack(kp.TransformerUnit(16, num_heads=4), depth=12)
    >>> tuple(stack(np.zeros((2, 9, 16), "float32")).shape)
    (2, 9, 16)
    """

    def __init__(
        self,
        unit: keras.Layer | dict,
        depth: int,
        *,
        execution: str = "auto",
        remat: bool | int = False,
        unroll: int = 1,
        **kwargs,
    ):
        # a config holds a serialised unit
        pattern = keras.saving.deserialize_keras_object(unit) if isinstance(unit, dict) else unit
        self._check_pattern(pattern)
        _checks.positive_int(depth, "depth")
        _checks.positive_int(unroll, "unroll")
        _checks.one_of(execution, EXECUTIONS, "execution")
        if remat is not False and remat is not True:
            _checks.positive_int(remat, "remat")
        backend = keras.backend.backend()
        if execution == "scan" and backend not in loops.SCAN_BACKENDS:
            raise ValueError(
                f"There is no scan on {backend}: use execution='loop' or 'auto'. Received: "
                f"execution={execution!r}"
            )
        super().__init__(dtype=pattern.dtype_policy, **kwargs)
        self.depth = depth
        self.execution = execution
        self.remat = remat
        self.unroll = unroll
        config = pattern.get_config() | {"trainable": True}
        with keras.StatelessScope(initialize_variables=False):  # they keep their initialisers
            self._body = _Body(type(pattern).from_config(config))
        if backend == "tensorflow" and not devices.tensorflow_has_gpu():
            # Train step of ResNet-164 on two cores, batch 16, TensorFlow 2.21: 6.6 s as scans with
            # XLA, 0.37 s without.
            self.supports_jit = False

    def _check_pattern(self, pattern: Any) -> None:
        if not isinstance(pattern, keras.Layer):
            raise ValueError(f"`unit` must be a Keras layer. Received: unit={pattern!r}")

    @classmethod
    def from_units(cls, units: Sequence[keras.Layer], **kwargs) -> "LayerStack":
        """Return a stack of built layers that follow one another, with their weights
        and seeds; frozen if they are.

        Args:
            units: Layers of one configuration, apart from names and seeds.
            **kwargs: Arguments of the stack.

        Raises:
            ValueError: for units that are not built, that change the shape or whose
                configurations differ, or if only some are frozen.
        """
        units = list(units)
        if not units:
            raise ValueError("A stack has at least one unit. Received: units=[]")
        _check_units(units)
        stack = cls(units[0], len(units), **kwargs)
        stack.build((None, *units[0].get_build_config()["input_shape"][1:]))
        stack.load_units(units)
        return stack

    def build(self, input_shape):
        unit = self._body.unit
        with keras.StatelessScope():  # until its end, variables keep their initialisers
            returned = tuple(self._build_unit(tuple(input_shape)))
            initial = [_initializer_of(variable) for variable in unit.variables]
        if returned != tuple(input_shape):
            raise ValueError(
                "A unit of a stack must keep the shape. Received: a unit that turns "
                f"{tuple(input_shape)} into {returned}"
            )
        weights = {id(variable) for variable in unit.weights}
        # lists that Keras tracks
        self._stacked_weights: list[keras.Variable] = []
        self._seed_states: list[_SeedStates] = []
        for variable, initializer in zip(unit.variables, initial, strict=True):
            shape = (self.depth, *variable.shape)
            if id(variable) in weights:
                stacked = self._stack(variable, shape, _per_unit(initializer, self._name_of))
                self._stacked_weights.append(stacked)
            else:
                seeds = _SeedStates(_seeds_per_unit(initializer, self._name_of), variable, shape)
                self._seed_states.append(seeds)
                stacked = seeds.state
            self._body.stacked.append(stacked)
        self._body.state = [i for i, each in enumerate(unit.variables) if not each.trainable]
        self._body.weights = [i for i, each in enumerate(unit.variables) if id(each) in weights]

    def _build_unit(self, input_shape: tuple) -> tuple:
        """Build the unit and return the shape of its output."""
        return _build_by_call(self._body.unit, input_shape)

    def _stack(self, variable: keras.Variable, shape: tuple, initializer: Callable):
        """Make the weight that holds `variable` for all units, at its place below the
        stack's name.
        """
        if variable.constraint is not None:
            raise ValueError(
                "A constraint looks at the weight of one unit, but a stack holds the weights of "
                f"all units in one. Received: {variable.path} with {variable.constraint!r}"
            )
        *scopes, name = below(self._body.unit, variable).split("/")
        with contextlib.ExitStack() as place:
            for scope in scopes:
                place.enter_context(keras.name_scope(scope))
            stacked = keras.Variable(
                initializer,
                shape,
                dtype=variable.dtype,
                trainable=variable.trainable,
                autocast=variable._autocast,
                aggregation=variable.aggregation,
                name=name,
            )
        stacked.regularizer = variable.regularizer
        stacked.stacked_axes = 1  # for optimisers that treat a kernel as a matrix
        return stacked

    def _name_of(self, i: int) -> str:
        """Return the name of unit `i`."""
        name = self._body.unit.name
        match = re.fullmatch(r"(.*?)(\d+)", name)
        return f"{match[1]}{int(match[2]) + i}" if match else f"{name}_{i + 1}"

    def call(self, x, perturbations=None, return_outputs=False, training=None):
        """Apply the units.

        Args:
            x: The input of the first unit.
            perturbations: `(depth, *x.shape)`, what is added to the output of each
                unit. With zeros, its gradient is the gradient of every unit's output.
            return_outputs: Whether to return the outputs of all units, `(depth,
                *x.shape)`; the last one is the stack's.
            training: Whether to run in training mode.
        """

        def step(unit, x, slices):
            y = self._apply(unit, x, slices, training)
            y = y + slices["added"] if "added" in slices else y
            return y, [y] if return_outputs else []

        added = {} if perturbations is None else {"added": ops.cast(perturbations, x.dtype)}
        outputs = [keras.KerasTensor(x.shape, x.dtype)] if return_outputs else []
        y, seen = self.run(step, x, added, outputs, training=training)
        return seen[0] if return_outputs else y

    def _apply(self, unit, x, slices: dict, training):
        return unit(x, **_training_of(unit, training))

    def run(
        self, step: Callable, x, slices: dict | None = None, outputs=(), *, unrolled=False, training
    ):
        """Run a function of each unit in turn, with that unit's values.

        Args:
            step: `(unit, x, slices) -> (next x, a structure of tensors)`.
            x: The first unit's input.
            slices: Tensors with a leading axis of units: a step gets its slices.
            outputs: `keras.KerasTensor`s of what a step returns beside the next x.
            unrolled: Whether to run a Python loop without recomputing, whatever the
                stack's own execution: a loop that runs once is not worth compiling, and
                `outputs` may be left out.
            training: Whether to run in training mode.

        Returns:
            The last x, and what the steps returned, with a leading axis of units.
        """
        unit = self._body.unit
        if unit.trainable != self.trainable:
            # a frozen batch normalisation uses its moving statistics
            unit.trainable = self.trainable
        variables = unit.variables
        state = self._body.state if training else []
        read = range(len(variables)) if training else self._body.weights
        values = {i: ops.convert_to_tensor(self._body.stacked[i]) for i in read}
        for i in state:
            # on torch variables change in place, and what is recomputed needs the old values
            values[i] = ops.copy(values[i])

        def one(x, own):
            scope = keras.StatelessScope(
                [(variables[i], value) for i, value in zip(read, own["values"], strict=True)]
            )
            with scope:
                y, seen = step(unit, x, own)
            new = [ops.stop_gradient(scope.get_current_value(variables[i])) for i in state]
            return y, {"state": new, "seen": seen}

        execution = "loop" if unrolled else self._execution()
        on_slow_path = execution == "scan" and devices.scan_is_slow()
        for layer in unit._flatten_layers():
            if isinstance(layer, PaddedConv2D):
                layer.as_products = on_slow_path
        specs = [keras.KerasTensor(variables[i].shape, values[i].dtype) for i in state]
        y, new = loops.repeat(
            one,
            x,
            {"values": [values[i] for i in read], **(slices or {})},
            self.depth,
            {"state": specs, "seen": outputs},
            execution=execution,
            remat=0 if unrolled else int(self.remat),
            unroll=self.unroll,
        )
        for i, value in zip(state, new["state"], strict=True):
            self._body.stacked[i].assign(value)
        return y, new["seen"]

    def _execution(self) -> str:
        if keras.backend.backend() not in loops.SCAN_BACKENDS:
            return "loop"
        return "scan" if self.execution == "auto" else self.execution

    def compute_output_shape(self, input_shape, perturbations_shape=None):
        return input_shape

    def compute_output_spec(self, x, perturbations=None, return_outputs=False, training=None):
        shape = (self.depth, *x.shape) if return_outputs else x.shape
        return keras.KerasTensor(shape, self.compute_dtype)

    @property
    def pattern(self) -> keras.Layer:
        """The layer that runs with the weights of each unit; its own hold nothing."""
        return self._body.unit

    @property
    def stacked_variables(self) -> list[tuple[keras.Variable, keras.Variable]]:
        """Each variable of `pattern` with the one that holds its values for all units,
        with a leading axis of units.
        """
        return list(zip(self._body.unit.variables, self._body.stacked, strict=True))

    @property
    def unit_names(self) -> list[str]:
        return [self._name_of(i) for i in range(self.depth)]

    def unit(self, i: int) -> keras.Layer:
        """Return a new layer with the weights and seeds of unit `i`, counted from 0; a
        negative one counts from the end.
        """
        if not -self.depth <= i < self.depth:
            raise IndexError(f"The stack has {self.depth} units. Received: unit({i})")
        self._check_is_built()
        unit = self._new_unit(i % self.depth)
        for own, stacked in zip(unit.variables, self._body.stacked, strict=True):
            own.assign(stacked[i])
        return unit

    def _new_unit(self, i: int) -> keras.Layer:
        pattern = self._body.unit
        config = {"name": self._name_of(i), "trainable": self.trainable}
        unit = type(pattern).from_config(pattern.get_config() | config)
        _build_by_call(unit, self.get_build_config()["input_shape"])
        return unit

    def load_units(self, units: Sequence[keras.Layer]) -> None:
        """Take over the weights and seeds of built units, one for each of the stack's
        own, and whether they are trained.

        Raises:
            ValueError: for another number of units, or units of another configuration;
                the stack stays as it is.
        """
        if len(units) != self.depth:
            raise ValueError(f"The stack has {self.depth} units. Received: {len(units)} units")
        self._check_is_built()
        _check_units(units)
        self._check_same(units)
        columns = zip(*(unit.variables for unit in units), strict=True)
        for stacked, column in zip(self._body.stacked, columns, strict=True):
            stacked.assign(np.stack([ops.convert_to_numpy(each.value) for each in column]))
        self.trainable = units[0].trainable

    def _check_same(self, units: Sequence[keras.Layer]) -> None:
        own = _structure(self._body.unit)
        own_shapes = [stacked.shape[1:] for stacked in self._body.stacked]
        for unit in units:
            other = _structure(unit)
            keys = [key for key in own if own[key] != other.get(key)]
            if keys:
                found = ", ".join(f"{key}={own[key]!r} and {other.get(key)!r}" for key in keys)
                raise ValueError(
                    "The units of a stack must have one configuration. Received: units with "
                    f"{found}"
                )
            shapes = [variable.shape for variable in unit.variables]
            if shapes != own_shapes:
                raise ValueError(
                    f"A unit of a stack must keep the shape. Received: {unit!r} with weights of "
                    f"shapes {shapes}"
                )

    def _check_is_built(self) -> None:
        if not self.built:
            raise ValueError(
                "The stack must be built, such as by a call, before it has weights. Received: "
                f"{self!r}"
            )

    def get_config(self):
        config = super().get_config()
        del config["dtype"]  # the unit's
        unit = keras.saving.serialize_keras_object(self._body.unit)
        unit.pop("build_config", None)  # the stack builds it
        return config | {
            "unit": unit,
            "depth": self.depth,
            "execution": self.execution,
            "remat": self.remat,
            "unroll": self.unroll,
        }


@keras.saving.register_keras_serializable("keras_preact")
class UnitStack(LayerStack):
    """Equal residual units, one after the other, as one layer that is compiled once.

    Args:
        unit: A `ResidualUnit` that keeps the shape, as a pattern.
        depth, execution, remat, unroll: Arguments of `LayerStack`.
        stochastic_depth: A rate for each unit, in place of the one rate of `unit`.
        **kwargs: `name`, `trainable`. The dtype policy is the unit's.

    Raises:
        ValueError: as `LayerStack`, and for a layer that is no `ResidualUnit`.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> stack = kp.UnitStack(kp.ResidualUnit(16, block="bottleneck"), depth=110, name="units")
    >>> x = np.zeros((2, 8, 8, 64), "float32")
    >>> tuple(stack(x).shape), tuple(stack(x, return_outputs=True).shape)
    ((2, 8, 8, 64), (110, 2, 8, 8, 64))
    >>> {weight.path: tuple(weight.shape) for weight in stack.weights}["units/branch/conv_1/kernel"]
    (110, 1, 1, 64, 16)
    >>> tuple(stack.trace(x, look=lambda trace: trace.sum).shape)
    (110, 2, 8, 8, 64)
    """

    def __init__(
        self,
        unit: ResidualUnit | dict,
        depth: int,
        *,
        stochastic_depth: Sequence[float] | None = None,
        **kwargs,
    ):
        if stochastic_depth is not None:
            stochastic_depth = _check_rates(stochastic_depth, depth)
            if isinstance(unit, ResidualUnit):  # a config of this stack holds the rate already
                config = unit.get_config() | {"stochastic_depth": max(stochastic_depth)}
                unit = type(unit).from_config(config)
        self.stochastic_depth = stochastic_depth
        super().__init__(unit, depth, **kwargs)

    def _check_pattern(self, pattern: Any) -> None:
        if not isinstance(pattern, ResidualUnit):
            raise ValueError(f"`unit` must be a ResidualUnit. Received: unit={pattern!r}")
        if pattern.strides > 1:
            raise ValueError(
                "A unit of a stack must keep the shape. Received: a unit with "
                f"strides={pattern.strides}"
            )

    def _build_unit(self, input_shape: tuple) -> tuple:
        unit = self._body.unit
        unit.build(input_shape)
        return unit.compute_output_shape(input_shape)

    @classmethod
    def from_units(cls, units: Sequence[ResidualUnit], **kwargs) -> "UnitStack":
        units = list(units)
        rates = [unit.stochastic_depth for unit in units if isinstance(unit, ResidualUnit)]
        if any(rate != rates[0] for rate in rates):
            kwargs.setdefault("stochastic_depth", rates)
        return super().from_units(units, **kwargs)

    def run(self, step, x, slices=None, outputs=(), **options):
        rates = {}
        if self.stochastic_depth is not None:
            rates["rate"] = ops.convert_to_tensor(self.stochastic_depth, "float32")
        return super().run(step, x, rates | (slices or {}), outputs, **options)

    def _apply(self, unit, x, slices: dict, training):
        return unit(x, slices.get("rate"), training=training)

    def trace(
        self,
        x,
        *,
        look: Callable[[Trace], Any] = lambda trace: trace,
        perturbations=None,
        residual_scale=None,
        detach_residual=False,
        training=None,
    ):
        """Return the parts of every unit, in a loop that is not compiled as one.

        Args:
            x: The input of the first unit.
            look: A function of a unit's `Trace`. It returns what to keep, a structure
                of tensors; by default everything.
            perturbations: `(depth, *x.shape)`, what is added to the output of each
                unit.
            residual_scale: `(depth,)`, what multiplies F(x) of each unit.
            detach_residual: See `ResidualUnit.trace`.
            training: Whether to run in training mode.

        Returns:
            What `look` returned for each unit, with a leading axis of units.
        """
        x = chains.prepared(self, x)

        def step(unit, x, slices):
            trace = unit.trace(
                x,
                drop_rate=slices.get("rate"),
                residual_scale=slices.get("scale"),
                detach_residual=detach_residual,
                training=training,
            )
            if "added" in slices:
                trace = trace._replace(output=trace.output + slices["added"])
            return trace.output, look(trace)

        slices = {} if perturbations is None else {"added": ops.cast(perturbations, x.dtype)}
        if residual_scale is not None:
            slices["scale"] = ops.convert_to_tensor(residual_scale)
        return self.run(step, x, slices, unrolled=True, training=training)[1]

    def _new_unit(self, i: int) -> ResidualUnit:
        rates = self.stochastic_depth
        rate = {} if rates is None else {"stochastic_depth": rates[i]}
        unit = self._body.unit.at(self._name_of(i), trainable=self.trainable, **rate)
        unit.build(self.get_build_config()["input_shape"])
        return unit

    def get_config(self):
        rates = self.stochastic_depth
        return super().get_config() | {"stochastic_depth": rates and list(rates)}


def _check_rates(rates: Sequence[float], depth: int) -> list[float]:
    rates = [float(rate) for rate in rates]
    if len(rates) != depth:
        raise ValueError(
            f"`stochastic_depth` must be a rate for each unit. Received: {len(rates)} rates for "
            f"depth={depth}"
        )
    for rate in rates:
        _checks.fraction(rate, "stochastic_depth")
    return rates


def _initializer_of(variable: keras.Variable) -> Callable:
    """Return what a variable starts with; a value that it has already is kept."""
    if variable._initializer is not None:
        return variable._initializer
    return lambda shape, dtype=None: ops.copy(variable.value)


def _per_unit(initializer: Callable, name_of: Callable[[int], str]) -> Callable:
    """Return an initialiser that fills a stack of weights with what `initializer` draws
    for each unit.
    """

    def initialize(shape, dtype=None):
        depth, *own = shape
        is_seeded = isinstance(initializer, keras.initializers.Initializer) and (
            "seed" in initializer.get_config()
        )
        if is_seeded:
            values = [
                initializers.spawn(initializer, name_of(i))(own, dtype=dtype) for i in range(depth)
            ]
        else:
            values = [initializer(own, dtype=dtype)] * depth
        return _stacked(values)

    return initialize


def _stacked(values: Sequence):
    """Stack tensors in groups. XLA compiles one operation with n operands in time n^2:
    26 s for 4,000, in groups 0.2 s. No NumPy: JAX may trace it, to find a shape.
    """
    groups = [ops.stack(values[i : i + GROUP]) for i in range(0, len(values), GROUP)]
    return ops.concatenate(groups)


def _seeds_per_unit(initializer: Callable, name_of: Callable[[int], str]) -> Callable:
    """As `_per_unit`, for the states of a seed generator: the seed, and how often it
    was used.
    """

    def initialize(shape, dtype=None):
        seed = int(ops.convert_to_numpy(initializer((2,), dtype=dtype))[0])
        states = [[initializers.derive_seed(seed, name_of(i)), 0] for i in range(shape[0])]
        return ops.convert_to_tensor(states, dtype)

    return initialize


def _training_of(layer: keras.Layer, training) -> dict:
    return {"training": training} if layer._call_has_training_arg else {}


def _build_by_call(unit: keras.Layer, input_shape: tuple) -> tuple:
    """Build a unit by a call and return the shape of its output.

    Raises:
        ValueError: for a unit that adds losses or has metrics.
    """
    sizes = [1, *(4 if size is None else size for size in input_shape[1:])]
    with keras.StatelessScope(collect_losses=True) as scope:
        y = unit(ops.zeros(sizes, unit.compute_dtype), **_training_of(unit, True))
    if scope.losses or any(layer._metrics for layer in unit._flatten_layers()):
        raise ValueError(
            f"A unit of a stack must not add losses or have metrics. Received: {unit!r}"
        )
    shape = tuple(y.shape)
    return input_shape if list(shape) == sizes else (input_shape[0], *shape[1:])


def _structure(unit: keras.Layer) -> dict:
    """Return the configuration of a unit without what may differ in a stack: its name,
    how its weights start, its rate of stochastic depth.
    """
    own = ("name", "trainable", "kernel_initializer", "bias_initializer", "seed")
    config = {key: value for key, value in unit.get_config().items() if key not in own}
    if not isinstance(unit, ResidualUnit):
        return config
    shortcut = config["shortcut"]
    settings = {key: value for key, value in shortcut["config"].items() if key not in own}
    return config | {
        "shortcut": (shortcut["class_name"], settings),
        "stochastic_depth": unit.stochastic_depth is not None,
    }


def _check_units(units: Sequence[keras.Layer]) -> None:
    for unit in units:
        if not isinstance(unit, keras.Layer) or not unit.built:
            raise ValueError(f"`units` must be built. Received: {unit!r}")
    check_frozen_together({unit.name: unit.trainable for unit in units})


def check_frozen_together(trained: Mapping[str, bool]) -> None:
    """Refuse units of a stack, by name, if some are trained and others are not."""
    if len(set(trained.values())) > 1:
        frozen = ", ".join(name for name in trained if not trained[name])
        raise ValueError(
            f"The units of a stack are frozen together or not at all. Received: {frozen} frozen "
            "alone"
        )
