"""Convolutions as sums of matrix products: NumPy's values and gradients, and where they
take the place of XLA's.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.backend import products
from tests import reference
from tests.keras_preact import harness

pytestmark = pytest.mark.backend


@pytest.mark.parametrize("shape", [(2, 5, 6), (1, 4, 4), (2, 1, 3)], ids=str)
@pytest.mark.parametrize(
    ("size", "groups", "dilation"),
    [(1, 1, 1), (3, 1, 1), (5, 1, 1), (1, 3, 1), (3, 2, 2), (5, 6, 1)],
)
def test_values_and_gradients(size, groups, dilation, shape):
    """A convolution is linear in the images and in the kernel: its derivative along a
    change is the convolution of that.
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

    (y,), gradients, _ = harness.differentiate(function, keras.layers.Identity(), images, kernel)
    harness.close(y, want(images, kernel))
    for i, gradient in enumerate(gradients):
        for _ in range(3):
            direction = rng.normal(size=gradient.shape)
            arguments = [images, kernel]
            arguments[i] = direction
            np.testing.assert_allclose(
                (gradient * direction).sum(), (want(*arguments) * cotangent).sum(), 1e-4, 1e-3
            )


def primitives(function, *arguments) -> set[str]:
    """Names of all that JAX traces, in the bodies of loops and of calls as well."""
    import jax

    names = set()

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            names.add(equation.primitive.name)
            for value in jax.tree_util.tree_leaves(
                list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
            ):
                if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                    visit(getattr(value, "jaxpr", value))

    visit(jax.make_jaxpr(function)(*arguments).jaxpr)
    return names


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="of JAX's scan")
@pytest.mark.parametrize(
    "options", [{}, {"unroll": 2}, {"remat": 2}, {"execution": "loop"}], ids=str
)
@pytest.mark.parametrize(
    "unit",
    [{"block": "basic"}, {"block": "bottleneck", "groups": 2, "shortcut": "conv1x1"}],
    ids=str,
)
def test_scans_on_a_cpu_hold_no_convolution(unit, options):
    import jax

    if jax.default_backend() != "cpu":
        pytest.skip("convolutions are slow on CPUs alone")
    unit = harness.unit_of(4, **unit)
    x = np.zeros((2, 4, 4, unit.channels_out), "float32")
    stack = kp.UnitStack(unit, 4, **options)
    stack.build(x.shape)
    is_loop = options.get("execution") == "loop"
    forward = primitives(stack, x)
    assert ("conv_general_dilated" in forward) == is_loop
    assert ("scan" in forward) != is_loop
    values = [
        [variable.value for variable in each]
        for each in (stack.trainable_variables, stack.non_trainable_variables)
    ]

    def loss(x, trainable):
        return stack.stateless_call(trainable, values[1], x, training=True)[0].sum()

    gradient = primitives(jax.grad(loss, argnums=(0, 1)), x, values[0])
    assert ("conv_general_dilated" in gradient) == is_loop
    assert "dot_general" in gradient or is_loop
    assert "conv_general_dilated" in primitives(
        kp.ResidualUnit(4), np.zeros((2, 4, 4, 4), "float32")
    )
