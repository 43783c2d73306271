"""Dropout whose rate changes in training: the rates that a compiled train step reads, and
what stays as it is without it.
"""

import functools

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.dropout import VariableDropout, is_rate
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

BACKEND = keras.backend.backend()
VARIES = {"dropout": 0.5, "dropout_varies": True}
UNITS = 3
LINEAR = kp.schedules.linear_schedule(0.5, steps=4)
X, LABELS = harness.images(12, 4), np.arange(12) % 3


def rates(model) -> set[float]:
    """All rates, of units and of stacks."""
    values = [harness.numpy(v.value).ravel() for v in model.variables if is_rate(v)]
    return set(np.concatenate(values).tolist())


class Seen(keras.callbacks.Callback):
    """Keeps the rates of every step."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_end(self, batch, logs=None):
        (rate,) = rates(self.model)  # the same in all units
        self.rates.append(rate)


def dense(**options) -> keras.Model:
    """The first unit is separate in every network, because it may change the shape."""
    options = {"width": 4, "classes": 3, "input_shape": (4,), "seed": 1} | VARIES | options
    return kp.models.dense_resnet(2 + 2 * (1 + UNITS), **options)


def nested() -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, dense(stacked=True)(inputs))


def tokens(stacked: bool, **options) -> keras.Model:
    """A transformer for 4 tokens of one feature."""
    unit = kp.TransformerUnit(8, num_heads=2, seed=1, **VARIES | options)
    inputs = keras.Input((4,))
    x = keras.layers.Dense(8)(keras.layers.Reshape((4, 1))(inputs))
    x = kp.LayerStack(unit, UNITS)(x) if stacked else unit(x)
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(x)))


MODELS = {
    "separate": functools.partial(dense, stacked=False),
    "stack": functools.partial(dense, stacked=True),
    "loop": functools.partial(dense, stacked=True, execution="loop"),
    "remat": functools.partial(dense, stacked=True, remat=2),
    "bfloat16": functools.partial(dense, stacked=True, dtype="mixed_bfloat16"),
    "float16": functools.partial(dense, stacked=False, dtype="mixed_float16"),
    "nested": nested,
    "transformer unit": functools.partial(tokens, False),
    "stack of transformer units": functools.partial(tokens, True),
}
#: What the others cover together.
SLOW_AND_ALIKE = ("stack", "loop", "bfloat16", "nested", "transformer unit")


def fit(model, *callbacks, epochs=2, schedule=LINEAR):
    """Train for 3 steps per epoch; return the rate of each step."""
    seen = Seen()
    callbacks = [kp.DropoutSchedule(schedule), *callbacks, seen]
    model.fit(X, LABELS, batch_size=4, shuffle=False, verbose=0, epochs=epochs, callbacks=callbacks)
    return seen.rates


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.soak] * (kind in SLOW_AND_ALIKE)) for kind in MODELS],
)
def test_the_rate_is_that_of_the_schedule(kind):
    model = harness.compiled(MODELS[kind](), kp.optimizers.CoupledSGD(0.01))
    assert fit(model) == [0.5, 0.375, 0.25, 0.125, 0, 0]


@pytest.mark.parametrize(
    ("optimizer", "options", "want"),
    [
        ({"gradient_accumulation_steps": 2}, {}, [0.5, 0.5, 0.375, 0.375, 0.25, 0.25]),
        ({}, {"steps_per_execution": 3}, [0.5, 0.125]),
    ],
    ids=["accumulation", "several steps per execution"],
)
def test_the_schedule_counts_updates(optimizer, options, want):
    if BACKEND == "torch" and options:
        pytest.skip("Keras has no steps_per_execution there")
    optimizer = kp.optimizers.CoupledSGD(0.01, **optimizer)
    assert fit(harness.compiled(dense(stacked=True), optimizer, **options)) == want


def test_together_with_another_wrapper_of_the_optimizer():
    model = harness.compiled(dense(stacked=False), kp.optimizers.CoupledSGD(0.01))
    health = kp.TrainingHealth(1, report=lambda message: None)
    assert fit(model, health) == [0.5, 0.375, 0.25, 0.125, 0, 0]
    assert [record.step for record in health.history] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("stacked", "dtype"),
    [
        (False, "float32"),
        (True, "mixed_bfloat16"),
        (False, "mixed_float16"),
        *(
            pytest.param(*pair, marks=pytest.mark.soak)
            for pair in ((True, "float32"), (False, "mixed_bfloat16"), (True, "mixed_float16"))
        ),
    ],
)
def test_compiled_steps_drop_at_the_rate_and_keep_the_mean(stacked, dtype):
    """Each unit adds dropout(1) to 0, so the output is 0 where all units drop, and its mean
    is the number of units. An epoch is one step.
    """
    width, rate_of = 4096, [0.5, 0.25, 0.0]
    unit = kp.ResidualUnit(
        width,
        block=kp.blocks.MLP(hidden=1),
        shortcut="identity",
        normalization="none",
        arrangement="pre_norm",
        kernel_initializer="zeros",
        use_bias=True,
        bias_initializer="ones",
        dropout_at="before_addition",
        dropout_varies=True,
        seed=1,
        dtype=dtype,
    )
    inputs = keras.Input((width,))
    if stacked:
        outputs = kp.UnitStack(unit, UNITS)(inputs)
    else:
        outputs = inputs
        for i in range(UNITS):
            outputs = unit.at(f"unit{i + 1}")(outputs)
    model = keras.Model(inputs, keras.layers.Activation("linear", dtype="float32")(outputs))

    def dropped(y, predicted):
        return keras.ops.mean(keras.ops.cast(predicted == 0, "float32"))

    model.compile(keras.optimizers.SGD(0.0), lambda y, p: keras.ops.mean(p), metrics=[dropped])
    x = np.zeros((16, width), "float32")
    schedule = kp.DropoutSchedule(lambda step: rate_of[int(step)])
    options = {"epochs": 3, "batch_size": 16, "verbose": 0, "callbacks": [schedule]}
    history = model.fit(x, x, validation_data=(x, x), **options).history
    exact = [rate**UNITS for rate in rate_of]
    np.testing.assert_allclose(history["dropped"], exact, atol=0.01)
    np.testing.assert_allclose(history["loss"], [UNITS] * 3, rtol=0.01)
    assert history["dropped"][2] == 0
    assert history["loss"][2] == UNITS
    assert history["val_dropped"] == [0, 0, 0]
    assert history["val_loss"] == [UNITS] * 3
    kp.set_dropout(model, 0.5)
    assert model.evaluate(x, x, verbose=0) == [UNITS, 0]


OPTIONS = {
    "between weights": {},
    "before the addition": {"dropout_at": "before_addition"},
    "stacked": {"stacked": True},
    "bfloat16": {"dtype": "mixed_bfloat16"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("block", [pytest.param("basic", marks=pytest.mark.soak), "dense"])
def test_rate_0_and_inference_are_the_network_without_dropout(block, options):
    if block == "basic":
        x, settings = harness.images(2, 8, 8, 1), {"input_shape": (8, 8, 1)} | VARIES
        model = kp.models.resnet_cifar(20, **settings, **options)
    else:
        x, model = X, dense(**options)
    plain = kp.models.changed_copy(model, dropout=0.0, dropout_varies=False)
    want = harness.numpy(plain(x, training=False))
    np.testing.assert_array_equal(harness.numpy(model(x, training=False)), want)
    assert np.any(harness.numpy(model(x, training=True)) != harness.numpy(plain(x, training=True)))
    model = kp.models.changed_copy(plain, dropout=0.0, dropout_varies=True)
    got, want = (harness.numpy(each(x, training=True)) for each in (model, plain))
    if BACKEND == "jax" and "stacked" in options:  # XLA rounds another body of a scan differently
        harness.close(got, want, 1e-6)
    else:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("stacked", [False, True], ids=["separate", "stacked"])
def test_weights_are_those_of_a_constant_rate(stacked, tmp_path):
    """So files and conversions hold the same, and plain rates keep Keras' layer."""
    varying, constant = (dense(stacked=stacked, dropout_varies=each) for each in (True, False))
    assert harness.paths(varying) == harness.paths(constant)
    assert varying.count_params() == constant.count_params()
    kinds = {
        type(layer) for layer in constant._flatten_layers() if layer.name.startswith("dropout")
    }
    assert kinds == {keras.layers.Dropout}
    assert not any(map(is_rate, constant.variables))
    for one, other in ((varying, constant), (constant, varying)):
        harness.randomize(one)
        one.save_weights(tmp_path / "some.weights.h5")
        other.load_weights(tmp_path / "some.weights.h5")
        for got, want in zip(other.get_weights(), one.get_weights(), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "kind",
    [
        "nested",
        *(
            pytest.param(kind, marks=pytest.mark.soak)
            for kind in ("separate", "stack of transformer units")
        ),
    ],
)
def test_a_file_continues_the_schedule(kind, tmp_path):
    """It has the optimizer's count of updates, and the first rate of the layers."""
    model = harness.compiled(MODELS[kind](), kp.optimizers.CoupledSGD(0.01))
    assert fit(model, epochs=1) == [0.5, 0.375, 0.25]
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert rates(loaded) == {0.5}
    assert fit(loaded, epochs=1) == [0.125, 0, 0]


