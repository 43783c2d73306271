"""UnitStack: equal residual units behind one another as one layer, whose cost to
compile does not grow with their number.
"""

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
from keras import ops

from keras_preact import _checks, _loops, _observers, initializers
from keras_preact.units import ResidualUnit

EXECUTIONS = ("auto", "scan", "loop")


_WRITTEN_OUT = contextvars.ContextVar("written_out", default=False)


@contextlib.contextmanager
def written_out() -> Iterator[None]:
    """While active, stacks that are traced become as many copies of their unit, of
    which nothing is computed again.

    Plain graphs for serving want it, and analyses: a loop that runs once is not worth
    compiling.
    """
    token = _WRITTEN_OUT.set(True)
    try:
        yield
    finally:
        _WRITTEN_OUT.reset(token)


@dataclasses.dataclass
class _Body:
    """Holds what a stack must not track as its own: the unit that it calls with the
    values of each of its units in turn.

    Args:
        unit: The unit.
        stacked: For each variable of `unit`, in order, the values of all units.
        state: Indices of the variables that change in training without a gradient.
        weights: Indices of all but the states of seeds, which nothing but training
            reads.
    """

    unit: ResidualUnit
    stacked: list = dataclasses.field(default_factory=list)
    state: list[int] = dataclasses.field(default_factory=list)
    weights: list[int] = dataclasses.field(default_factory=list)


class _SeedStates(keras.random.SeedGenerator):
    """The states of the seed generators at one place of every unit."""

    def __init__(self, initializer: Callable, state: keras.Variable, shape: tuple):
        self.state = keras.Variable(
            initializer, shape, state.dtype, trainable=False, name=state.name
        )


def _of_each_unit(initializer: Callable, place: Callable[[int], str]) -> Callable:
    """Return an initialiser that fills a stack of weights with what `initializer` draws
    for the unit at each place.
    """

    def initialize(shape, dtype=None):
        depth, *own = shape
        config = (
            initializer.get_config()
            if isinstance(initializer, keras.initializers.Initializer)
            else {}
        )
        if "seed" in config:
            values = [
                initializers.spawn(initializer, place(i))(own, dtype=dtype) for i in range(depth)
            ]
        else:
            values = [initializer(own, dtype=dtype)] * depth
        return ops.convert_to_tensor(
            np.stack([ops.convert_to_numpy(value) for value in values]), dtype
        )

    return initialize


def _seeds_of_each_unit(initializer: Callable, place: Callable[[int], str]) -> Callable:
    """As `_of_each_unit`, for the states of a seed generator: the seed, and how often
    it was used.
    """

    def initialize(shape, dtype=None):
        seed = int(ops.convert_to_numpy(initializer((2,), dtype=dtype))[0])
        states = [[initializers.derive_seed(seed, place(i)), 0] for i in range(shape[0])]
        return ops.convert_to_tensor(states, dtype)

    return initialize


def _has_gpu() -> bool:
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def _structure(unit: ResidualUnit) -> dict:
    """Return the configuration of a unit without what may differ in a stack: its name,
    how its weights start, its rate.
    """
    config = unit.get_config()
    for key in ("name", "trainable", "kernel_initializer", "bias_initializer"):
        del config[key]
    pattern = unit.shortcut_pattern
    own = ("name", "trainable", "kernel_initializer", "seed")
    shortcut = {key: value for key, value in pattern.config.items() if key not in own}
    drops = unit.stochastic_depth is not None
    return config | {
        "shortcut": (pattern.layer_class.__name__, shortcut),
        "stochastic_depth": drops,
    }


def _check_units(units: Sequence[ResidualUnit]) -> None:
    for unit in units:
        if not isinstance(unit, ResidualUnit) or not unit.built:
            raise ValueError(f"`units` must be built residual units. Received: {unit!r}")
    if len({unit.trainable for unit in units}) > 1:
        frozen = ", ".join(unit.name for unit in units if not unit.trainable)
        raise ValueError(
            f"The units of a stack are frozen together or not at all. Received: {frozen} frozen "
            "alone"
        )


