"""What the tests share: a layer's weights by path, random ones in their place, gradients on any backend."""

import keras
import numpy as np

import keras_preact as kp
from tests import reference

#: Fields of `reference.Unit` that are arguments of `ResidualUnit` as well.
SHARED_OPTIONS = (
    "block",
    "strides",
    "arrangement",
    "shortcut",
    "shape_shortcut",
    "activate_shape_shortcut",
    "stride_on",
    "normalization",
    "activation",
    "groups",
)


def paths(layer) -> list[str]:
    """Paths of a unit's weights below the unit's own name; of a model's weights as they are."""
    if isinstance(layer, keras.Model):
        return [weight.path for weight in layer.weights]
    return [weight.path.split(f"{layer.name}/", 1)[1] for weight in layer.weights]


def weights(layer) -> dict[str, np.ndarray]:
    return dict(zip(paths(layer), map(np.array, layer.get_weights()), strict=True))


def randomize(layer, seed=0):
    """Replace every weight, so that none is where an initialiser leaves it (gamma 1, beta 0): a lost one would go unseen."""
    rng = np.random.default_rng(seed)

    def draw(weight):
        kind = weight.path.rsplit("/", 1)[1]
        if kind in ("moving_variance", "gamma", "scale"):
            return rng.uniform(0.5, 1.5, weight.shape)
        if kind == "kernel":
            return rng.normal(size=weight.shape) / np.sqrt(np.prod(weight.shape[:-1]))
        return rng.normal(size=weight.shape) * 0.5

    layer.set_weights([draw(weight) for weight in layer.weights])


def images(*shape, seed=1):
    """Values of both signs: an activation in the wrong place shows."""
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def unit_on(x, filters, seed=0, **options):
    """A built `ResidualUnit` with random weights."""
    unit = kp.ResidualUnit(filters, **options)
    unit.build(x.shape)
    randomize(unit, seed)
    return unit


def reference_of(unit, **options) -> reference.Unit:
    """The NumPy unit with the weights of `unit`; `options` are what `unit` was made with."""
    options = {key: value for key, value in options.items() if key in (*SHARED_OPTIONS, "training", "factors")}
    return reference.Unit(weights(unit), unit.filters, **options)


def value_and_grad(layer, x, cotangent, training=True):
    """Return `sum(layer(x) * cotangent)` and its gradients: on x, and on each trainable weight by path."""
    names = {id(weight): path for weight, path in zip(layer.weights, paths(layer), strict=True)}
    names = [names[id(weight)] for weight in layer.trainable_weights]
    value, gradients = BACKENDS[keras.backend.backend()](layer, x, cotangent, training)
    on_x, *on_weights = (np.array(keras.ops.convert_to_numpy(gradient), "float64") for gradient in gradients)
    return float(value), on_x, dict(zip(names, on_weights, strict=True))


def _tensorflow(layer, x, cotangent, training):
    import tensorflow as tf

    x = tf.constant(x)
    trainable = [weight.value for weight in layer.trainable_weights]
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = tf.reduce_sum(layer(x, training=training) * cotangent)
    return value, tape.gradient(value, [x, *trainable])


def _jax(layer, x, cotangent, training):
    import jax

    frozen = [variable.value for variable in layer.non_trainable_variables]

    def loss(x, trainable):
        y, _ = layer.stateless_call(trainable, frozen, x, training=training)
        return (y * cotangent).sum()

    value, (on_x, on_weights) = jax.value_and_grad(loss, argnums=(0, 1))(
        jax.numpy.asarray(x), [weight.value for weight in layer.trainable_weights]
    )
    return value, [on_x, *on_weights]


def _torch(layer, x, cotangent, training):
    import torch

    x = torch.tensor(x, requires_grad=True)
    value = (layer(x, training=training) * torch.as_tensor(cotangent)).sum()
    return value.detach(), torch.autograd.grad(value, [x, *(weight.value for weight in layer.trainable_weights)])


BACKENDS = {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}
