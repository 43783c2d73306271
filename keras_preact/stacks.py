"""LayerStack and UnitStack: n equal layers, one after the other, as one layer. As a
scan, it takes no longer to compile for a larger n.
"""

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_preact import _checks, descriptions, initializers
from keras_preact._inside import HoldsLayers, check_frozen_together, freeze_inside, frozen_inside
from keras_preact._objects import arguments_of, in_config
from keras_preact._paths import below
from keras_preact.backend import devices, keras_private, loops
from keras_preact.dropout import is_rate
from keras_preact.layers import chains
from keras_preact.layers.spatial import PaddedConv2D
from keras_preact.units import ResidualUnit, Trace

EXECUTIONS = ("auto", "scan", "loop")
#: Options of a stack, with their defaults.
OPTIONS: Mapping[str, Any] = {"execution": "auto", "remat": False, "unroll": 1}
#: Number of tensors that one operation stacks.
GROUP = 100


def check_options(execution: Any, remat: Any, unroll: Any) -> None:
    """Raise a ValueError unless the options of a stack are known and fit the backend."""
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


def check_effect(stacked: bool | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return which of the options of a network ask for stacks.

    Raises:
        ValueError: for such options of a network that is to have no stacks.
    """
    asked = {
        name: options[name] for name, usual in OPTIONS.items() if options.get(name, usual) != usual
    }
    if asked and stacked is not None and not stacked:
        values = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        raise ValueError(
            f"{' and '.join(asked)} would have no effect without stacks: leave out `stacked`. "
            f"Received: stacked=False, {values}"
        )
    return asked


@dataclasses.dataclass
class _Body:
    """Hides the template layer from Keras' tracking, which would save its variables. The
    stack calls this one layer with the weights of each unit in turn.

    Args:
        template: The layer.
        stacked: For each variable of `template`, in order, the variable that holds its
            values for all units.
        updated: Indices of the variables that change in training without a gradient.
        weights: Indices of all variables except the states of seeds and the rates of
            dropouts, which only training reads.
        initial: Initialisers of the variables of `template`, by the variables' ids.
        rates: The rates of dropouts among `stacked`, which are no weights.
    """

    template: keras.Layer
    stacked: list = dataclasses.field(default_factory=list)
    updated: list[int] = dataclasses.field(default_factory=list)
    weights: list[int] = dataclasses.field(default_factory=list)
    initial: dict[int, Callable] = dataclasses.field(default_factory=dict)
    rates: list = dataclasses.field(default_factory=list)

    def keep_initializers(self) -> None:
        """Keep the initialisers of variables that are new. Keras drops an initialiser once
        it has used it, at the end of the scope in which it made the variable.
        """
        for variable in self.template.variables:
            self.initial.setdefault(id(variable), _initializer_of(variable))


class _StackedVariable(keras.Variable):
    """Holds the values of a variable of the template for all units. It is frozen if the
    template's variable is.
    """

    of: keras.Variable | None = None

    trainable = keras.Variable.trainable.getter(
        lambda self: (
            keras_private.is_trainable_itself(self) and (self.of is None or self.of.trainable)
        )
    )


class _SummedOverUnits(keras.regularizers.Regularizer):
    """The sum of a regulariser over the units of a stacked weight."""

    def __init__(self, of_unit: Callable):
        self.of_unit = of_unit

    def __call__(self, stacked):
        return ops.sum(ops.vectorized_map(self.of_unit, ops.convert_to_tensor(stacked)))


class _Masked(keras.Layer):
    """Returns its input with a mask, which Keras attaches."""

    def __init__(self, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True

    def call(self, x, mask=None):
        return x


class _SeedStates(keras.random.SeedGenerator):
    """The states that one seed generator has in each of the units."""

    def __init__(self, initializer: Callable, state: keras.Variable, shape: tuple):
        self.state = keras.Variable(
            initializer, shape, state.dtype, trainable=False, name=state.name
        )


@keras.saving.register_keras_serializable("keras_preact")
class LayerStack(HoldsLayers):
    """`depth` equal layers, one after the other, as one layer that is compiled once.

    Any Keras layer that returns the shape that it gets can be stacked: a layer of
    keras-hub, or your own.

    Args:
        unit: The layer to repeat, as a template. It must keep the shape and take one
            tensor.
        depth: Number of units.
        execution: `"scan"`: a loop that the backend compiles once (TensorFlow, JAX).
            `"loop"`: a Python loop, compiled as `depth` layers. `"auto"`: a scan on the
            backends that have one. Weights and checkpoints are the same.
        remat: Units per segment of rematerialisation. Only the segment's input is kept
            for the gradient; the rest is recomputed. True for 1, False for none. The
            memory holds `depth / remat` inputs and the inner values of `remat` units.
            About `sqrt(depth)` needs the least memory, and `sqrt(depth / 5)` for
            bottlenecks.
        unroll: Number of units in the body of a scan.
        **kwargs: `name`, `trainable` (by default, the unit's). The dtype policy is the
            unit's.

    Input and output: as for the unit; both have the same shape.

    A layer inside the units is frozen in all of them: if it is frozen in a built `unit`,
    or if one sets its `trainable` in `stack.template`. A loop over
    `model._flatten_layers()` reaches the template too.

    Every unit starts with its own values, drawn by the unit's initialisers, and has its
    own seeds for dropout. The numbers in the units' names continue from the name of
    `unit`: `stage1_unit2`, `stage1_unit3`, ... A weight has the same path as in a unit:
    `NAME/branch/conv_1/kernel`, of shape `(depth, 3, 3, channels in, channels out)`.

    If the unit supports masks, every unit gets the mask of the stack's input.

    The unit must compute its output from its input and its variables alone, and keep
    nothing in Python between calls. Regularisers are summed over the units; other
    losses, metrics and constraints raise a ValueError.

    On TensorFlow without a GPU a stack asks Keras not to compile with XLA, because
    XLA's convolution gradients are slow in loops.

    Raises:
        ValueError: for a layer that changes the shape or breaks these rules, a depth
            below 1, or an execution that the backend does not have.

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
        template = keras.saving.deserialize_keras_object(unit) if isinstance(unit, dict) else unit
        self._check_template(template)
        _checks.positive_int(depth, "depth")
        check_options(execution, remat, unroll)
        kwargs.setdefault("trainable", template.trainable)
        super().__init__(dtype=template.dtype_policy, **kwargs)
        self.supports_masking = template.supports_masking
        self.depth = _checks.plain(depth)
        self.execution = execution
        self.remat = _checks.plain(remat)
        self.unroll = _checks.plain(unroll)
        config = arguments_of(template)
        # `build` freezes them after it has made the weights, because files hold weights that can
        # be trained first
        inside = config.pop("frozen_layers", None) or frozen_inside(template)
        self._frozen_layers = tuple(f"{template.name}/{path}" for path in inside)
        with keras.StatelessScope(initialize_variables=False):
            self._body = _Body(_made(type(template), config, trainable=True))
            self._body.keep_initializers()
        # one of the stack's layers, for loops over all layers that freeze or measure them; it is
        # frozen with the stack
        keras_private.hold(self, self._body.template)
        if devices.xla_is_slower():
            # Train step of ResNet-164 on two cores, batch 16, TensorFlow 2.21: 6.6 s as scans with
            # XLA, 0.37 s without.
            self.supports_jit = False

    def _check_template(self, template: Any) -> None:
        if not isinstance(template, keras.Layer):
            raise ValueError(f"`unit` must be a Keras layer. Received: unit={template!r}")
        required = [
            parameter.name
            for parameter in inspect.signature(template.call).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        if len(required) > 1:
            raise ValueError(
                "A unit of a stack must take one tensor: stack a layer of your own that calls this "
                f"one. Received: {template!r}, which takes {', '.join(required)}"
            )

    @classmethod
    def from_units(cls, units: Sequence[keras.Layer], **kwargs) -> "LayerStack":
        """Return a stack with the weights and seeds of built layers, in their order. It
        is frozen if they are.

        Args:
            units: Layers with the same configuration, apart from names and seeds.
            **kwargs: Arguments of the stack.

        Raises:
            ValueError: for units that are not built, that change the shape or that have
                different configurations, or if only some are frozen.
        """
        units = list(units)
        if not units:
            raise ValueError("A stack needs at least one unit. Received: units=[]")
        _check_units(units)
        stack = cls(units[0], len(units), **kwargs)
        stack.build((None, *_input_shape_of(units[0])[1:]))
        stack.load_units(units)
        return stack

    def build(self, input_shape):
        unit = self._body.template
        # a layout for the paths of the stack's variables has an axis more than the template's
        with devices.undistributed(), keras.StatelessScope():
            output_shape = tuple(self._build_unit(tuple(input_shape)))
            self._body.keep_initializers()
        if output_shape != tuple(input_shape):
            raise ValueError(
                "A unit of a stack must keep the shape. Received: a unit that turns "
                f"{tuple(input_shape)} into {output_shape}"
            )
        weights = {id(variable) for variable in unit.weights}
        # lists that Keras tracks
        self._stacked_weights: list[keras.Variable] = []
        self._seed_states: list[_SeedStates] = []
        for variable in unit.variables:
            initializer, shape = self._body.initial[id(variable)], (self.depth, *variable.shape)
            if id(variable) in weights or is_rate(variable):
                stacked = self._stack(variable, shape, _per_unit(initializer, self._name_of))
                of_kind = self._body.rates if is_rate(variable) else self._stacked_weights
                of_kind.append(stacked)
            else:
                seeds = _SeedStates(_seeds_per_unit(initializer, self._name_of), variable, shape)
                self._seed_states.append(seeds)
                stacked = seeds.state
            self._body.stacked.append(stacked)
        self._body.updated = [
            i for i, v in enumerate(unit.variables) if not v.trainable and not is_rate(v)
        ]
        self._body.weights = [i for i, v in enumerate(unit.variables) if id(v) in weights]
        self.freeze_inside_again()
        if not self.trainable:
            unit.trainable = False

    def _build_unit(self, input_shape: tuple) -> tuple:
        """Build the unit and return the shape of its output."""
        return _build_by_call(self._body.template, input_shape)

    def _stack(self, variable: keras.Variable, shape: tuple, initializer: Callable):
        """Make the weight that holds `variable` for all units. Its path below the
        stack's name is the path of `variable` below the unit's name.
        """
        if variable.constraint is not None:
            raise ValueError(
                "A stack cannot apply a constraint to single units, because one variable holds "
                "their weights: stack units without constraints. Received: "
                f"{variable.path} with {variable.constraint!r}"
            )
        *scopes, name = below(self._body.template, variable).split("/")
        with contextlib.ExitStack() as name_scopes:
            for scope in scopes:
                name_scopes.enter_context(keras.name_scope(scope))
            stacked = _StackedVariable(
                initializer,
                shape,
                dtype=variable.dtype,
                trainable=variable.trainable,
                autocast=keras_private.is_autocast(variable),
                aggregation=variable.aggregation,
                name=name,
            )
        if variable.regularizer is not None:
            stacked.regularizer = _SummedOverUnits(variable.regularizer)
        stacked.stacked_axes = 1  # for optimisers that treat a kernel as a matrix
        stacked.of = variable
        return stacked

    def _name_of(self, i: int) -> str:
        """Return the name of unit `i`."""
        name = self._body.template.name
        match = re.fullmatch(r"(.*?)(\d+)", name)
        return f"{match[1]}{int(match[2]) + i}" if match else f"{name}_{i + 1}"

    def call(self, x, perturbations=None, return_outputs=False, training=None, mask=None):
        """Apply the units.

        Args:
            x: The input of the first unit.
            perturbations: `(depth, *x.shape)`, added to the outputs of the units. With
                zeros, its gradient is the gradient of every unit's output.
            return_outputs: Whether to return the outputs of all units, `(depth,
                *x.shape)`; the last one is the output of the stack.
            training: Whether to run in training mode.
            mask: The mask of x, for units that support masks. By default, the mask that
                Keras attached to x.
        """

        def step(unit, x, own):
            y = self._apply(unit, x, own, training)
            y = y + own["added"] if "added" in own else y
            return y, [y] if return_outputs else []

        added = _added(perturbations, x.dtype)
        outputs = [keras.KerasTensor(x.shape, x.dtype)] if return_outputs else []
        y, collected = self.run(step, x, added, outputs, training=training, mask=mask)
        return collected[0] if return_outputs else y

    def _apply(self, unit, x, own: dict, training):
        """Call the unit. `own` has its entries of the tensors that `run` got."""
        return unit(x, **_training_of(unit, training))

    def run(
        self,
        step: Callable,
        x,
        per_unit: dict | None = None,
        outputs=(),
        *,
        python_loop=False,
        training,
        mask=None,
    ):
        """Call a function for each unit in turn, with that unit's weights.

        Args:
            step: `(unit, x, own) -> (next x, a structure of tensors)`.
            x: The first unit's input.
            per_unit: Tensors with a leading axis of units. A step gets those of its own
                unit, without that axis.
            outputs: `keras.KerasTensor`s with shape and dtype of the tensors that a
                step returns in addition to the next x.
            python_loop: Whether to run a Python loop without recomputing, regardless of
                the stack's own execution. `outputs` may then be left out. It is for
                loops that run only once, which are not worth compiling.
            training: Whether to run in training mode.
            mask: A mask that every x gets.

        Returns:
            The last x, and the tensors that the steps returned, with a leading axis of
            units.
        """
        unit = self._body.template
        variables = [variable for variable, _ in self.stacked_variables]
        updated = self._body.updated if training else []
        read = range(len(variables)) if training else self._body.weights
        values = {i: ops.convert_to_tensor(self._body.stacked[i]) for i in read}
        for i in updated:
            # on torch the assignment below is in place, but recomputing needs the old values
            values[i] = ops.copy(values[i])

        masked = self._masked(x, mask)

        def run_unit(x, of_unit):
            x = masked(x)
            scope = keras.StatelessScope(
                [(variables[i], value) for i, value in zip(read, of_unit["values"], strict=True)]
            )
            with scope:
                y, collected = step(unit, x, of_unit["own"])
            # assigned after the loop, because a recomputation would assign once more
            new = [ops.stop_gradient(scope.get_current_value(variables[i])) for i in updated]
            return y, {"updated": new, "collected": collected}

        execution = "loop" if python_loop else self._execution()
        # XLA on a CPU is slow at convolutions in a loop; matrix products return the same
        as_products = execution == "scan" and devices.scan_is_slow()
        for layer in keras_private.layers(unit):
            if isinstance(layer, PaddedConv2D):
                layer.as_products = as_products
        specs = [keras.KerasTensor(variables[i].shape, values[i].dtype) for i in updated]
        y, new = loops.repeat(
            run_unit,
            x,
            {"values": [values[i] for i in read], "own": per_unit or {}},
            self.depth,
            {"updated": specs, "collected": outputs},
            execution=execution,
            remat=0 if python_loop else int(self.remat),
            unroll=self.unroll,
        )
        for i, value in zip(updated, new["updated"], strict=True):
            self._body.stacked[i].assign(value)
        return y, new["collected"]

    def _masked(self, x, mask) -> Callable:
        """Return a function that attaches the mask of x to a tensor. A loop drops it."""
        unit = self._body.template
        if mask is None or not unit.supports_masking:
            return lambda x: x
        if unit.compute_mask(x, mask) is not mask:
            raise ValueError(
                "A unit of a stack must keep the mask of its input: use separate units. Received: "
                f"a mask, and {unit!r} with its own `compute_mask`"
            )
        layer = _Masked(dtype=unit.dtype_policy)
        return lambda x: layer(x, mask=mask)

    def _execution(self) -> str:
        if keras.backend.backend() not in loops.SCAN_BACKENDS:
            return "loop"
        return "scan" if self.execution == "auto" else self.execution

    def compute_output_shape(self, input_shape, perturbations_shape=None):
        return input_shape

    def compute_output_spec(
        self, x, perturbations=None, return_outputs=False, training=None, mask=None
    ):
        shape = (self.depth, *x.shape) if return_outputs else x.shape
        return keras.KerasTensor(shape, self.compute_dtype)

    @property
    def variables(self) -> list[keras.Variable]:
        return [*self._without_template(super().variables), *self._body.rates]

    @property
    def weights(self) -> list[keras.Variable]:
        return self._without_template(super().weights)

    def _without_template(self, variables: list[keras.Variable]) -> list[keras.Variable]:
        own = {id(variable) for variable in self._body.template.variables}
        return [variable for variable in variables if id(variable) not in own]

    @property
    def template(self) -> keras.Layer:
        """The template layer, which runs with the weights of each unit in turn. Nothing
        reads the values of its own variables.
        """
        return self._body.template

    @property
    def stacked_variables(self) -> list[tuple[keras.Variable, keras.Variable]]:
        """Pairs of a variable of `template` and the stack's variable that holds its
        values for all units, with a leading axis of units.
        """
        variables, stacked = self._body.template.variables, self._body.stacked
        if len(variables) != len(stacked):
            raise ValueError(
                "The layers inside a stack must keep their variables. Quantize layers, or add LoRA "
                f"to them, in separate units. Received: {self.name!r} with {len(variables)} "
                f"variables per unit, {len(stacked)} when it was built"
            )
        return list(zip(variables, stacked, strict=True))

    @property
    def unit_names(self) -> list[str]:
        return [self._name_of(i) for i in range(self.depth)]

    def unit(self, i: int) -> keras.Layer:
        """Return a new layer with the weights and seeds of unit `i`, counted from 0; a
        negative `i` counts from the end.
        """
        if not -self.depth <= i < self.depth:
            raise IndexError(f"The stack has {self.depth} units. Received: unit({i})")
        self._check_is_built()
        unit = self._new_unit(i % self.depth)
        for variable, stacked in zip(unit.variables, self._body.stacked, strict=True):
            variable.assign(stacked[i])
        return unit

    def _new_unit(self, i: int) -> keras.Layer:
        template = self._body.template
        config = arguments_of(template) | {"name": self._name_of(i)}
        unit = _made(type(template), config, trainable=self.trainable)
        _build_by_call(unit, self.get_build_config()["input_shape"])
        freeze_inside(unit, frozen_inside(template))
        return unit

    def load_units(self, units: Sequence[keras.Layer]) -> None:
        """Load the weights and seeds of built units, one for each unit of the stack.
        The stack is frozen if they are.

        Raises:
            ValueError: for another number of units, or units of another configuration.
                The stack is not changed.
        """
        if len(units) != self.depth:
            raise ValueError(f"The stack has {self.depth} units. Received: {len(units)} units")
        self._check_is_built()
        _check_units(units)
        self._check_same(units)
        columns = zip(*(unit.variables for unit in units), strict=True)
        for stacked, column in zip(self._body.stacked, columns, strict=True):
            stacked.assign(np.stack([ops.convert_to_numpy(v.value) for v in column]))
        self.trainable = units[0].trainable
        freeze_inside(self._body.template, frozen_inside(units[0]))

    def _check_same(self, units: Sequence[keras.Layer]) -> None:
        expected = self._structure(self._body.template)
        expected_shapes = [stacked.shape[1:] for stacked in self._body.stacked]
        for unit in units:
            config = self._structure(unit)
            differences = ", ".join(
                f"{key}={value!r} and {config.get(key)!r}"
                for key, value in expected.items()
                if value != config.get(key)
            )
            if differences:
                raise ValueError(
                    "The units of a stack must have the same configuration. Received: units with "
                    f"{differences}"
                )
            shapes = [variable.shape for variable in unit.variables]
            if shapes != expected_shapes:
                raise ValueError(
                    f"A unit of a stack must keep the shape. Received: {unit!r} with weights of "
                    f"shapes {shapes}"
                )

    def _structure(self, unit: keras.Layer) -> dict:
        """Return what must be equal in all units: their configuration, with those of the
        layers inside, without names, initialisers, seeds and what is frozen.
        """
        may_differ = (
            *("name", "trainable", "frozen_layers"),
            *("kernel_initializer", "bias_initializer", "seed"),
        )

        # a functional model names its layers where it connects them
        places = {layer.name: i for i, layer in enumerate(keras_private.layers(unit))}

        def without(value: Any) -> Any:
            if isinstance(value, str):
                return places.get(value, value)
            if hasattr(value, "get_config"):
                return type(value), without(value.get_config())
            if isinstance(value, dict):
                # the name of a dtype policy is what it does
                is_policy = value.get("class_name") == "DTypePolicy"
                kept = {key: each for key, each in value.items() if key not in may_differ}
                return value if is_policy else {key: without(each) for key, each in kept.items()}
            return list(map(without, value)) if isinstance(value, list | tuple) else value

        return without(arguments_of(unit))

    def _check_is_built(self) -> None:
        if not self.built:
            raise ValueError(
                "The stack has no weights yet: build it first, such as by a call. Received: "
                f"{self!r}"
            )

    def get_config(self):
        config = super().get_config()
        del config["dtype"]  # the unit's
        unit = in_config(self._body.template)
        if isinstance(unit, dict):
            unit["config"].pop("frozen_layers", None)  # the stack holds them
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
        unit: A `ResidualUnit` that keeps the shape, as a template.
        depth, execution, remat, unroll: Arguments of `LayerStack`.
        stochastic_depth: A rate for each unit, instead of the one rate of `unit`.
        shortcut_factors: A factor for each unit, for a shortcut whose factor differs
            between units: `kp.shortcuts.DecayedIdentity`.
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
        shortcut_factors: Sequence[float] | None = None,
        **kwargs,
    ):
        # a config of this stack holds a unit with a rate and a factor already
        if stochastic_depth is not None:
            stochastic_depth = _numbers(stochastic_depth, depth, "stochastic_depth", "rate")
            for rate in stochastic_depth:
                _checks.fraction(rate, "stochastic_depth")
            if isinstance(unit, ResidualUnit):
                unit = unit.changed(stochastic_depth=max(stochastic_depth))
        if shortcut_factors is not None:
            shortcut_factors = _numbers(shortcut_factors, depth, "shortcut_factors", "factor")
            if isinstance(unit, ResidualUnit):
                unit = unit.changed(shortcut=unit.h.with_factor(shortcut_factors[0]))
        self.stochastic_depth = stochastic_depth
        self.shortcut_factors = shortcut_factors
        super().__init__(unit, depth, **kwargs)

    def _check_template(self, template: Any) -> None:
        if not isinstance(template, ResidualUnit):
            raise ValueError(f"`unit` must be a ResidualUnit. Received: unit={template!r}")
        if template.strides > 1:
            raise ValueError(
                "A unit of a stack must keep the shape. Received: a unit with "
                f"strides={template.strides}"
            )

    def _build_unit(self, input_shape: tuple) -> tuple:
        unit = self._body.template
        unit.build(input_shape)
        return unit.compute_output_shape(input_shape)

    @classmethod
    def from_units(cls, units: Sequence[ResidualUnit], **kwargs) -> "UnitStack":
        units = list(units)
        rates = [unit.stochastic_depth or 0.0 for unit in units if isinstance(unit, ResidualUnit)]
        if any(rate != rates[0] for rate in rates):
            kwargs.setdefault("stochastic_depth", rates)
        if all(isinstance(unit, ResidualUnit) and unit.h.differs for unit in units):
            kwargs.setdefault("shortcut_factors", [vars(unit.h)["factor"] for unit in units])
        return super().from_units(units, **kwargs)

    def run(self, step, x, per_unit=None, outputs=(), **options):
        numbers = {"rate": self.stochastic_depth, "factor": self.shortcut_factors}
        own = {
            name: ops.convert_to_tensor(values, "float32")
            for name, values in numbers.items()
            if values is not None
        }
        return super().run(step, x, own | (per_unit or {}), outputs, **options)

    def _apply(self, unit, x, own: dict, training):
        return unit(x, own.get("rate"), own.get("factor"), training=training)

    def _structure(self, unit: ResidualUnit) -> dict:
        # the rates may differ, but only between units that drop F
        rate = unit.stochastic_depth is not None
        if unit.h.differs:
            unit = unit.changed(shortcut=unit.h.with_factor(None))
        return super()._structure(unit) | {"stochastic_depth": rate}

    def _check_same(self, units: Sequence[keras.Layer]) -> None:
        super()._check_same(units)
        if (h := self._body.template.h).differs:
            own = self.shortcut_factors or [h.factor] * self.depth
            given = [unit.h.factor for unit in units]
            if given != own:
                raise ValueError(
                    "The factors of the shortcuts must be those of the stack. Received: units with "
                    f"{given}, a stack with {own}"
                )

    def describe(self) -> str:
        """Return the number of units, and the layers of a unit in order."""
        return f"{self.depth} units, each:\n{self.template.describe()}"

    def paths(self) -> descriptions.Paths:
        """Return the names of the layers of a unit, see `ResidualUnit.paths`."""
        return self.template.paths()

    def _repr_html_(self) -> str:
        title = f"{type(self).__name__} {self.name!r}, {self.depth} units"
        return descriptions.diagram(title, self.paths())

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
        """Run the units in a Python loop and return the parts of each.

        Args:
            x: The input of the first unit.
            look: A function that takes a unit's `Trace` and returns the tensors to
                keep, as a structure; by default all of them.
            perturbations: `(depth, *x.shape)`, added to the outputs of the units.
            residual_scale: `(depth,)`, factors on F(x) of the units.
            detach_residual: See `ResidualUnit.trace`.
            training: Whether to run in training mode.

        Returns:
            The tensors that `look` returned, with a leading axis of units.
        """
        x = chains.prepared(self, x)

        def step(unit, x, own):
            trace = unit.trace(
                x,
                drop_rate=own.get("rate"),
                shortcut_factor=own.get("factor"),
                residual_scale=own.get("scale"),
                detach_residual=detach_residual,
                training=training,
            )
            if "added" in own:
                trace = trace._replace(output=trace.output + own["added"])
            return trace.output, look(trace)

        per_unit = _added(perturbations, x.dtype)
        if residual_scale is not None:
            per_unit["scale"] = ops.convert_to_tensor(residual_scale)
        return self.run(step, x, per_unit, python_loop=True, training=training)[1]

    def _new_unit(self, i: int) -> ResidualUnit:
        template = self._body.template
        own: dict[str, Any] = {}
        if self.stochastic_depth is not None:
            own["stochastic_depth"] = self.stochastic_depth[i]
        if self.shortcut_factors is not None:
            own["shortcut"] = template.h.with_factor(self.shortcut_factors[i])
        unit = template.at(self._name_of(i), trainable=self.trainable, **own)
        unit.build(self.get_build_config()["input_shape"])
        return unit

    def get_config(self):
        rates, factors = self.stochastic_depth, self.shortcut_factors
        return super().get_config() | {
            "stochastic_depth": rates and list(rates),
            "shortcut_factors": factors and list(factors),
        }


def _made(layer_class: type[keras.Layer], config: dict, *, trainable: bool) -> keras.Layer:
    """Make a layer. The configurations of some layers, such as Keras' SpatialDropout1D,
    do not contain `trainable`.
    """
    if "trainable" in config:
        config = config | {"trainable": trainable}
    return layer_class.from_config(config)


def _numbers(values: Sequence[float], depth: int, argument: str, what: str) -> list[float]:
    """Return a number for each unit."""
    numbers = [float(value) for value in values]
    if len(numbers) != depth:
        raise ValueError(
            f"`{argument}` must be a {what} for each unit. Received: {len(numbers)} {what}s for "
            f"depth={depth}"
        )
    return numbers


def _initializer_of(variable: keras.Variable) -> Callable:
    """Return the initialiser of a variable. If the variable has a value already, the
    initialiser returns that value.
    """
    if (initializer := keras_private.initializer_of(variable)) is not None:
        return initializer
    return lambda shape, dtype=None: ops.copy(variable.value)


def _per_unit(initializer: Callable, name_of: Callable[[int], str]) -> Callable:
    """Return an initialiser of a stacked weight: `initializer` draws the values of each
    unit.
    """

    def initialize(shape, dtype=None):
        depth, *unit_shape = shape
        is_seeded = isinstance(initializer, keras.initializers.Initializer) and (
            "seed" in initializer.get_config()
        )
        if is_seeded:
            values = [
                initializers.spawn(initializer, name_of(i))(unit_shape, dtype=dtype)
                for i in range(depth)
            ]
        else:
            values = [initializer(unit_shape, dtype=dtype)] * depth
        return _stacked(values)

    return initialize


def _stacked(values: Sequence):
    """Stack tensors in groups. XLA's time to compile one operation with n operands
    grows with n^2: 26 s for 4,000, 0.2 s in groups. JAX may trace this function to find
    a shape, so it does not use NumPy.
    """
    groups = [ops.stack(values[i : i + GROUP]) for i in range(0, len(values), GROUP)]
    return ops.concatenate(groups)


def _seeds_per_unit(initializer: Callable, name_of: Callable[[int], str]) -> Callable:
    """Return an initialiser of stacked states of a seed generator. The state of each
    unit is a seed of its own and 0, the number of times that it was used.
    """

    def initialize(shape, dtype=None):
        seed = int(ops.convert_to_numpy(initializer((2,), dtype=dtype))[0])
        states = [[initializers.derive_seed(seed, name_of(i)), 0] for i in range(shape[0])]
        return ops.convert_to_tensor(states, dtype)

    return initialize


def _added(perturbations, dtype) -> dict:
    """Return perturbations as tensors per unit."""
    if perturbations is None:
        return {}
    return {"added": ops.convert_to_tensor(perturbations, dtype)}  # on the device of Keras


def _training_of(layer: keras.Layer, training) -> dict:
    return {"training": training} if keras_private.takes_training(layer) else {}


def _build_by_call(unit: keras.Layer, input_shape: tuple) -> tuple:
    """Build a unit by a call and return the shape of its output.

    Raises:
        ValueError: for a unit that adds losses or has metrics.
    """
    sizes = [1, *(4 if size is None else size for size in input_shape[1:])]
    with keras.StatelessScope(collect_losses=True) as scope:
        y = unit(ops.zeros(sizes, unit.compute_dtype), **_training_of(unit, True))
    if scope.losses or any(map(keras_private.has_metrics, keras_private.layers(unit))):
        raise ValueError(
            f"A unit of a stack must not add losses or have metrics. Received: {unit!r}"
        )
    shape = tuple(y.shape)
    return input_shape if list(shape) == sizes else (input_shape[0], *shape[1:])


def _input_shape_of(unit: keras.Layer) -> tuple:
    """Return the shape of the input that a layer was built for."""
    shape = (unit.get_build_config() or {}).get("input_shape")
    if shape is None and isinstance(unit, keras.Model):
        shape = unit.input_shape
    if shape is None:  # a layer without weights, which takes any shape of a rank
        rank = getattr(unit.input_spec, "ndim", None) or 2
        shape = (None, *[8] * (rank - 1))
    return shape


def _check_units(units: Sequence[keras.Layer]) -> None:
    for unit in units:
        if not isinstance(unit, keras.Layer) or not unit.built:
            raise ValueError(f"`units` must be built Keras layers. Received: {unit!r}")
    check_frozen_together({unit.name: (unit.trainable, frozen_inside(unit)) for unit in units})
