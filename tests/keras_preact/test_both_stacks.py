"""Every feature on three units, on a `UnitStack` of them and on a `LayerStack` of them: it
finds the same units and weights, and measures the same.
"""

import copy
import functools
import tempfile

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.distribution.base import Statistics, with_statistics
from keras_preact.export import _flat
from keras_preact.health.weights import Places
from tests.keras_preact import harness
from tests.keras_preact import test_features_by_precision as features

pytestmark = pytest.mark.backend

X, LABELS = features.X, features.LABELS
STACKS = {"UnitStack": kp.UnitStack, "LayerStack": kp.LayerStack}
#: Tracing a graph takes TensorFlow seconds; `training` traces one.
UNTRACED = {"run_eagerly": keras.backend.backend() == "tensorflow"}


@functools.cache
def network(kind: str) -> keras.Model:
    """Three equal units, with Keras' layers around them. Features leave it as it is."""
    layers = keras.layers
    inputs = keras.Input(X.shape[1:])
    x = layers.Conv2D(4, 3, padding="same", name="stem")(inputs)
    if kind == "separate":
        units = [kp.ResidualUnit(4, name=f"stage1_unit{i}") for i in (1, 2, 3)]
        for i, unit in enumerate(units):
            unit.build((None, 6, 6, 4))
            harness.randomize(unit, i)
    else:
        of = [network("separate").get_layer(f"stage1_unit{i}") for i in (1, 2, 3)]
        units = [STACKS[kind].from_units(of, name="stage1_units")]
    for unit in units:
        x = unit(x)
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, layers.Dense(3, name="head")(x))
    ends = [model.get_layer("stem"), model.get_layer("head")]
    for i, layer in enumerate(ends):
        harness.randomize(layer, 10 + i)
    return model


def rows(model) -> dict[str, np.ndarray]:
    """The weights of a model, a weight of a stack as those of its units."""
    find, named = Places(model), {}
    for weight in model.weights:
        places, value = find.of(weight), harness.numpy(weight)
        is_stacked = isinstance(find.owners.get(id(weight)), kp.LayerStack)
        named |= {place.name: value[i] if is_stacked else value for i, place in enumerate(places)}
    return named


def trained(model, optimizer, *callbacks, **options) -> dict[str, np.ndarray]:
    """The weights after two updates of a copy."""
    model = copied(model)
    harness.compiled(model, optimizer, **options)
    model.fit(X, LABELS, batch_size=4, shuffle=False, verbose=0, callbacks=list(callbacks))
    return rows(model)


def copied(model) -> keras.Model:
    """A copy from the model's configuration."""
    other = keras.Model.from_config(model.get_config())
    other.set_weights(model.get_weights())
    return other


# --- Features: each returns its numbers by name


def training(model):
    return trained(model, kp.optimizers.CoupledSGD(0.01, coupled_weight_decay=0.1))


def muon(model):
    return trained(model, kp.optimizers.Muon(0.01), **UNTRACED)


def training_health(model):
    health = kp.TrainingHealth(1, sample=X, report=lambda message: None)
    trained(model, kp.optimizers.CoupledSGD(0.01), health, **UNTRACED)
    record, numbers = health.history[0], {}
    for name in ("gradient_norms", "weight_norms", "update_norms"):
        values = zip(health.weights, getattr(record, name), strict=True)
        numbers |= {f"{name} {place}": value for place, value in values}
    inputs = zip(health.inputs, record.activation_stds, strict=True)
    numbers |= {f"inputs {place}": value for place, value in inputs}
    kernels = zip(health._watched.places, health._watched.kernels, strict=True)
    numbers |= {f"is kernel {place.name}": float(kernel) for place, kernel in kernels}
    return numbers | {"ratio": record.layer_gradient_ratio}


def statistics_of_replicas(model):
    """Each half of the batch has its own statistics, in every batch normalisation."""
    model = copied(model)
    with with_statistics(model, Statistics(groups=2)):
        return {"output": harness.numpy(model(X, training=True))} | rows(model)


def frozen_norms(model):
    """A loop freezes them, as a file and a copy hold it."""
    model = copied(model)
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False
    model = copied(model)
    before = rows(model)
    harness.compiled(model, kp.optimizers.CoupledSGD(0.01), **UNTRACED)
    model.fit(X, LABELS, batch_size=4, shuffle=False, verbose=0)
    after = rows(model)
    changed = {path for path, value in after.items() if np.any(value != before[path])}
    assert changed == {path for path in after if "norm" not in path}
    return after


