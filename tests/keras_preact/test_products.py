"""Convolutions as sums of matrix products: values and gradients against NumPy, and where
they replace XLA's convolutions.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.backend import products
from tests import reference
from tests.keras_preact import harness

pytestmark = pytest.mark.backend


@pytest.mark.parametrize("shape", [(2, 5, 6), (2, 1, 3)], ids=str)
@pytest.mark.parametrize(
    ("size", "groups", "dilation"),
    [(1, 1, 1), (1, 3, 1), (3, 2, 2), (5, 6, 1)],
)
def test_values_and_gradients(size, groups, dilation, shape):
    """A convolution is linear in the images and in the kernel: its derivative along a
    change is the convolution of the change.
    """
    rng = np.random.default_rng(size)
    images = rng.normal(size=(*shape, 6)).astype("float32")
    kernel = rng.normal(size=(size, size, 6 // groups, 12)).astype("float32")
    cotangent = rng.normal(size=(*shape, 12)).astype("float32")

    def function(images, kernel):
        y = products.convolve(images, kernel, groups, dilation)
        return keras.ops.sum(keras.ops.multiply(y, cotangent)), [y]

    def want(images, kernel):
        return reference.conv(
            images.astype("float64"), reference.dilated(kernel, dilation), groups=groups
        )

    (y,), gradients, _ = harness.step(function, keras.layers.Identity())(images, kernel)
    harness.close(y, want(images, kernel))
    for i, gradient in enumerate(gradients):
        arguments = [images, kernel]
        arguments[i] = rng.normal(size=gradient.shape)
        got = (gradient * arguments[i]).sum()
        np.testing.assert_allclose(got, (want(*arguments) * cotangent).sum(), 1e-4, 1e-3)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="only JAX's scan is tested")
@pytest.mark.parametrize("options", [{}, {"unroll": 2}, {"remat": 2}], ids=str)
def test_scans_on_a_cpu_hold_no_convolution(options):
    """The test looks at the gradient, which traces the forward pass too."""
    import jax

    if jax.default_backend() != "cpu":
        pytest.skip("convolutions are replaced only on CPUs")

    def traced(**options):
        unit = harness.unit_of(4, block="bottleneck", groups=2, shortcut="conv1x1")
        stack = kp.UnitStack(unit, 4, **options)
        stack.build(x.shape)
        trainable, state = (
            [variable.value for variable in each]
            for each in (stack.trainable_variables, stack.non_trainable_variables)
        )

        def loss(x, trainable):
            return stack.stateless_call(trainable, state, x, training=True)[0].sum()

        return str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, trainable))

    x = np.zeros((2, 4, 4, 16), "float32")
    assert "conv_general_dilated" not in traced(**options)
    assert "conv_general_dilated" in traced(execution="loop")