@keras.saving.register_keras_serializable("keras_preact")
class UnitStack(keras.Layer):
    """`depth` residual units of one configuration behind one another, as one layer.

    The weights of all units stand in one set of variables with a leading axis of
    `depth`, and the unit is traced and compiled once, whatever the depth. Outputs,
    gradients and batch statistics are those of single units.

    Args:
        unit: A `ResidualUnit` that keeps the shape. It is a pattern: its configuration
            is taken, not its weights.
        depth: How many units.
        execution: `"scan"` (a loop whose body is compiled once; TensorFlow and JAX),
            `"loop"` (as many copies of the unit in the graph), or `"auto"`: a scan
            where there is one. Weights and checkpoints are the same.
        remat: Units that make a segment of which only the input is kept for the
            gradient; the rest is computed again. True for 1, False for none. Kept are
            then `depth / remat` inputs and the inside of `remat` units: a `remat` near
            `sqrt(depth)` makes both grow as `sqrt(depth)`, the least memory for deep
            stacks; what grows smaller with a bottleneck's inside of about 5 inputs'
            size is best at some `sqrt(depth / 5)`.
        unroll: Units that make the body of a scan.
        stochastic_depth: A rate for each unit, in place of the one rate of `unit`.
        **kwargs: `name`, `trainable`. The dtype policy is the unit's.

    Input and output: as the unit's, which are of one shape.

    Every unit starts with values of its own, from the unit's initialisers, and has
    seeds of its own for dropout. The units' names count on from that of `unit`:
    `stage1_unit2`, `stage1_unit3`, ... The path of a weight is that of a unit's:
    `NAME/branch/conv_1/kernel`, of shape `(depth, 3, 3, channels in, channels out)`.

    On TensorFlow without a GPU a stack asks Keras not to compile with XLA, whose
    convolution gradients are slow in loops.

    Raises:
        ValueError: for a unit that changes the shape, a depth below 1, an execution
            that the backend does not have.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> stack = kp.UnitStack(kp.ResidualUnit(16, block="bottleneck"), depth=110, name="units")
    >>> x = np.zeros((2, 8, 8, 64), "float32")
    >>> tuple(stack(x).shape), tuple(stack(x, return_outputs=True).shape)
    ((2, 8, 8, 64), (110, 2, 8, 8, 64))
    >>> {weight.path: tuple(weight.shape) for weight in stack.weights}["units/branch/conv_1/kernel"]
    (110, 1, 1, 64, 16)
    >>> stack.unit(109).branch_block.kernels
    (1, 3, 1)
    """

    def __init__(
        self,
        unit: ResidualUnit | dict,
        depth: int,
        *,
        execution: str = "auto",
        remat: bool | int = False,
        unroll: int = 1,
        stochastic_depth: Sequence[float] | None = None,
        **kwargs,
    ):
        # a config holds a serialised unit
        pattern: ResidualUnit = (
            keras.saving.deserialize_keras_object(unit) if isinstance(unit, dict) else unit
        )
        if not isinstance(pattern, ResidualUnit):
            raise ValueError(f"`unit` must be a ResidualUnit. Received: unit={unit!r}")
        _checks.positive_int(depth, "depth")
        _checks.positive_int(unroll, "unroll")
        _checks.one_of(execution, EXECUTIONS, "execution")
        if remat is not False and remat is not True:
            _checks.positive_int(remat, "remat")
        backend = keras.backend.backend()
        if execution == "scan" and backend not in _loops.SCAN_BACKENDS:
            raise ValueError(
                f"There is no scan on {backend}: use execution='loop' or 'auto'. Received: "
                f"execution={execution!r}"
            )
        if pattern.strides > 1:
            raise ValueError(
                "A unit of a stack must keep the shape. Received: a unit with "
                f"strides={pattern.strides}"
            )
        super().__init__(dtype=pattern.dtype_policy, **kwargs)
        config = pattern.get_config() | {"trainable": True}
        rates = None if stochastic_depth is None else [float(rate) for rate in stochastic_depth]
        if rates is not None:
            if len(rates) != depth:
                raise ValueError(
                    f"`stochastic_depth` must be a rate for each unit. Received: {len(rates)} "
                    f"rates for depth={depth}"
                )
            for rate in rates:
                _checks.fraction(rate, "stochastic_depth")
            config["stochastic_depth"] = max(rates)
        self.depth = depth
        self.execution = execution
        self.remat = remat
        self.unroll = unroll
        self.stochastic_depth = rates
        self._body = _Body(type(pattern).from_config(config))
        if backend == "tensorflow" and not _has_gpu():
            # Train step of ResNet-164 on two cores, batch 16, TensorFlow 2.21: 6.6 s as scans with
            # XLA, 0.37 s without.
            self.supports_jit = False

    @classmethod
    def from_units(cls, units: Sequence[ResidualUnit], **kwargs) -> "UnitStack":
        """Return a stack of built units that stand behind one another, with their
        weights and seeds, and frozen if they are.

        Args:
            units: Of one configuration but for their names, seeds and rates of
                stochastic depth.
            **kwargs: Of `UnitStack`.

        Raises:
            ValueError: for units that are not built, that change the shape, of which
                some are frozen, or whose configurations differ.
        """
        units = list(units)
        if not units:
            raise ValueError("A stack has at least one unit. Received: units=[]")
        _check_units(units)
        rates = [unit.stochastic_depth for unit in units]
        if any(rate != rates[0] for rate in rates):
            kwargs.setdefault("stochastic_depth", rates)
        stack = cls(units[0], len(units), **kwargs)
        stack.build((None, *units[0].get_build_config()["input_shape"][1:]))
        stack.load_units(units)
        return stack

    def build(self, input_shape):
        unit = self._body.unit
        with keras.StatelessScope():  # until its end, variables keep their initialisers
            unit.build(input_shape)
            initial = [variable._initializer for variable in unit.variables]
        if tuple(unit.compute_output_shape(input_shape)) != tuple(input_shape):
            raise ValueError(
                "A unit of a stack must keep the shape. Received: a unit that turns "
                f"{tuple(input_shape)} into {tuple(unit.compute_output_shape(input_shape))}"
            )
        weights = {id(variable) for variable in unit.weights}
        self._stacked_weights: list[
            keras.Variable
        ] = []  # a list that Keras tracks, as the one below
        self._seed_states: list[_SeedStates] = []
        for variable, initializer in zip(unit.variables, initial, strict=True):
            shape = (self.depth, *variable.shape)
            if id(variable) in weights:
                stacked = self._stack(variable, shape, _of_each_unit(initializer, self._place))
                self._stacked_weights.append(stacked)
            else:
                seeds = _SeedStates(_seeds_of_each_unit(initializer, self._place), variable, shape)
                self._seed_states.append(seeds)
                stacked = seeds.state
            self._body.stacked.append(stacked)
        self._body.state = [
            i for i, variable in enumerate(unit.variables) if not variable.trainable
        ]
        self._body.weights = [
            i for i, variable in enumerate(unit.variables) if id(variable) in weights
        ]

    def _stack(
        self, variable: keras.Variable, shape: tuple, initializer: Callable
    ) -> keras.Variable:
        """Make the weight that holds `variable` for all units, at its place below the
        stack's name.
        """
        *scopes, name = variable.path.split(f"{self._body.unit.name}/", 1)[1].split("/")
        with contextlib.ExitStack() as place:
            for scope in scopes:
                place.enter_context(keras.name_scope(scope))
            return keras.Variable(
                initializer,
                shape,
                dtype=variable.dtype,
                trainable=variable.trainable,
                autocast=variable._autocast,
                aggregation=variable.aggregation,
                name=name,
            )

    def _place(self, i: int) -> str:
        """Return the name of unit `i`."""
        name = self._body.unit.name
        match = re.fullmatch(r"(.*?)(\d+)", name)
        return f"{match[1]}{int(match[2]) + i}" if match else f"{name}_{i + 1}"

    def call(self, x, perturbations=None, return_outputs=False, training=None):
        """Apply the units.

        Args:
            x: The input of the first unit.
            perturbations: `(depth, *x.shape)`, what is added to the output of each
                unit. With zeros, their gradient is that of every x_{l+1}.
            return_outputs: Whether to return the outputs of all units, `(depth,
                *x.shape)`, of which the last is the stack's.
            training: As in Keras.
        """
        unit = self._body.unit
        if unit.trainable != self.trainable:
            unit.trainable = (
                self.trainable
            )  # a frozen batch normalisation keeps to its moving statistics
        variables = unit.variables
        state = self._body.state if training else []
        read = range(len(variables)) if training else self._body.weights
        stacked = [ops.convert_to_tensor(self._body.stacked[i]) for i in read]
        for i in (
            state
        ):  # on torch variables change in place, and what is computed again needs the old values
            stacked[i] = ops.copy(stacked[i])
        rates = (
            []
            if self.stochastic_depth is None
            else [ops.convert_to_tensor(self.stochastic_depth, "float32")]
        )
        added = [] if perturbations is None else [ops.cast(perturbations, x.dtype)]
        observer = _observers.active()
        factors = (
            []
            if observer is None or observer.factors is None
            else [observer.take_factors(self.depth)]
        )

        def step(x, slices):
            own, rest = slices[: len(read)], slices[len(read) :]
            inner = observer and observer.of_one(
                ops.expand_dims(slices[-1], 0) if factors else None
            )
            own_values = [(variables[i], value) for i, value in zip(read, own, strict=True)]
            watched = inner.active() if inner else contextlib.nullcontext()
            with keras.StatelessScope(own_values) as scope, watched:
                y = unit(x, rest[0] if rates else None, training=training)
            y = y + rest[len(rates)] if added else y
            new = [ops.stop_gradient(scope.get_current_value(variables[i])) for i in state]
            return y, [*new, *(inner.seen if inner else ()), *([y] if return_outputs else ())]

        outputs = [(variables[i].shape, stacked[i].dtype) for i in state]
        if observer:
            outputs.append(
                ((1, *(x.shape if observer.shape is None else observer.shape)), "float32")
            )
        if return_outputs:
            outputs.append((x.shape, x.dtype))
        x, new = _loops.repeat(
            step,
            x,
            [*stacked, *rates, *added, *factors],
            self.depth,
            outputs,
            execution=self._execution(),
            remat=0 if _WRITTEN_OUT.get() else int(self.remat),
            unroll=self.unroll,
        )
        for i, value in zip(state, new[: len(state)], strict=True):
            self._body.stacked[i].assign(value)
        if observer:
            observer.seen.append(ops.squeeze(new[len(state)], 1))
        return new[-1] if return_outputs else x

    def _execution(self) -> str:
        if _WRITTEN_OUT.get() or keras.backend.backend() not in _loops.SCAN_BACKENDS:
            return "loop"
        return "scan" if self.execution == "auto" else self.execution

    def compute_output_shape(self, input_shape, perturbations_shape=None):
        return input_shape

    def compute_output_spec(self, x, perturbations=None, return_outputs=False, training=None):
        shape = (self.depth, *x.shape) if return_outputs else x.shape
        return keras.KerasTensor(shape, self.compute_dtype)

    @property
    def pattern(self) -> ResidualUnit:
        """The unit that is run with the weights of each in turn; its own hold nothing."""
        return self._body.unit

    @property
    def stacked_variables(self) -> list[tuple[keras.Variable, keras.Variable]]:
        """Each variable of `pattern` with the one that holds its values for all units,
        with a leading axis of units.
        """
        return list(zip(self._body.unit.variables, self._body.stacked, strict=True))

    @property
    def unit_names(self) -> list[str]:
        return [self._place(i) for i in range(self.depth)]

    def unit(self, i: int) -> ResidualUnit:
        """Return a new unit with the weights and seeds of unit `i`, counted from 0;
        from the end where it is negative.
        """
        if not -self.depth <= i < self.depth:
            raise IndexError(f"The stack has {self.depth} units. Received: unit({i})")
        self._check_is_built()
        i %= self.depth
        rate = (
            {} if self.stochastic_depth is None else {"stochastic_depth": self.stochastic_depth[i]}
        )
        unit = self._body.unit.at(self._place(i), trainable=self.trainable, **rate)
        unit.build(self.get_build_config()["input_shape"])
        for own, stacked in zip(unit.variables, self._body.stacked, strict=True):
            own.assign(stacked[i])
        return unit

    def load_units(self, units: Sequence[ResidualUnit]) -> None:
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
            stacked.assign(np.stack([ops.convert_to_numpy(variable.value) for variable in column]))
        self.trainable = units[0].trainable

    def _check_same(self, units: Sequence[ResidualUnit]) -> None:
        own = _structure(self._body.unit)
        own_shapes = [stacked.shape[1:] for stacked in self._body.stacked]
        for unit in units:
            other = _structure(unit)
            if different := {
                key: (own[key], other.get(key)) for key in own if own[key] != other.get(key)
            }:
                described = ", ".join(
                    f"{key}={value[0]!r} and {value[1]!r}" for key, value in different.items()
                )
                raise ValueError(
                    "The units of a stack must have one configuration. Received: units with "
                    f"{described}"
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
        return config | {
            "unit": keras.saving.serialize_keras_object(self._body.unit),
            "depth": self.depth,
            "execution": self.execution,
            "remat": self.remat,
            "unroll": self.unroll,
            "stochastic_depth": self.stochastic_depth,
        }