def folded(model):
    return {"output": harness.numpy(_flat.flat(model, fold=True)(X, training=False))}


def multiply_adds(model):
    from training.run.estimates import multiply_adds

    return {"products": multiply_adds(model, keras.KerasTensor((1, *X.shape[1:]), "float32"))}


# --- Features of Keras


def deep_copy(model):
    return trained(copy.deepcopy(model), "sgd")


def weighted_images(model):
    model = harness.compiled(copied(model), "sgd")
    weights = np.linspace(0, 1, len(X))
    model.fit(X, LABELS, batch_size=4, shuffle=False, verbose=0, sample_weight=weights)
    return rows(model)


def averaged_weights(model):
    """The average replaces the weights after each epoch."""
    optimizer = keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.5, clipnorm=1.0, gradient_accumulation_steps=2
    )
    averages = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    return trained(model, optimizer, averages, **UNTRACED)


def histograms(model):
    with tempfile.TemporaryDirectory() as folder:
        return trained(model, "sgd", keras.callbacks.TensorBoard(folder, histogram_freq=1))


def a_network_called_twice(model):
    model = copied(model)
    inputs = [keras.Input(X.shape[1:]) for _ in range(2)]
    pair = keras.Model(inputs, keras.layers.subtract([model(x) for x in inputs]))
    pair.compile("sgd", "mse", **UNTRACED)
    pair.fit([X, X[::-1].copy()], np.ones((len(X), 3)), shuffle=False, verbose=0)
    return rows(model)


def at_each_time(model):
    inputs = keras.Input((2, *X.shape[1:]))
    distributed = keras.Model(inputs, keras.layers.TimeDistributed(model)(inputs))
    return {"output": harness.numpy(distributed(X.reshape(-1, 2, *X.shape[1:])))}


def weights_in_parts(model):
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(f"{folder}/parts.weights.json", max_shard_size=5e-6)
        loaded = keras.Model.from_config(model.get_config())
        loaded.load_weights(f"{folder}/parts.weights.json")
    return rows(loaded)


def pure_function(model):
    """The output and the new statistics."""
    trainable = [variable.value for variable in model.trainable_variables]
    others = [variable.value for variable in model.non_trainable_variables]
    output, others = model.stateless_call(trainable, others, X, training=True)
    model = copied(model)
    for variable, value in zip(model.non_trainable_variables, others, strict=True):
        variable.assign(value)
    return {"output": harness.numpy(output)} | rows(model)


def saved_by_keras(model):
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as folder:
        model.export(folder, verbose=False)
        loaded = tf.saved_model.load(folder)
    return {f"{count} images": loaded.serve(X[:count]).numpy() for count in (1, len(X))}


def image_by_image(model):
    """Vectorised over images."""
    if keras.backend.backend() == "jax":
        import jax

        return {"output": harness.numpy(jax.vmap(lambda x: model(x[None])[0])(X))}
    import tensorflow as tf

    return {"output": tf.vectorized_map(lambda x: model(x[None])[0], tf.constant(X)).numpy()}


FEATURES = {
    feature.__name__: feature
    for feature in (
        *features.OF_ANY_MODEL,
        training,
        muon,
        training_health,
        statistics_of_replicas,
        frozen_norms,
        folded,
        multiply_adds,
    )
}
OF_KERAS = {
    feature.__name__: feature
    for feature in (
        deep_copy,
        weighted_images,
        averaged_weights,
        histograms,
        a_network_called_twice,
        at_each_time,
        weights_in_parts,
        pure_function,
        saved_by_keras,
        image_by_image,
    )
}
# Keras 3.15 warns about JAX here, and fails on PyTorch, also without a stack.
if keras.backend.backend() != "tensorflow":
    del OF_KERAS["saved_by_keras"]
if keras.backend.backend() == "torch":
    del OF_KERAS["image_by_image"]
EVERY = FEATURES | OF_KERAS


@functools.cache
def expected(feature: str) -> dict[str, np.ndarray]:
    return EVERY[feature](network("separate"))


@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize(
    "feature", [*FEATURES, *(pytest.param(name, marks=pytest.mark.soak) for name in OF_KERAS)]
)
def test_feature(feature, kind):
    features.check(feature, EVERY[feature](network(kind)), expected(feature), "float32")
