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
    "original": lambda: kp.ResidualUnit(8, arrangement="original", strides=2),
    "gated": lambda: kp.ResidualUnit(
        4, shortcut="exclusive_gating", normalization="layer", activation="gelu"
    ),
    "stack": lambda: kp.UnitStack(SINGLE, depth=3),
    "unrolled": lambda: kp.UnitStack(SINGLE, depth=3, unroll=2),
    "loop": lambda: kp.UnitStack(SINGLE, depth=2, execution="loop"),
    "remat": lambda: kp.UnitStack(SINGLE, depth=4, remat=2),
}
SHAPE = (2, 5, 5, 4)


class Attention(keras.layers.Layer):
    """Keras' attention: PyTorch's fast kernels for it have no second derivative."""

    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 2)

    def build(self, shape):
        self.attention.build((2, 25, 4), (2, 25, 4))

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        rows = ops.reshape(x, (2, 25, 4))
        return ops.reshape(self.attention(rows, rows), SHAPE)


LAYERS["attention"] = Attention


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
    ("name", "training"), [(name, i % 2 == 0) for i, name in enumerate(LAYERS)]
)
def test_forward_is_the_transpose_of_backward(name, training):
    """`u . (J v)`, computed forward, is `(J^T u) . v`, computed backward."""
    layer = layer_of(name)
    x = harness.images(*SHAPE)
    before = harness.weights(layer)

    def function(x):
        return layer(x, training=training)

    u, v = map(ops.convert_to_tensor, directions(layer.compute_output_shape(SHAPE), SHAPE))
    pulled = numpy(autodiff.compiled(lambda u: autodiff.vjp(function, x)[1](u))(u))
    push = autodiff.compiled(lambda v: autodiff.jvp(function, x, v))
    if name == "remat" and keras.backend.backend() == "tensorflow":
        with pytest.raises(ValueError, match=r"kp.models.unstack"):
            push(v)
    else:
        pushed, u, v = numpy(push(v)), numpy(u), numpy(v)
        size = np.linalg.norm(pulled) * np.linalg.norm(v)
        assert abs((pushed * u).sum() - (pulled * v).sum()) < 1e-5 * size
    after = harness.weights(layer)
    assert all(np.array_equal(before[path], after[path]) for path in before)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_products_of_a_unit(training):
    """Compare with central differences of the NumPy unit in float64."""
    x = harness.images(*SHAPE)
    unit = harness.unit_on(x, 4, activation="tanh")
    exact = harness.reference_of(unit, activation="tanh", training=training)
    [v] = directions(SHAPE)
    h = 1e-5
    want = (exact(x + h * v.astype("float64")) - exact(x - h * v.astype("float64"))) / (2 * h)
    got = autodiff.jvp(lambda x: unit(x, training=training), x, v)
    harness.close(numpy(got), want, 1e-4)


def test_gradients_of_arrays_and_variables():
    """`value = sum(a^2 w)` has the gradients `2 a w` and `a^2`, and 0 for inputs that it
    does not use.
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
    _, pull = autodiff.vjp(lambda x: ops.zeros_like(x) + 2.0, a)
    assert not numpy(pull(ops.ones(2))).any()
