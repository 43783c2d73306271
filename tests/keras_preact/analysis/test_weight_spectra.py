"""Singular values of weights: what layers do to every direction of a patch, orthogonal
weights, every kind of model.
"""

import math

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.layers.spatial import PaddedConv2D
from tests.keras_preact import harness

layers = keras.layers

#: Layers without a bias, and the shape of an input that has one output pixel (transposed: of an
#: input pixel). They map it by the matrix of their kernel.
LAYERS = {
    "dense": (lambda: layers.Dense(4, use_bias=False), (7,)),
    "einsum": (lambda: layers.EinsumDense("abc,bcd->ad", 4), (5, 3)),
    "einsum, new axes between": (lambda: layers.EinsumDense("ab,cbd->acd", (3, 2)), (5,)),
    "einsum, a matrix per place": (lambda: layers.EinsumDense("abc,bcd->abd", (5, 4)), (5, 3)),
    "einsum, a factor per place": (lambda: layers.EinsumDense("abc,bc->abc", (5, 3)), (5, 3)),
    "conv 1d": (lambda: layers.Conv1D(4, 3, use_bias=False), (3, 2)),
    "conv": (lambda: layers.Conv2D(30, 3, use_bias=False), (3, 3, 2)),
    "conv 3d": (lambda: layers.Conv3D(4, 2, use_bias=False), (2, 2, 2, 3)),
    "groups": (lambda: layers.Conv2D(6, 3, groups=2, use_bias=False), (3, 3, 4)),
    "depthwise": (lambda: layers.DepthwiseConv2D(3, use_bias=False), (3, 3, 4)),
    "depthwise, multiplier": (
        lambda: layers.DepthwiseConv1D(3, depth_multiplier=2, use_bias=False),
        (3, 4),
    ),
    "transposed": (lambda: layers.Conv2DTranspose(5, 3, use_bias=False), (1, 1, 4)),
}


def random_weights(layer):
    rng = np.random.default_rng(0)
    layer.set_weights([rng.normal(size=weight.shape) for weight in layer.weights])


def check(spectra, i, matrix):
    """Compare one entry with NumPy's decomposition of a matrix."""
    sigma = np.linalg.svd(matrix.astype("float64"), compute_uv=False)
    assert sorted(spectra.shapes[i]) == sorted(matrix.shape)
    np.testing.assert_allclose(spectra.sigma_max[i], sigma[0], rtol=1e-5)
    np.testing.assert_allclose(spectra.sigma_min[i], sigma[-1], rtol=1e-4)
    np.testing.assert_allclose(spectra.frobenius[i], np.linalg.norm(matrix), rtol=1e-5)
    np.testing.assert_allclose(spectra.stable_rank[i], (sigma**2).sum() / sigma[0] ** 2, rtol=1e-5)
    np.testing.assert_allclose(spectra.condition_number[i], sigma[0] / sigma[-1], rtol=1e-4)


def matrix_of(layer, shape):
    """Return the matrix of a linear layer, `(inputs, outputs)`."""
    basis = np.eye(math.prod(shape), dtype="float32").reshape(-1, *shape)
    return harness.numpy(layer(basis)).reshape(len(basis), -1)


@pytest.mark.backend
@pytest.mark.parametrize("name", LAYERS)
def test_the_matrix_of_a_kernel_is_what_the_layer_does_to_a_patch(name):
    make, shape = LAYERS[name]
    model = keras.Sequential([keras.Input(shape), make()])
    random_weights(model)
    spectra = kp.analysis.weight_spectra(model)
    assert spectra.left_out == ()
    check(spectra, 0, matrix_of(model, shape))
    np.testing.assert_allclose(spectra.log_product, 2 * math.log(spectra.sigma_max[0]))


