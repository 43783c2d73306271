"""Half precision inside, float32 logits; double precision throughout."""

import contextlib

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.layers import chains
from tests import reference
from tests.keras_preact import harness

pytestmark = pytest.mark.backend


def network(dtype, **options):
    return kp.models.resnet_cifar(
        14, width_factor=0.5, input_shape=(8, 8, 3), dtype=dtype, **options
    )


@pytest.mark.parametrize(("policy", "limit"), [("mixed_bfloat16", 0.1), ("mixed_float16", 0.02)])
def test_mixed_precision_is_close_to_float32(policy, limit):
    options = {"shortcut": "exclusive_gating", "mean": 100.0, "std": 50.0, "dropout": 0.1}
    single, mixed = network("float32", **options), network(policy, **options)
    harness.randomize(single)
    mixed.set_weights(single.get_weights())
    x = harness.images(4, 8, 8, 3) * 50 + 100
    want, got = harness.numpy(single(x)), harness.numpy(mixed(x))
    compute = policy.removeprefix("mixed_")
    assert {weight.dtype for weight in mixed.weights} == {"float32"}
    assert {layer.compute_dtype for unit in mixed.units for layer in unit._flatten_layers()} == {
        compute
    }
    assert mixed.output.dtype == got.dtype == "float32"
    error = np.abs(got - want).max() / np.abs(want).max()
    assert 0 < error < limit


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_what_is_random_in_training(dtype, stacked):
    """Stacks hand the rates of their units to the layers that drop, as tensors."""
    random = {"stochastic_depth": 0.5, "dropout": 0.2, "dropout_varies": True}
    model = network(dtype, stacked=stacked, **random)
    x = harness.images(8, 8, 8, 3)
    first, second = (harness.numpy(model(x, training=True)) for _ in range(2))
    assert np.isfinite(first).all()
    assert (np.abs(first - second) > 1e-3).mean() > 0.5
    x = np.ones((64, 4, 4, 2), "float32")
    drop = chains.StochasticDepth(0.0, seed=1, dtype=dtype)
    half = keras.ops.cast(0.5, drop.compute_dtype)
    values = np.unique(harness.numpy(drop(x, half, training=True)))
    assert values.tolist() == [0, 2]


@pytest.fixture
def double_precision():
    if keras.backend.backend() != "jax":
        return contextlib.nullcontext()
    import jax

    return jax.enable_x64(True)


def test_float64(double_precision):
    """Double precision goes in and comes out; Keras itself takes some means and
    products in float32 on the way.
    """
    with double_precision:
        model = network("float64")
        harness.randomize(model)
        x = harness.images(2, 8, 8, 3).astype("float64")
        y = harness.numpy(model(x))
        stages = [(8, 2, 1), (16, 2, 2), (32, 2, 2)]
        expected = reference.Network(
            harness.weights(model), stages, "3x3", "basic", {"shape_shortcut": "zero_pad"}
        )
        assert y.dtype == "float64"
        np.testing.assert_allclose(y, expected(x), 1e-5, 1e-5)


@pytest.mark.backend
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "mixed_float16"])
def test_preprocessing_of_large_pixels(dtype):
    """The variance of 16-bit pixels is above the largest number of float16, 65,504."""
    model = kp.models.resnet_cifar(
        8, width_factor=0.25, input_shape=(8, 8, 1), mean=30_000.0, std=20_000.0, dtype=dtype
    )
    x = np.random.default_rng(0).uniform(0, 65_535, (16, 8, 8, 1)).astype("float32")
    normalized = keras.Model(model.input, model.get_layer("preprocessing").output)(x)
    np.testing.assert_allclose(harness.numpy(normalized), (x - 30_000) / 20_000, atol=1e-3)
    assert kp.models.expected_input(model).problem(x) is None  # a warning would fail here
    outputs = model.predict(x, verbose=0).astype("float32")
    assert np.isfinite(outputs).all()
    assert outputs.std(axis=0).min() > 1e-3
