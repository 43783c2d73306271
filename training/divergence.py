"""Find the cause of a loss that is not finite by training up to it again, from the last
checkpoint on.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import keras
import ml_dtypes
import numpy as np
from keras import ops

import keras_preact as kp
from keras_preact.health.probe import Probe
from keras_preact.health.weights import owners, places

from .checkpoints import Saved
from .on_device import OnDevice
from .variables import array_of


def message(loss: float, place: str, learning_rate: float) -> str:
    """Return what a person reads first of a divergence.

    Args:
        loss: The loss that is not finite.
        place: Its iteration in words.
        learning_rate: The option of the run.
    """
    return (
        f"Learning rate {learning_rate:g} is probably too high: the loss is {loss} in {place}. "
        "Lower --optimizer.learning-rate or lengthen --schedule.warmup."
    )


def explain(
    model: keras.Model,
    saved: Saved,
    batches: Callable[[int], Iterator[Sequence]],
    step: int,
    *,
    learning_rate: float,
    before_step: Callable[[int], object] = lambda step: None,
    where: Callable[[int], str] = lambda step: f"step {step + 1:,}",
) -> str:
    """Return why the loss was not finite: the first layer whose output was not, or the
    update that broke the weights.

    Training is reproducible, so repeating the steps from a checkpoint on gives the
    model of that step. Afterwards the model has the weights of the checkpoint.

    Args:
        model: Compiled as it was trained.
        saved: An earlier checkpoint of it.
        batches: Returns the batches from a step on.
        step: The step, from 0 on; with several steps per execution the last of them.
        learning_rate: The option of the run.
        before_step: Called with the number of each step before it.
        where: Turns the number of a step into words.

    Returns:
        The likely mistake, the remedy, the evidence, and the checkpoint to return to.
    """
    probe = Probe.of(model.optimizer)
    if probe is not None:
        probe.remove()
    execution = model.steps_per_execution
    model.steps_per_execution = 1
    model.train_function = None
    try:
        number, batch = _repeat(model, saved, batches, step, before_step)
        wrong_images = not _is_finite(batch[0])
        broken = _broken_weight(model)
        if broken is None:
            before_step(number)
            cause = _cause_in_forward_pass(model, batch)
        else:
            cause = (
                f"the update of {where(number - 1)} left weights that are not finite, the last of "
                f"them {broken}"
            )
        before_step(number)
        loss = _train(model, batch)
    finally:
        saved.restore(model)
        model.reset_metrics()
        model.steps_per_execution = execution
        model.train_function = None
    begin = where(saved.step - 1) if saved.step else "the beginning"
    kept = f"Last checkpoint: {saved.path}, of {begin}."
    if math.isfinite(loss):
        return (
            f"{message(math.nan, where(step), learning_rate)} Cause: unknown. When the steps from "
            f"the last checkpoint on are repeated, the loss is {loss:.4g}: a computation is not "
            f"deterministic. {kept}"
        )
    if wrong_images:
        return (
            f"The images of {where(number)} are not finite, so the loss is {loss}. Check the data. "
            f"{kept}"
        )
    return f"{message(loss, where(number), learning_rate)} Cause: {cause}. {kept}"


def _repeat(
    model: keras.Model, saved: Saved, batches: Callable, step: int, before_step: Callable
) -> tuple[int, Sequence]:
    """Train up to `step`, or the first one whose loss is not finite, and return its
    number and its batch.
    """
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
    """Return the last weight that is not finite, in the order of the forward pass:
    gradients come from its end.
    """
    owner = owners(model)
    first: dict[int, int] = {}
    found = []
    for i, variable in enumerate(model.trainable_variables):
        unit = owner.get(id(variable))
        stacked = isinstance(unit, kp.UnitStack)
        begin = first.setdefault(id(unit), i) if stacked else i
        values = array_of(variable)
        rows = values if stacked else [values]
        found += [
            ((begin, number, i), place.name)
            for number, (place, row) in enumerate(
                zip(places(variable.path, unit), rows, strict=True)
            )
            if not np.isfinite(row).all()
        ]
    return max(found)[1] if found else None


def _cause_in_forward_pass(model: keras.Model, batch: Sequence) -> str:
    """Return the first layer whose output is not finite, in words."""
    x, y, *weights = batch
    network = model
    if isinstance(model, OnDevice):
        network, x = model.network, model.cut(x)
    network = _with_single_units(network)
    layers = [layer for layer in network.layers if not isinstance(layer, keras.layers.InputLayer)]
    steps = keras.Model(network.inputs, [layer.output for layer in layers])
    # statistics of the whole batch: no device is asked for its part
    plain = kp.distribution.with_statistics(network, kp.distribution.Statistics())
    with keras.StatelessScope(), plain:
        outputs = keras.tree.flatten(steps(ops.convert_to_tensor(x), training=True))
        values = {id(network.inputs[0]): x}
        for layer, output in zip(layers, outputs, strict=True):
            if not _is_finite(output):
                inputs = [values[id(each)] for each in keras.tree.flatten(layer.input)]
                return _broken_layer(layer, inputs)
            values[id(layer.output)] = output
        loss = model.compute_loss(x, ops.convert_to_tensor(y), output, *weights, training=True)
    if not _is_finite(loss):
        return (
            f"all layers have finite outputs, the last up to {_largest(output):.3g}, and the loss "
            "of these is not finite"
        )
    return "unknown, since all layers have finite outputs when they are computed one by one"


def _with_single_units(network: keras.Model) -> keras.Model:
    """Return a copy in which each unit is a layer, or the network if it has no stack."""
    stacked = any(isinstance(layer, kp.UnitStack) for layer in network.layers)
    return kp.models.unstack(network) if stacked else network


def _broken_layer(layer: keras.Layer, inputs: Sequence) -> str:
    """Return in words what of a layer's computation is not finite: in a unit, a layer
    of its branch or a part of the sum.
    """
    part = "output"
    if isinstance(layer, kp.ResidualUnit):
        x = inputs[0]
        for inner in (*layer.first, *layer.rest):
            output = inner(x, training=True)
            if not _is_finite(output):
                return _broken_layer(inner, [x])
            x = output
        parts = layer.trace(inputs[0], training=True)._asdict()
        part = next((name for name, value in parts.items() if not _is_finite(value)), part)
    end = float(ml_dtypes.finfo(layer.compute_dtype).max)
    return (
        f"the {part} of {layer.path or layer.name} is not finite, with inputs up to "
        f"{_largest(inputs):.3g} (the largest {layer.compute_dtype} is {end:.3g})"
    )


def _arrays(tensors) -> Iterator[np.ndarray]:
    for tensor in keras.tree.flatten(tensors):
        if tensor is not None:
            yield np.asarray(ops.convert_to_numpy(tensor), "float32")  # the largest range


def _is_finite(tensors) -> bool:
    return all(np.isfinite(array).all() for array in _arrays(tensors))


def _largest(tensors) -> float:
    return max((float(np.max(np.abs(array), initial=0)) for array in _arrays(tensors)), default=0.0)
