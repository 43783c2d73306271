"""Where a loss that is not finite comes from: found by training up to it again, from the last checkpoint on."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import ml_dtypes
import numpy as np
from keras import ops

from keras_preact import _autodiff, _batch_norm
from keras_preact.health.probe import Probe
from keras_preact.health.weights import owners, places
from keras_preact.stacks import UnitStack, written_out

from .checkpoints import Saved
from .variables import array_of

_REMEDY = "Lower --optimizer.learning-rate or lengthen --schedule.warmup"


def explain(
    model: keras.Model,
    saved: Saved,
    batches: Callable[[int], Iterator[Sequence]],
    step: int,
    *,
    before_step: Callable[[int], object] = lambda step: None,
    where: Callable[[int], str] = lambda step: f"step {step + 1:,}",
) -> str:
    """Say why the loss was not finite: which layer's output was the first that was not, or which update broke the weights.

    Training is reproducible, so what the model was in that step is found by repeating the steps before. Afterwards the model
    is as in the checkpoint.

    Args:
        model: Compiled as it was trained.
        saved: A checkpoint of it from before.
        batches: Returns the batches from a step on.
        step: The step, from 0 on, or with several steps an execution the last of them.
        before_step: Called with the number of each step in front of it.
        where: Turns the number of a step into words.

    Returns:
        A sentence on the cause, and one on what can be done.
    """
    probe = Probe.of(model.optimizer)
    if probe is not None:
        probe.remove()
    execution = model.steps_per_execution
    model.steps_per_execution = 1
    model.train_function = None
    try:
        number, batch = _repeat(model, saved, batches, step, before_step)
        broken = _broken_weight(model)
        if broken is None:
            before_step(number)
            cause = _cause_in_forward_pass(model, batch)
        else:
            cause = f"the update of {where(number - 1)} left weights that are not finite, the last of them {broken}"
        before_step(number)
        loss = _train(model, batch)
    finally:
        saved.restore(model)
        model.reset_metrics()
        model.steps_per_execution = execution
        model.train_function = None
    if math.isfinite(loss):
        return (
            f"The loss was not finite in {where(step)}, but it is {loss:.4g} when the steps from {saved.path} on are "
            f"repeated: what computes it is not deterministic. {_REMEDY}."
        )
    kept = where(saved.step - 1) if saved.step else "the beginning"
    return f"The loss is {loss} in {where(number)}: {cause}. {_REMEDY}; {saved.path} is of {kept}."


def _repeat(model: keras.Model, saved: Saved, batches: Callable, step: int, before_step: Callable) -> tuple[int, Sequence]:
    """Train up to `step`, or the first one whose loss is not finite, and return its number and its batch."""
    saved.restore(model)
    stream = batches(saved.step)
    for number in range(saved.step, step):
        before_step(number)
        if not math.isfinite(_train(model, next(stream))):
            return _repeat(model, saved, batches, number, before_step)
    return step, next(stream)


def _train(model: keras.Model, batch: Sequence) -> float:
    """Train one step and return its loss."""
    model.reset_metrics()
    return float(model.train_on_batch(*batch, return_dict=True)["loss"])


def _broken_weight(model: keras.Model) -> str | None:
    """Return the last weight that is not finite, in the order of the forward pass: gradients come from behind."""
    owner = owners(model)
    first: dict[int, int] = {}
    found = []
    for i, variable in enumerate(model.trainable_variables):
        unit = owner.get(id(variable))
        stacked = isinstance(unit, UnitStack)
        begin = first.setdefault(id(unit), i) if stacked else i
        values = array_of(variable)
        rows = values if stacked else [values]
        found += [
            ((begin, number, i), place.name)
            for number, (place, row) in enumerate(zip(places(variable.path, unit), rows, strict=True))
            if not np.isfinite(row).all()
        ]
    return max(found)[1] if found else None


def _cause_in_forward_pass(model: keras.Model, batch: Sequence) -> str:
    x, y, *weights = batch
    if not _is_finite(x):
        return "what the network reads is not finite"
    first = _FirstNotFinite(model)
    plain = _batch_norm.statistics(_batch_norm.Statistics())  # of the whole batch: no device is asked for its part
    with first.watching(), keras.StatelessScope(), written_out(), plain, _autodiff.without_gradients():
        outputs = model(ops.convert_to_tensor(x), training=True)
        loss = model.compute_loss(x, ops.convert_to_tensor(y), outputs, *weights, training=True)
    if first.found is not None:
        return first.found
    if not _is_finite(loss):
        return f"the outputs of all layers are finite, the loss of the last, which go up to {_largest(outputs):.3g}, is not"
    return "computed layer by layer, the outputs of all layers are finite"


class _FirstNotFinite:
    """Looks at what every layer returns, those in units and in stacks of units included, in the order in which they end.

    Args:
        model: Its layers are called one by one: nothing is compiled, and stacks are written out.

    Attributes:
        found: The first layer whose output is not finite, in words.
    """

    def __init__(self, model: keras.Model):
        self.found: str | None = None
        #: Each layer, what its name is when it is called, and what else happens in front of a call.
        self._layers: list[tuple[keras.Layer, Callable[[], str], Callable[[], object]]] = []
        for layer in model._flatten_layers(include_self=False):
            self._layers.append((layer, functools.partial(_name, layer), lambda: None))
            if isinstance(layer, UnitStack):
                self._add_units(layer)

    def _add_units(self, stack: UnitStack) -> None:
        pattern = stack.pattern  # which is called with the weights of each unit in turn
        names = iter(stack.unit_names)
        unit = ""

        def begin() -> None:
            nonlocal unit
            unit = next(names)

        def name(layer: keras.Layer) -> str:
            return "/".join([unit, *_name(layer).split(f"{pattern.name}/", 1)[1:]])

        for layer in pattern._flatten_layers():
            self._layers.append((layer, functools.partial(name, layer), begin if layer is pattern else lambda: None))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        try:
            for layer, name, begin in self._layers:
                vars(layer)["call"] = self._watched(layer, name, begin)
            yield
        finally:
            for layer, _, _ in self._layers:
                vars(layer).pop("call", None)

    def _watched(self, layer: keras.Layer, name: Callable[[], str], begin: Callable[[], object]) -> Callable:
        plain = layer.call

        def call(*args: Any, **kwargs: Any):
            begin()
            outputs = plain(*args, **kwargs)
            if self.found is None and not _is_finite(outputs):
                end = float(ml_dtypes.finfo(layer.compute_dtype).max)
                self.found = (
                    f"the output of {name()} is not finite; it reads numbers up to {_largest(args):.3g}, and "
                    f"{layer.compute_dtype} ends at {end:.3g}"
                )
            return outputs

        return call


def _name(layer: keras.Layer) -> str:
    return layer.path or layer.name


def _arrays(tensors) -> Iterator[np.ndarray]:
    for tensor in keras.tree.flatten(tensors):
        if tensor is not None:
            yield np.asarray(ops.convert_to_numpy(tensor), "float32")  # which holds more than what is smaller


def _is_finite(tensors) -> bool:
    return all(np.isfinite(array).all() for array in _arrays(tensors))


def _largest(tensors) -> float:
    return max((float(np.max(np.abs(array), initial=0)) for array in _arrays(tensors)), default=0.0)