def test_copies_start_with_their_own_rate():
    model = dense(stacked=False)
    kp.set_dropout(model, 0.25)
    stacked = kp.models.stack(model)
    assert rates(stacked) == rates(kp.models.unstack(stacked)) == {0.5}
    assert rates(kp.models.changed_copy(model, dropout=0.125)) == {0.125}


def test_units_of_a_stack_have_its_rates():
    stack = kp.UnitStack(kp.ResidualUnit(4, block="dense", **VARIES), UNITS)
    stack.build((None, 4))
    kp.set_dropout(stack, 0.25)
    units = [stack.unit(i) for i in range(UNITS)]
    assert [rates(unit) for unit in units] == [{0.25}] * UNITS
    assert rates(kp.UnitStack.from_units(units)) == {0.25}


def test_a_frozen_unit_has_a_rate():
    unit = kp.ResidualUnit(4, block="dense", trainable=False, **VARIES)
    unit.build((None, 4))
    kp.set_dropout(unit, 0.25)
    assert rates(unit) == {0.25}


def test_masks_pass():
    layer = VariableDropout(0.5)
    x = keras.layers.Masking()(np.ones((2, 3, 4), "float32"))
    assert layer(x, training=True)._keras_mask is not None


def test_wrong_rates():
    """The last one is noticed after an update."""
    model = harness.compiled(dense(stacked=True), kp.optimizers.CoupledSGD(0.01))
    for schedule, words in (
        (lambda step: 1.5, ("`schedule(0)`", "[0, 1)", "1.5")),
        (lambda step: float("nan"), ("`schedule(0)`", "nan")),
        (lambda step: 0.5 - step, ("`schedule(1)`", "-0.5")),
    ):
        message = harness.error_of(lambda schedule=schedule: fit(model, schedule=schedule))
        assert all(word in message for word in words), message
    assert fit(model)  # the model is as usable as before


def test_a_model_without_such_units():
    model = harness.compiled(dense(dropout_varies=False), kp.optimizers.CoupledSGD(0.01))
    message = harness.error_of(lambda: fit(model))
    assert "`dropout_varies=True`" in message
