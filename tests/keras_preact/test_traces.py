"""Traces of units against NumPy, and stacks of any layer against calls of single layers."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.layers import chains
from tests.keras_preact import harness

numpy = harness.numpy


#: Every shortcut with one arrangement, every arrangement with the identity.
PAIRS = [
    *(("full_preactivation", name) for name in kp.SHORTCUTS if name != "dropout"),
    *((name, "identity") for name in kp.ARRANGEMENTS if name != "full_preactivation"),
]


@pytest.mark.parametrize(("arrangement", "shortcut"), PAIRS)
def test_parts_of_a_unit(arrangement, shortcut):
    """h(x) and F(x) equal NumPy's, their sum is right, and the output is the call's."""
    options = {"arrangement": arrangement, "shortcut": shortcut}
    x = harness.images(*harness.with_streams((2, 5, 6, 4), shortcut))
    unit = harness.unit_on(x, 4, **options)
    trace = unit.trace(x)
    activated, _ = unit.shortcut.read(x)
    want_shortcut, want_residual = harness.reference_of(unit, **options).paths(x)
    added = 0 if trace.shortcut is None else numpy(trace.shortcut)
    assert (trace.shortcut is None) == (shortcut == "none")
    if shortcut in ("identity", "none"):  # the others scale what they add
        np.testing.assert_allclose(numpy(trace.residual), want_residual, 1e-4, 1e-4)
    if shortcut == "identity":
        np.testing.assert_allclose(added, want_shortcut, 1e-4, 1e-4)
    np.testing.assert_allclose(numpy(trace.sum), added + numpy(trace.residual), 1e-5, 1e-5)
    np.testing.assert_array_equal(numpy(trace.output), numpy(unit(x)))
    for layer in unit.first:
        activated = layer(activated)
    np.testing.assert_array_equal(numpy(trace.activated), numpy(activated))


@pytest.mark.backend
def test_a_scaled_and_a_detached_branch():
    x = harness.images(2, 5, 6, 4)
    unit = harness.unit_on(x, 4)
    trace = unit.trace(x)
    np.testing.assert_allclose(numpy(unit.trace(x, residual_scale=0.0).output), x, 1e-6, 1e-6)
    half = unit.trace(x, residual_scale=0.5)
    np.testing.assert_allclose(numpy(half.residual), numpy(trace.residual) / 2, 1e-6, 1e-6)
    layer = keras.layers.Lambda(lambda x: unit.trace(x, detach_residual=True).output)
    layer(x)
    cotangent = harness.images(2, 5, 6, 4, seed=3)
    _, on_x, _ = harness.value_and_grad(layer, x, cotangent)
    np.testing.assert_allclose(on_x, cotangent, 1e-6, 1e-6)  # through the identity alone


@pytest.mark.backend
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("training", [False, True])
def test_layers_called_without_keras(monkeypatch, training, dtype):
    """On PyTorch, most layers of a unit are called directly: outputs and statistics equal
    those of Keras' calls, also if no layer around the unit casts its weights.
    """
    x = harness.images(2, 5, 6, 4)
    unit = harness.unit_on(x, 8, strides=2, use_bias=True, dtype=dtype)
    before = unit.get_weights()
    with monkeypatch.context() as patch:
        if keras.backend.backend() == "torch":
            patch.setattr(keras.layers.Activation, "__call__", None)
        direct = unit.trace(x, training=training).output
    moved = unit.get_weights()
    unit.set_weights(before)
    monkeypatch.setattr(chains, "_DIRECT", {})
    np.testing.assert_array_equal(numpy(direct), numpy(unit(x, training=training)))
    for got, want in zip(moved, unit.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.backend
@pytest.mark.parametrize("training", [False, True])
def test_traces_of_a_stack(training):
    """They are the traces of its units, one after the other; statistics change as in a
    call.
    """
    stack = kp.UnitStack(kp.ResidualUnit(4), 3)
    x = harness.images(2, 5, 6, 4)
    stack.build(x.shape)
    harness.randomize(stack)
    units = [stack.unit(i) for i in range(3)]
    scale = np.array([1.0, 0.0, 0.5], "float32")
    added = harness.images(3, 2, 5, 6, 4, seed=5)
    got = stack.trace(x, residual_scale=scale, perturbations=added, training=training)
    for i, unit in enumerate(units):
        want = unit.trace(x, residual_scale=scale[i], training=training)
        for name in want._fields:
            expected = numpy(getattr(want, name)) + (added[i] if name == "output" else 0)
            np.testing.assert_allclose(numpy(getattr(got, name))[i], expected, 1e-5, 1e-5, name)
        x = numpy(want.output) + added[i]
    for i, unit in enumerate(units):
        for own, other in zip(stack.unit(i).weights, unit.weights, strict=True):
            np.testing.assert_allclose(numpy(own), numpy(other), 1e-5, 1e-6, own.path)


@keras.saving.register_keras_serializable("test_traces")
class Scaled(keras.layers.Layer):
    """A user's layer with a weight, dropout and no `build`."""

    def __init__(self, rate=0.0, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate
        self.dense = keras.layers.Dense(3, activation="tanh", kernel_regularizer="l2")
        self.dropout = keras.layers.Dropout(rate)

    def call(self, x, training=None):
        return x + self.dropout(self.dense(x), training=training)

    def get_config(self):
        return super().get_config() | {"rate": self.rate}


LAYERS = {
    "own": (lambda: Scaled(name="own1"), (2, 3)),
    "transformer": (lambda: kp.TransformerUnit(4, num_heads=2), (2, 5, 4)),
    "scaled": (
        lambda: kp.TransformerUnit(
            4, num_heads=2, shortcut=kp.shortcuts.ScaledResidual(0.1, per_channel=True)
        ),
        (2, 5, 4),
    ),
    "keras": (lambda: keras.layers.LayerNormalization(), (2, 6)),
}


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        pytest.param("own", {"remat": 2}, marks=pytest.mark.backend),
        ("own", {"execution": "loop"}),
        ("transformer", {}),
        ("scaled", {}),
        ("keras", {"unroll": 2}),
    ],
    ids=str,
)
def test_stacks_of_other_layers(name, ways):
    """Output and gradients equal those of single layers; all layers have different values."""
    make, shape = LAYERS[name]
    stack = kp.LayerStack(make(), 4, **ways)
    x, cotangent = harness.images(*shape), harness.images(*shape, seed=3)
    stack.build(shape)
    if name != "keras":
        first, second = (stack.unit(i).get_weights() for i in (0, 1))
        assert any((a != b).any() for a, b in zip(first, second, strict=True))
    harness.randomize(stack)
    value, on_x, on_weights = harness.value_and_grad(stack, x, cotangent)
    chain = keras.Sequential([keras.Input(shape[1:]), *(stack.unit(i) for i in range(4))])
    want, want_on_x, _ = harness.value_and_grad(chain, x, cotangent)
    np.testing.assert_allclose(value, want, 1e-4)
    np.testing.assert_allclose(on_x, want_on_x, 1e-4, 1e-5)
    assert all(len(gradient) == 4 for gradient in on_weights.values())


