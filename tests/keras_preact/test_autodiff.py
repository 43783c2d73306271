"""Products with Jacobians, against finite differences, one another and the NumPy unit;
no variable changes.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_preact as kp
from keras_preact.backend import autodiff
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

SINGLE = kp.ResidualUnit(4, block="single")
LAYERS = {
    "unit": lambda: kp.ResidualUnit(4),
    "original": lambda: kp.ResidualUnit(8, arrangement="original", strides=2),
    "gated": lambda: kp.ResidualUnit(
        4, shortcut="exclusive_gating", normalization="layer", activation="gelu"
    ),
    "group": lambda: kp.ResidualUnit(4, normalization="group", activation="silu"),
    "rms": lambda: kp.ResidualUnit(4, normalization="rms", activation="tanh"),
    "stack": lambda: kp.UnitStack(SINGLE, depth=3),
    "unrolled": lambda: kp.UnitStack(SINGLE, depth=3, unroll=2),
    "loop": lambda: kp.UnitStack(SINGLE, depth=2, execution="loop"),
    "remat": lambda: kp.UnitStack(SINGLE, depth=4, remat=2),
}
SHAPE = (2, 5, 5, 4)


def layer_of(name):
    layer = LAYERS[name]()
    layer.build(SHAPE)
    harness.randomize(layer)
    return layer


def directions(*shapes):
    rng = np.random.default_rng(5)
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


def numpy(tensor):
    return np.array(ops.convert_to_numpy(tensor), "float64")


@pytest.mark.parametrize(
    ("name", "training"),
    [
        pytest.param(name, training, marks=() if training == (i % 2 == 0) else pytest.mark.soak)
        for i, name in enumerate(LAYERS)
        for training in (False, True)
    ],
)
def test_forward_is_the_transpose_of_backward(name, training):
    """`u . (J v)` of one is `(J^T u) . v` of the other."""
    layer = layer_of(name)
    x = harness.images(*SHAPE)
    before = harness.weights(layer)

    def function(x):
        return layer(x, training=training)

    u, v = directions(layer.compute_output_shape(SHAPE), SHAPE)
    pulled = numpy(
        autodiff.compiled(lambda u: autodiff.vjp(function, x)[1](u))(ops.convert_to_tensor(u))
    )
    push = autodiff.compiled(lambda v: autodiff.jvp(function, x, v))
    if name == "remat" and keras.backend.backend() == "tensorflow":
        with pytest.raises(ValueError, match=r"kp.models.unstack"):
            push(ops.convert_to_tensor(v))
    else:
        pushed = numpy(push(ops.convert_to_tensor(v)))
        assert abs((pushed * u).sum() - (pulled * v).sum()) < 1e-5 * np.linalg.norm(
            pulled
        ) * np.linalg.norm(v)
    after = harness.weights(layer)
    assert all(np.array_equal(before[path], after[path]) for path in before)


def test_backward_is_the_gradient():
    layer = layer_of("stack")
    x = harness.images(*SHAPE)
    [u] = directions(SHAPE)
    y, pull = autodiff.vjp(layer, x)
    harness.close(numpy(y), numpy(layer(x)))
    harness.close(
        numpy(pull(ops.convert_to_tensor(u))),
        harness.value_and_grad(layer, x, u, training=False)[1],
        1e-4,
    )


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_products_of_a_unit(training):
    """Central differences of the NumPy unit in float64."""
    x = harness.images(*SHAPE)
    unit = harness.unit_on(x, 4, activation="tanh")
    exact = harness.reference_of(unit, activation="tanh", training=training)
    [v] = directions(SHAPE)
    h = 1e-5
    want = (exact(x + h * v.astype("float64")) - exact(x - h * v.astype("float64"))) / (2 * h)
    got = autodiff.jvp(lambda x: unit(x, training=training), x, v)
    harness.close(numpy(got), want, 1e-4)


def test_a_tensor_that_does_not_matter():
    """Zeros, not None, where nothing depends on x."""
    x = np.ones((1, 3), "float32")
    _, pull = autodiff.vjp(lambda x: ops.zeros_like(x) + 2.0, x)
    assert not numpy(pull(ops.ones((1, 3)))).any()
    assert not numpy(autodiff.jvp(lambda x: ops.zeros_like(x) + 2.0, x, x)).any()


def test_gradients_of_arrays_and_variables():
    """`value = sum(a^2 w)`: gradients `2 a w` and `a^2`, and 0 for what does not
    matter.
    """
    variables = [keras.Variable([3.0, 5.0]), keras.Variable([1.0])]
    a = np.array([2.0, -1.0], "float32")

    def function(a):
        variables[1].assign([7.0])
        return ops.sum(a**2 * variables[0]), [a, [variables[0] + 0.0]]

    value, (same, [weights]), on_arrays, on_variables = autodiff.value_and_gradients(
        function, [a], variables
    )
    assert float(value) == 17.0
    assert numpy(same).tolist() == [2.0, -1.0]
    assert numpy(weights).tolist() == [3.0, 5.0]
    assert [numpy(gradient).tolist() for gradient in on_arrays] == [[12.0, -10.0]]
    assert [numpy(gradient).tolist() for gradient in on_variables] == [[4.0, 1.0], [0.0]]
    assert numpy(variables[1].value).tolist() == [1.0]
