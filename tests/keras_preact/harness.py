"""Functions that the tests share: weights of a layer by path, random weights, gradients
on any backend, and checks for every network.
"""

import dataclasses
import itertools
import json
import re

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.options import nested
from tests import reference

#: Options of `reference.Unit`; most are those of `ResidualUnit`.
REFERENCE_OPTIONS = {field.name for field in dataclasses.fields(reference.Unit)}

#: The shortcuts of Table 1, and those whose h is an identity.
TABLE_1 = list(kp.SHORTCUTS)[:7]
#: Shortcuts that need their place in a network, for a unit by itself. The factors are those that
#: `reference.Unit` has by default.
ALONE = {
    "decayed_identity": kp.shortcuts.DecayedIdentity(factor=0.5),
    "depth_scaling": kp.shortcuts.DepthScaling(base=1, units=2),
}


def alone(options):
    """Return options with the shortcut of a unit by itself."""
    name = options.get("shortcut")
    return options | {"shortcut": ALONE[name]} if name in ALONE else options


IDENTITIES = ("identity", "scaled_residual", "orthogonal", "depth_scaling")


def error_of(call) -> str:
    """Return the message of the ValueError that `call` must raise."""
    with pytest.raises(ValueError, match=r".") as error:
        call()
    return str(error.value)


def numpy(tensor) -> np.ndarray:
    """Return a copy of a tensor's values; 16-bit floats become float32."""
    if keras.backend.standardize_dtype(tensor.dtype) in ("bfloat16", "float16"):
        tensor = keras.ops.cast(tensor, "float32")
    return np.array(keras.ops.convert_to_numpy(tensor))


def label(options) -> str:
    """Return a name of a test's options. It has no addresses of objects, so that it is the
    same in every process.
    """
    return re.sub(r" at 0x\w+", "", str(options))


def paths(layer) -> list[str]:
    """Return the paths of a layer's weights. Paths of a unit start after its name; paths
    of a model are complete.
    """
    if isinstance(layer, keras.Model):
        return [weight.path for weight in layer.weights]
    return [weight.path.split(f"{layer.name}/", 1)[1] for weight in layer.weights]


def weights(layer) -> dict[str, np.ndarray]:
    return dict(zip(paths(layer), map(np.array, layer.get_weights()), strict=True))


def randomize(layer, seed=0):
    """Replace the initial value of every weight (gamma 1, beta 0): with it, a missing
    weight would not be noticed.
    """
    rng = np.random.default_rng(seed)

    def draw(weight):
        kind = weight.path.rsplit("/", 1)[1]
        if kind in ("moving_variance", "gamma", "scale"):
            return rng.uniform(0.5, 1.5, weight.shape)
        if kind == "kernel":
            return rng.normal(size=weight.shape) / np.sqrt(np.prod(weight.shape[:-1]))
        return rng.normal(size=weight.shape) * 0.5

    layer.set_weights([draw(weight) for weight in layer.weights])


def kernels(layer) -> dict[str, np.ndarray]:
    return {path: value for path, value in weights(layer).items() if path.endswith("kernel")}


def check_distinct(kernels) -> None:
    """Check that no kernel equals another one up to its size and its standard deviation.
    Kernels of zeros do not count.
    """
    drawn = {path: kernel[kernel != 0] for path, kernel in kernels.items() if kernel.any()}
    for (path, one), (other, two) in itertools.combinations(drawn.items(), 2):
        size = min(one.size, two.size)
        alike = np.allclose(one[:size] / one.std(), two[:size] / two.std())
        assert not alike, (path, other)


def variable(values, path="conv/kernel") -> keras.Variable:
    """A weight of a layer, with the path `LAYER/WEIGHT`."""
    layer, name = path.split("/")
    with keras.name_scope(layer):
        return keras.Variable(values, name=name)


def changed(layer, before) -> set[str]:
    """Return the paths of the weights that differ from `before`."""
    return {
        path for path, value in weights(layer).items() if not np.array_equal(value, before[path])
    }


