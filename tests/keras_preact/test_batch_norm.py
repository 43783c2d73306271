"""Batch normalisation with the backend's kernel gives the values of Keras' layer."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.layers import batch_norm
from tests.keras_preact import harness

pytestmark = pytest.mark.backend


def pair(shape, **options):
    """The layer and Keras' layer, with the same random weights."""
    of_keras = {key: value for key, value in options.items() if key != "relu_follows"}
    layers = [
        batch_norm.BatchNormalization(epsilon=1e-5, **options),
        keras.layers.BatchNormalization(epsilon=1e-5, **of_keras),
    ]
    for layer in layers:
        layer.build(shape)
        harness.randomize(layer)
    return layers


@pytest.mark.parametrize(
    ("shape", "options", "training"),
    [
        ((4, 5, 6, 3), {}, True),
        ((4, 5, 6, 3), {}, False),
        ((4, 5, 6, 3), {"momentum": 0.5, "trainable": False}, True),
        ((4, 5, 6, 3), {"axis": 1}, True),
        ((4, 5, 6, 3), {"center": False, "relu_follows": True}, True),
        ((4, 5, 6, 3), {"scale": False, "relu_follows": True}, False),
        ((6, 7), {}, True),
        ((1, 1, 1, 3), {}, True),  # one value per channel, which torch's kernel refuses
    ],
    ids=str,
)
def test_is_keras_own(shape, options, training):
    x = 3 * harness.images(*shape) + 1
    ours, keras_own = pair(shape, **options)
    cotangent = harness.images(*shape, seed=2)
    if ours.trainable and x.size > 3:
        results = [
            harness.value_and_grad(layer, x, cotangent, training) for layer in (ours, keras_own)
        ]
        (_, on_x, on_weights), (_, want_x, want) = results
        np.testing.assert_allclose(on_x, want_x, 1e-4, 2e-5)
        for path, gradient in on_weights.items():
            np.testing.assert_allclose(gradient, want[path], 1e-4, 2e-5, err_msg=path)
    for layer in (ours, keras_own):
        harness.randomize(layer)
    outputs = [harness.numpy(layer(x, training=training)) for layer in (ours, keras_own)]
    np.testing.assert_allclose(*outputs, 1e-5, 1e-5)
    for one, other in zip(ours.get_weights(), keras_own.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)


@pytest.mark.parametrize("axis", [-1, 1])
def test_parts_of_a_batch_are_normalised_by_themselves(axis):
    """Each part has the output of Keras' layer; their moving statistics are averaged."""
    x = 3 * harness.images(6, 5, 4, 3) + np.arange(6, dtype="float32")[:, None, None, None]
    ours, keras_own = pair(x.shape, axis=axis, momentum=0.7)
    before = keras_own.get_weights()
    ours.set_weights(before)
    ours.statistics = batch_norm.Statistics(groups=3)
    outputs, after = [], []
    for part in np.split(x, 3):
        keras_own.set_weights(before)
        outputs.append(harness.numpy(keras_own(part, training=True)))
        after.append(keras_own.get_weights())
    y = harness.numpy(ours(x, training=True))
    np.testing.assert_allclose(y, np.concatenate(outputs), 1e-4, 1e-4)
    for got, *parts in zip(ours.get_weights(), *after, strict=True):
        np.testing.assert_allclose(got, np.mean(parts, 0), 1e-4, 1e-4)


#: Policy to the largest relative change by one rounding.
ROUNDING = {"float32": 1e-6, "mixed_bfloat16": 2.0**-8, "mixed_float16": 2.0**-11}


@pytest.mark.parametrize("policy", ROUNDING)
def test_one_rounding_from_float64(policy):
    """The output and its gradient are rounded once to 16 bits. The statistics and the
    other gradients are never rounded.
    """

    def rounded(values):
        half = keras.ops.cast(values, policy.removeprefix("mixed_"))
        return harness.numpy(half), harness.numpy(half).astype("float64")

    single_x, x = rounded(harness.images(8, 9, 7, 5) + 8)
    single_cotangent, cotangent = rounded(harness.images(8, 9, 7, 5, seed=2))
    layer = batch_norm.BatchNormalization(epsilon=1e-5, momentum=0.75, dtype=policy)
    layer.build(x.shape)
    harness.randomize(layer)
    gamma, beta, *moving = map(np.array, layer.get_weights())
    axes = (0, 1, 2)
    variance = x.var(axes)
    factor = 1 / np.sqrt(variance + 1e-5)
    normalised = (x - x.mean(axes)) * factor
    want_y = gamma * normalised + beta
    mean_c, mean_cn = cotangent.mean(axes), (cotangent * normalised).mean(axes)
    want_x = gamma * factor * (cotangent - mean_c - normalised * mean_cn)
    want = {"gamma": (cotangent * normalised).sum(axes), "beta": cotangent.sum(axes)}
    _, gradient, gradients = harness.value_and_grad(layer, single_x, single_cotangent, True)
    np.testing.assert_allclose(gradient, want_x, ROUNDING[policy], 1e-5)
    for name in want:
        np.testing.assert_allclose(gradients[name], want[name], 1e-5, 1e-4, err_msg=name)
    layer.set_weights([gamma, beta, *moving])
    y = layer(single_x, training=True)
    assert keras.backend.standardize_dtype(y.dtype) == layer.compute_dtype
    np.testing.assert_allclose(harness.numpy(y), want_y, ROUNDING[policy], 1e-5)
    for weight, old, new in zip(layer.weights[2:], moving, (x.mean(axes), variance), strict=True):
        assert weight.dtype == "float32"
        np.testing.assert_allclose(harness.numpy(weight), 0.75 * old + 0.25 * new, 2e-5, 1e-6)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"renorm": True}], ids=str)
def test_other_computations_are_keras_own(options):
    x = harness.images(4, 5, 5, 3)
    outputs = [harness.numpy(layer(x, training=True)) for layer in pair(x.shape, **options)]
    np.testing.assert_array_equal(*outputs)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="XLA fuses Keras' own computation")
@pytest.mark.parametrize("training", [True, False])
def test_units_use_the_kernel(training, monkeypatch):
    calls = []
    backend = keras.backend.backend()
    kernel = batch_norm._KERNELS[backend]
    monkeypatch.setitem(
        batch_norm._KERNELS, backend, lambda *args: calls.append(args[-1]) or kernel(*args)
    )
    unit = kp.ResidualUnit(4, normalization=keras.layers.BatchNormalization(momentum=0.7))
    unit(harness.images(2, 5, 5, 4), training=training)
    assert calls == [training, training]


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_compiled_inference(activation, tmp_path):
    """TensorFlow tries to fuse a convolution, its inference kernel and a tanh or sigmoid,
    but has no such operation.
    """
    model = kp.models.resnet_cifar(
        8, input_shape=(8, 8, 1), activation=activation, arrangement="original"
    )
    for layer in model._flatten_layers():
        if isinstance(layer, batch_norm.BatchNormalization):
            harness.randomize(layer)
    model.save(tmp_path / "model.keras")
    model = keras.saving.load_model(tmp_path / "model.keras")
    images = harness.images(2, 8, 8, 1)
    np.testing.assert_allclose(
        model.predict(images, verbose=0), harness.numpy(model(images)), atol=1e-5
    )


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_the_stem_is_fused_with_its_relu(activation):
    model = kp.models.resnet_cifar(8, input_shape=(8, 8, 1), activation=activation)
    assert model.get_layer("stem_norm").relu_follows == (activation == "relu")