def test_kernels_that_a_layer_changes():
    """Separable convolutions have two matrices; weight standardisation and LoRA."""
    model = keras.Sequential([keras.Input((6, 6, 3)), layers.SeparableConv2D(5, 3)])
    random_weights(model)
    spectra = kp.analysis.weight_spectra(model)
    depthwise, pointwise, _ = model.get_weights()
    assert spectra.shapes == ((27, 3), (3, 5))
    check(spectra, 1, pointwise[0, 0])
    np.testing.assert_allclose(
        spectra.sigma_max[0], np.linalg.norm(depthwise, axis=(0, 1)).max(), rtol=1e-6
    )

    model = keras.Sequential([keras.Input((3, 3, 3)), PaddedConv2D(5, 3, standardize=True)])
    model.layers[0].set_weights([10 * harness.images(3, 3, 3, 5), np.zeros(5)])
    matrix = matrix_of(model, (3, 3, 3)).reshape(27, 3, 3, 5)[:, 1, 1]  # the pixel that sees all
    check(kp.analysis.weight_spectra(model), 0, matrix)

    model = keras.Sequential([keras.Input((7,)), layers.Dense(4, use_bias=False)])
    model.layers[0].enable_lora(2)
    random_weights(model)
    spectra = kp.analysis.weight_spectra(model)
    check(spectra, 0, matrix_of(model, (7,)))
    assert (len(spectra.names), spectra.left_out) == (1, ())


def test_stacks_of_kernels_that_a_layer_changes():
    options = {"standardize_weights": True, "normalization": "group"}
    model = kp.models.resnet_cifar(26, input_shape=(8, 8, 1), stacked=True, **options)
    harness.randomize(model)
    found = kp.analysis.weight_spectra(model)
    want = kp.analysis.weight_spectra(kp.models.unstack(model))
    assert found.names == want.names
    np.testing.assert_allclose(found.sigma_max, want.sigma_max, rtol=1e-5)
    plain = kp.models.resnet_cifar(26, input_shape=(8, 8, 1), stacked=True, normalization="group")
    plain.set_weights(model.get_weights())
    assert (found.sigma_max[1:-1] > 3 * kp.analysis.weight_spectra(plain).sigma_max[1:-1]).all()


def test_quantized_kernels_are_left_out():
    model = keras.Sequential([keras.Input((7,)), layers.Dense(4), layers.Dense(4)])
    model.layers[0].quantize("int8")
    spectra = kp.analysis.weight_spectra(model)
    [kept, quantized] = [layer.kernel.path for layer in reversed(model.layers)]
    assert (spectra.names, spectra.left_out) == ((kept,), (quantized,))


def test_orthogonal_weights():
    """All singular values are the gain: the stable rank is the rank."""
    model = kp.models.resnet_cifar(
        8, input_shape=(8, 8, 1), kernel_initializer=keras.initializers.Orthogonal(1.5, seed=0)
    )
    spectra = kp.analysis.weight_spectra(model)
    kernels = [i for i, name in enumerate(spectra.names) if "head" not in name]
    ranks = [min(spectra.shapes[i]) for i in kernels]
    assert ranks == [9, 16, 16, 32, 32, 64, 64]
    for found in (spectra.sigma_max, spectra.sigma_min):
        np.testing.assert_allclose(found[kernels], 1.5, rtol=1e-4)
    np.testing.assert_allclose(spectra.stable_rank[kernels], ranks, rtol=1e-4)
    np.testing.assert_allclose(spectra.condition_number[kernels], 1, rtol=1e-4)