def compiled(model, optimizer="sgd", **options):
    """Compile a classifier that returns logits, and return it."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **options)
    return model


def longest_stack(model) -> int:
    """Return the number of units in the longest stack of a network. With fewer than
    three, a wrong order of units hardly shows.
    """
    return max((each.depth for each in model.segments if isinstance(each, kp.UnitStack)), default=0)


def images(*shape, seed=1):
    """Values of both signs, so that an activation in the wrong place shows."""
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def with_streams(shape, shortcut="identity"):
    """The shape of a unit's input, which holds all its residual streams, for the shape of
    one stream.
    """
    return (*shape[:-1], shape[-1] * kp.shortcuts.get(shortcut).streams)


def unit_of(filters, *, block="basic", **options):
    """A `ResidualUnit`; options of its block are arguments by name, as in a network."""
    return kp.ResidualUnit(filters, **nested(block, alone(options)))


def check_model(build, folder) -> None:
    """Check shapes, serialisation, dtype policies and data formats of a network.

    `build(**options)` makes the network; it takes the options of every builder. The file
    is written to `folder`.
    """
    model = build()
    randomize(model)
    x = images(2, *(size or 16 for size in model.input_shape[1:]))
    y = numpy(model(x, training=False))
    assert y.shape == (2, *model.output_shape[1:])
    assert np.isfinite(y).all()
    check_copies(model, x, y, folder)

    mixed = build(dtype="mixed_bfloat16")
    mixed.set_weights(model.get_weights())
    assert {weight.dtype for weight in mixed.weights} == {"float32"}
    assert {unit.compute_dtype for unit in mixed.copy_units()} == {"bfloat16"}
    assert mixed.output.dtype == "float32"
    close(numpy(mixed(x, training=False)), y, 0.1)

    first = build(data_format="channels_first")
    assert paths(first) == paths(model)
    first.set_weights(model.get_weights())
    moved = np.moveaxis(x, -1, 1) if x.ndim == 4 else x
    assert first.input_shape == (None, *moved.shape[1:])
    close(numpy(first(moved, training=False)), y, 1e-4)


def check_copies(model, x, y, folder) -> None:
    """Check that a `.keras` file and a config in JSON give the same network."""
    config = json.loads(json.dumps(model.get_config()))
    assert config == model.get_config()
    copy = type(model).from_config(config)
    copy.set_weights(model.get_weights())
    model.save(folder / "model.keras")
    outputs = [tensor.shape for tensor in model.unit_outputs]
    segments = [type(segment) for segment in model.segments]
    for other in (copy, keras.saving.load_model(folder / "model.keras")):
        assert type(other) is type(model)
        assert other.name == model.name
        assert other.get_config() == model.get_config()
        assert {w.path: w.shape for w in other.weights} == {w.path: w.shape for w in model.weights}
        assert (other.logits is None) == (model.logits is None)
        assert [type(segment) for segment in other.segments] == segments
        assert [tensor.shape for tensor in other.unit_outputs] == outputs
        np.testing.assert_array_equal(numpy(other(x, training=False)), y)


def unit_on(x, filters, seed=0, **options):
    """A built `ResidualUnit` with random weights."""
    unit = unit_of(filters, **options)
    unit.build(x.shape)
    randomize(unit, seed)
    return unit


def reference_of(unit, **options) -> reference.Unit:
    """The NumPy unit with the weights of `unit`; `options` are the options of `unit`."""
    known = {key: value for key, value in options.items() if key in REFERENCE_OPTIONS}
    return reference.Unit(weights(unit), unit.filters, **known)


def value_and_grad(layer, x, cotangent, training=True):
    """Return `sum(layer(x) * cotangent)` and its gradients on x, and on each trainable
    weight by path.
    """
    y, on_x, on_weights = step_of(layer, cotangent, training, compiled=False)(x)
    names = dict(zip(map(id, layer.weights), paths(layer), strict=True))
    gradients = {names[key]: np.asarray(value, "float64") for key, value in on_weights.items()}
    return float((y.astype("float64") * cotangent).sum()), np.asarray(on_x, "float64"), gradients


def check_directions(loss, on_x, on_weights, rng) -> None:
    """Compare gradients with central differences, along one random direction each.

    `loss(path, move)` is the exact loss with `move` added to a weight, or to x for None.
    """
    step = 1e-6
    for path, gradient in [(None, on_x), *on_weights.items()]:
        direction = rng.normal(size=gradient.shape)
        moved = [loss(path, sign * step * direction) for sign in (1, -1)]
        got, want = (gradient * direction).sum(), (moved[0] - moved[1]) / (2 * step)
        np.testing.assert_allclose(got, want, 1e-3, 1e-3, err_msg=str(path))


def step_of(layer, cotangent, training=True, **options):
    """Return a function that takes x and returns `y = layer(x)` and the gradients of
    `sum(y * cotangent)`: on x and, by their ids, on the weights. It updates the layer's
    state as a train step does.
    """

    def function(x):
        y = layer(x, training=training)
        return keras.ops.sum(keras.ops.multiply(y, cotangent)), [y]

    run = step(function, layer, **options)

    def of_x(x):
        (y,), (on_x,), on_weights = run(x)
        return y, on_x, on_weights

    return of_x


def step(function, layer, **options):
    """Compile a `function` of arrays and of a layer's variables, with its gradients. State
    that it writes is kept in the layer.

    Args:
        function: Returns a scalar and a list of tensors. The gradients are the scalar's, on
            the arrays and the trainable weights.
        options: `compiled`, whether to trace a graph on TensorFlow, and options of
            `tf.function`.

    Returns:
        A function that takes the arrays and returns the tensors, the gradients on the
        arrays, and the gradients on the weights by the weights' ids.
    """
    run = _STEPS[keras.backend.backend()](function, layer, **options)

    def of_arrays(*arrays):
        tensors, on_arrays, on_weights = (
            [np.array(keras.ops.convert_to_numpy(tensor)) for tensor in each]
            for each in run(*arrays)
        )
        ids = map(id, layer.trainable_variables)
        return tensors, on_arrays, dict(zip(ids, on_weights, strict=True))

    return of_arrays


def _tensorflow_step(function, layer, compiled=True, **options):
    import tensorflow as tf

    values = [variable.value for variable in layer.trainable_variables]

    def run(*arrays):
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            value, tensors = function(*arrays)
        return tensors, *tape.gradient(value, (list(arrays), values))

    run = tf.function(run, **options) if compiled else run
    return lambda *arrays: run(*map(tf.constant, arrays))


def _jax_step(function, layer, compiled=True):
    import jax

    trainable, state = layer.trainable_variables, layer.non_trainable_variables

    def pure(arrays, values, state_values):
        pairs = [*zip(trainable, values, strict=True), *zip(state, state_values, strict=True)]
        with keras.StatelessScope(pairs) as scope:
            value, tensors = function(*arrays)
        return value, (tensors, [scope.get_current_value(variable) for variable in state])

    gradient = jax.jit(jax.value_and_grad(pure, argnums=(0, 1), has_aux=True))

    def run(*arrays):
        values = [[variable.value for variable in variables] for variables in (trainable, state)]
        (_, (tensors, new)), (on_arrays, on_weights) = gradient(
            [jax.numpy.asarray(array) for array in arrays], *values
        )
        for variable, value in zip(state, new, strict=True):
            variable.assign(value)
        return tensors, on_arrays, on_weights

    return run


def _torch_step(function, layer, compiled=True):
    import torch

    def run(*arrays):
        arrays = [torch.tensor(array, requires_grad=True) for array in arrays]
        weights = [variable.value for variable in layer.trainable_variables]
        value, tensors = function(*arrays)
        gradients = torch.autograd.grad(value, [*arrays, *weights])
        return tensors, gradients[: len(arrays)], gradients[len(arrays) :]

    return run


_STEPS = {"tensorflow": _tensorflow_step, "jax": _jax_step, "torch": _torch_step}


def close(got, want, tolerance=1e-5, message=""):
    """Compare relative to the largest value of `want`, or to 1 if it is smaller than 1."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, message
    np.testing.assert_allclose(
        got, want, rtol=0, atol=tolerance * max(1.0, np.abs(want).max(initial=0)), err_msg=message
    )