@pytest.mark.backend
def test_round_trip_and_training_of_another_layers_stack(tmp_path):
    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(2)(kp.LayerStack(Scaled(0.5), 3, name="stack")(inputs))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    x, y = harness.images(8, 3), harness.images(8, 2)
    stack = model.get_layer("stack")
    before = stack.get_weights()
    model.fit(x, y, verbose=0)
    assert any((a != b).any() for a, b in zip(before, stack.get_weights(), strict=True))
    squares = sum(float((w**2).sum()) for w in stack.get_weights() if w.ndim == 3)
    np.testing.assert_allclose(float(numpy(sum(model.losses))), 0.01 * squares, 1e-5)
    model.save(tmp_path / "model.keras")
    copy = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(numpy(copy(x)), numpy(model(x)), 1e-6, 1e-6)


class AddsLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.sum(x))
        return x


class Constrained(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), constraint="non_neg", name="scale")

    def call(self, x):
        return x * self.scale


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: kp.LayerStack(AddsLoss(), 2), "must not add losses"),
        (lambda: kp.LayerStack(Constrained(), 2), "constraint"),
        (lambda: kp.LayerStack(keras.layers.Dense(5), 2), "keep the shape"),
        (lambda: kp.LayerStack("dense", 2), "'dense'"),
    ],
)
def test_layers_that_cannot_be_stacked(make, word):
    assert word in harness.error_of(lambda: make()(harness.images(2, 3)))