@pytest.mark.backend
def test_stacks_and_separate_units_have_the_same_spectra():
    """Also frozen ones and those of a nested model, before and after training. Measuring
    changes nothing.
    """
    stacked = kp.models.resnet_cifar(26, input_shape=(8, 8, 1), width_factor=0.25, stacked=True)
    stacked.segments[0].trainable = False
    harness.randomize(stacked)
    assert harness.longest_stack(stacked) == 3
    for _ in range(2):
        before = harness.weights(stacked)
        found = kp.analysis.weight_spectra(stacked)
        assert harness.changed(stacked, before) == set()
        separate = kp.models.unstack(stacked)
        want = kp.analysis.weight_spectra(separate)
        kernels = harness.kernels(separate)
        assert found.names == want.names == tuple(kernels)
        assert (found.groups, found.shapes) == (want.groups, want.shapes)
        assert found.groups[:3] == ("stem_conv", "stage1_unit1", "stage1_unit1")
        for i, kernel in enumerate(kernels.values()):
            check(found, i, kernel.reshape(-1, kernel.shape[-1]))
        for name in ("sigma_max", "sigma_min", "frobenius"):
            np.testing.assert_array_equal(getattr(found, name), getattr(want, name))
        assert found.log_product == want.log_product
        harness.compiled(stacked).fit(
            harness.images(8, 8, 8, 1), np.arange(8), verbose=0, batch_size=4
        )
    inputs = keras.Input((8, 8, 1))
    nested = keras.Model(inputs, layers.Dense(3, name="top")(stacked(inputs)))
    outer = kp.analysis.weight_spectra(nested)
    inner = kp.analysis.weight_spectra(stacked)
    assert outer.names == (*(f"{stacked.name}/{name}" for name in inner.names), "top/kernel")
    np.testing.assert_array_equal(outer.sigma_max[:-1], inner.sigma_max)


@pytest.mark.backend
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "bfloat16", "float16"])
def test_other_precisions(dtype):
    """The numbers are those of the stored weights, computed in float64."""
    options = {"width": 8, "input_shape": (6,), "stacked": True}
    model = kp.models.dense_resnet(12, dtype=dtype, **options)
    plain = kp.models.dense_resnet(12, **options)
    plain.set_weights([harness.numpy(weight) for weight in model.weights])
    found, want = kp.analysis.weight_spectra(model), kp.analysis.weight_spectra(plain)
    assert found.sigma_max.dtype == "float64"
    np.testing.assert_allclose(found.sigma_max, want.sigma_max, rtol=1e-12)
    np.testing.assert_allclose(found.sigma_min, want.sigma_min, rtol=1e-12)


def test_bounds_of_the_convolution_itself():
    """Its norm as a map between images, by the Jacobian."""
    model = keras.Sequential(
        [keras.Input((7, 7, 2)), layers.Conv2D(3, 3, padding="same", use_bias=False)]
    )
    random_weights(model)
    norm = kp.analysis.spectrum(model, np.zeros((1, 7, 7, 2), "float32")).values[0]
    [sigma] = kp.analysis.weight_spectra(model).sigma_max
    assert 1.05 * sigma < norm < 3 * sigma


def test_zeros_and_what_is_left_out():
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(10, 8, name="embedding")(tokens)
    x = layers.MultiHeadAttention(2, 4, name="attention")(x, x)
    x = layers.GRU(6, name="gru")(x)
    model = keras.Model(tokens, layers.Dense(3, kernel_initializer="zeros", name="head")(x))
    spectra = kp.analysis.weight_spectra(model)
    parts = ("query", "key", "value", "attention_output")
    assert spectra.names == (*(f"attention/{part}/kernel" for part in parts), "head/kernel")
    assert spectra.shapes == ((8, 8),) * 4 + ((6, 3),)
    own = ("embedding/embeddings", "gru/gru_cell/kernel", "gru/gru_cell/recurrent_kernel")
    assert spectra.left_out[0] == own[0]
    assert set(own) <= set(spectra.left_out)
    assert not any("head" in name or "attention" in name for name in spectra.left_out)
    zeros = [spectra.sigma_max[-1], spectra.frobenius[-1], spectra.stable_rank[-1]]
    assert (zeros, spectra.condition_number[-1]) == ([0, 0, 0], np.inf)
    assert spectra.log_product == -np.inf

    pixels = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten()], name="pixels")
    message = harness.error_of(lambda: kp.analysis.weight_spectra(pixels))
    assert "no kernel" in message
    assert message.endswith("Received: 'pixels', left out: nothing")
    unbuilt = keras.Sequential([layers.Dense(3)])
    assert "Build it first" in harness.error_of(lambda: kp.analysis.weight_spectra(unbuilt))
    model.layers[-1].kernel.assign(np.full((6, 3), np.nan))
    message = harness.error_of(lambda: kp.analysis.weight_spectra(model))
    assert message.endswith("NaN or infinite values in head/kernel")
