"""The averages of the weights and their batch statistics, against NumPy and against a
`fit` without them.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_preact as kp
from keras_preact.layers.batch_norm import BatchNormalization
from tests.training.commands import finish, start
from training.averages import Averages, BatchStatistics, averages
from training.callbacks import Count, TorchSeeds

pytestmark = pytest.mark.backend

IMAGES = np.random.default_rng(0).normal(1.0, 2.0, size=(40, 4, 4, 3)).astype("float32")
LABELS = np.random.default_rng(1).integers(0, 10, 40)
#: The last one is smaller.
BATCHES = [IMAGES[:16], IMAGES[16:32], IMAGES[32:]]


def network(dropout=0.0, dtype=None, execution="loop"):
    """Batch normalisation of images, and in the units of a stack, with different
    momenta.
    """
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4, 4, 3))
    x = BatchNormalization(momentum=0.99, name="first", dtype=dtype)(inputs)
    x = keras.layers.GlobalAveragePooling2D(dtype=dtype)(keras.layers.ReLU(dtype=dtype)(x))
    unit = kp.ResidualUnit(3, block="dense", dropout=dropout, dtype=dtype, name="unit1")
    x = kp.UnitStack(unit, 2, execution=execution, name="stack")(x)
    return keras.Model(inputs, keras.layers.Dense(10, name="logits", dtype="float32")(x))


def compiled(model, use_ema=True, scaled=False):
    """With steps long enough that raw and averaged weights are far apart."""
    optimizer = kp.optimizers.CoupledSGD(0.1, use_ema=use_ema, ema_momentum=0.6)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    whole = keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer
    model.compile(whole, loss, jit_compile=keras.backend.backend() == "jax")
    return model


def fit(model, callbacks, **options):
    """With the random numbers of a run: on torch, whose own a validation draws from,
    they follow from the step.
    """
    if keras.backend.backend() == "torch":
        callbacks = [count := Count(4), TorchSeeds(0, 0, count), *callbacks]
    data = {"batch_size": 10, "shuffle": False, "verbose": 0, "validation_data": (IMAGES, LABELS)}
    return model.fit(IMAGES, LABELS, callbacks=callbacks, **(data | options)).history


def values(variables):
    return [np.array(ops.convert_to_numpy(variable)) for variable in variables]


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def by_name(model):
    return {variable.path: values([variable])[0] for variable in model.variables}


def reference(model, batches):
    """The mean and variance in front of each normalisation, means over the batches, in
    float64 and layer by layer.
    """
    weights = by_name(model)
    first, stack = model.get_layer("first"), model.get_layer("stack")
    inner = next(each for each in stack.pattern._flatten_layers() if hasattr(each, "gamma"))
    found = {name: np.zeros(value.shape) for name, value in weights.items() if "moving_" in name}

    def normalize(x, key, place, epsilon):
        axes = tuple(range(x.ndim - 1))
        mean, variance = x.mean(axes), x.var(axes)
        found[f"{key}/moving_mean"][place] += mean / len(batches)
        found[f"{key}/moving_variance"][place] += variance / len(batches)
        gamma, beta = (weights[f"{key}/{name}"][place] for name in ("gamma", "beta"))
        return gamma * (x - mean) / np.sqrt(variance + epsilon) + beta

    for batch in batches:
        x = normalize(batch.astype("float64"), "first", ..., first.epsilon)
        x = np.maximum(x, 0).mean((1, 2))
        for i in range(stack.depth):
            y = x
            for j in range(2):
                dense = f"stack/branch/dense_{j + 1}"
                y = np.maximum(normalize(y, f"stack/branch/norm_{j}", i, inner.epsilon), 0)
                bias = weights.get(f"{dense}/bias", np.zeros(stack.depth))
                y = y @ weights[f"{dense}/kernel"][i] + bias[i]
            x = x + y
    return found


def assert_has_statistics(found, expected):
    assert len(expected) == 6
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


class Recorder(keras.callbacks.Callback):
    """What the model has in a validation, and before and behind it."""

    def __init__(self):
        super().__init__()
        self.inside, self.outside, self.averages = [], [], []

    def on_test_batch_begin(self, batch, logs=None):
        if batch == 0:
            self.inside.append(by_name(self.model))

    def on_epoch_end(self, epoch, logs=None):
        self.outside.append(by_name(self.model))
        self.averages.append({v.path: values([average])[0] for v, average in averages(self.model)})


class TestBatchStatistics:
    def test_are_those_of_numpy_whatever_they_were(self):
        model = network(execution="auto")
        for variable in model.non_trainable_variables:
            variable.assign(np.random.default_rng(3).uniform(5, 9, variable.shape))
        before = by_name(model)
        BatchStatistics(model, lambda: iter(BATCHES)).renew()
        assert_has_statistics(by_name(model), expected := reference(model, BATCHES))
        others = set(before) - set(expected)
        assert all((by_name(model)[name] == before[name]).all() for name in others)
        assert model.get_layer("first").momentum == 0.99

    def test_are_the_same_again_with_dropout_and_draw_no_random_numbers(self):
        model = network(dropout=0.5)
        statistics = BatchStatistics(model, lambda: iter(BATCHES))
        drawn = []
        for _ in range(2):
            keras.utils.set_random_seed(5)
            statistics.renew()
            drawn.append(by_name(model) | {"next": values([keras.random.normal((3,))])[0]})
        first, second = drawn
        assert all((first[name] == value).all() for name, value in second.items())
        keras.utils.set_random_seed(5)
        np.testing.assert_array_equal(values([keras.random.normal((3,))])[0], first["next"])

    def test_frozen_ones_stay(self):
        model = network()
        model.get_layer("first").trainable = False
        model.get_layer("first").moving_mean.assign([0.1, 0.2, 0.3])
        BatchStatistics(model, lambda: iter(BATCHES)).renew()
        np.testing.assert_array_equal(
            by_name(model)["first/moving_mean"], np.array([0.1, 0.2, 0.3], "float32")
        )
        assert np.abs(by_name(model)["stack/branch/norm_0/moving_mean"]).max() > 0

    def test_no_batches(self):
        with pytest.raises(ValueError, match=r"need images .* Received: no batches"):
            BatchStatistics(network(), lambda: iter([])).renew()


class TestAverages:
    @pytest.mark.parametrize("case", ["plain", "scaled"])
    def test_are_validated_and_kept_and_training_goes_on_as_without(self, case):
        """The raw weights are, to the bit, those of a run without validation; dropout's
        seeds are a part of that.
        """
        options = {"plain": {}, "scaled": {"dropout": 0.3, "dtype": "mixed_bfloat16"}}[case]
        alone, recorder = Recorder(), Recorder()
        plain = compiled(network(**options), scaled=case == "scaled")
        fit(plain, [alone], epochs=2, validation_data=None)
        model = compiled(network(**options), scaled=case == "scaled")
        watching = Averages(model, lambda: iter(BATCHES))

        class BetweenSteps(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                # on JAX, the model's variables are not what is trained here
                with watching.active():
                    pass

        history = fit(model, [watching, recorder, BetweenSteps()], epochs=2)
        for epoch in range(2):
            raw, inside = recorder.outside[epoch], recorder.inside[epoch]
            assert_same(raw, alone.outside[epoch])
            for name, value in recorder.averages[epoch].items():
                np.testing.assert_array_equal(inside[name], value, err_msg=name)
                assert (inside[name] != raw[name]).any()
        # behind fit, Keras has put the averages into the weights; with their statistics they are
        # what was validated
        fitted = by_name(model)
        watching.finish()
        assert_same(by_name(model), recorder.inside[-1])
        assert model.evaluate(IMAGES, LABELS, batch_size=10, verbose=0) == pytest.approx(
            history["val_loss"][-1], rel=1e-6
        )
        if case == "plain":
            assert_has_statistics(by_name(model), expected := reference(model, BATCHES))
            # those that fit leaves are of the raw weights, and forget their start slowly
            assert max(np.abs(fitted[name] - expected[name]).max() for name in expected) > 0.1

    def test_all_is_back_after_an_error(self):
        model = updated(compiled(network()))
        watching = Averages(model, lambda: iter(BATCHES))
        watching.set_model(model)
        model.get_layer("logits").kernel.assign(np.ones((3, 10)))
        before = by_name(model)

        def fail():
            with watching.active():
                assert (by_name(model)["logits/kernel"] != 1).all()
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert_same(by_name(model), before)

    @pytest.mark.parametrize("case", ["no update", "no averages"])
    def test_without_averages_the_weights_are_evaluated(self, case):
        model = compiled(network(), use_ema=case == "no update")
        if case == "no averages":
            updated(model)
        watching = Averages(model, lambda: pytest.fail("there are no averages"))
        watching.set_model(model)
        before = by_name(model)
        with watching.active():
            assert_same(by_name(model), before)
        watching.finish()
        assert_same(by_name(model), before)


def updated(model):
    """Let the optimizer make an update, by gradients of 1."""
    model.optimizer.apply(
        [ops.ones(each.shape) for each in model.trainable_variables], model.trainable_variables
    )
    return model


DISTRIBUTED = """
import json, sys
import keras, numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras_preact as kp
from tests.training import test_averages as tests
from tests.training.commands import finish, start
from training.averages import Averages
from training.variables import Tensors, read

def trained(kind, devices):
    with kp.distribution.start(kind, devices=devices) as distribution:
        model = tests.network()
        options = {"gradient_accumulation_steps": 2, "use_ema": True, "ema_momentum": 0.6}
        optimizer = kp.optimizers.CoupledSGD(0.05, **options)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        distribution.compile(model, optimizer=optimizer, loss=loss, jit_compile=False)
        data = tf.data.Dataset.from_tensor_slices((tests.IMAGES, tests.LABELS))
        data = data.batch(10, drop_remainder=True)
        watching = Averages(model, lambda: iter(tests.BATCHES))
        losses = model.fit(
            distribution.training_data(data), epochs=2, verbose=0, callbacks=[watching],
            validation_data=distribution.evaluation_data(data, 10, 40),
        ).history["val_loss"]
        watching.finish()
        return losses, [read(Tensors(each, each.path)) for each in model.variables]

losses, own = trained("none", None)
others, shared = trained("mirrored", ["cpu:0", "cpu:1"])
assert max(map(len, shared)) == 1  # all devices have the same
np.testing.assert_allclose(losses, others, rtol=1e-3)
assert max(np.abs(a[0] - b[0]).max() for a, b in zip(own, shared)) < 2e-3
"""


@pytest.mark.soak
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="two devices of TensorFlow")
def test_on_several_devices(tmp_path):
    """As on one device."""
    status, _, err = finish(start("-c", DISTRIBUTED, cwd=tmp_path))
    assert status == 0, err
