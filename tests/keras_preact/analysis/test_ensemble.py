"""Units taken out of a network, against networks that were built without them; lengths
of paths.
"""

import itertools

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness
from tests.keras_preact.analysis.test_propagation import first_input, network, numpy_units

pytestmark = pytest.mark.backend


@pytest.mark.parametrize("stacked", [False, True])
def test_errors_without_units(stacked):
    model = kp.models.ResidualNetwork(
        [(4, 4, 1), (8, 1, 2)],
        stem="3x3",
        stem_filters=4,
        block="basic",
        shape_shortcut="zero_pad",
        input_shape=(8, 8, 2),
        classes=10,
    )
    harness.randomize(model)
    model = kp.models.stack(model) if stacked else model
    assert harness.longest_stack(model) == (3 if stacked else 0)
    images = harness.images(30, 8, 8, 2)
    classes = np.argmax(keras.ops.convert_to_numpy(model(images)), axis=-1)
    found = kp.analysis.lesions(
        model, images, classes, [(), (1,), (2, 3), (1, 2, 3)], batch_size=16
    )
    assert found.intact_error == found.error[0] == 0  # the labels are the network's own answers
    assert found.units == tuple(unit.name for unit in model.units)

    units = numpy_units(model)
    classifier = model.get_layer("head_classifier").get_weights()
    for without, error in zip(found.dropped, found.error, strict=True):
        x = first_input(model, images)
        for i, unit in enumerate(units):  # without F, those that keep the shape are identities
            x = x if i in without else unit(x)
        pooled = (
            units[0].__class__(harness.weights(model), 1).run("N A", x, "head_norm").mean((1, 2))
        )
        wanted = np.argmax(pooled @ classifier[0] + classifier[1], axis=-1)
        assert error == pytest.approx((wanted != classes).mean())
    assert found.error[3] > 0


def test_each_unit_by_itself_and_shape_changes():
    model = network(8)
    images = harness.images(8, 8, 8, 2)
    found = kp.analysis.lesions(model, images, np.zeros(8, int))
    assert found.dropped == ((0,), (1,), (2,))
    assert ((found.error >= 0) & (found.error <= 1)).all()


def test_models_of_others():
    x = inputs = keras.Input((4,))
    for _ in range(2):
        x = x + keras.layers.Dense(4)(keras.layers.Dense(4, activation="tanh")(x))
    model = keras.Model(inputs, x)
    images = harness.images(20, 4)
    found = kp.analysis.lesions(model, images, np.argmax(images, axis=-1), [(0, 1), (0,)])
    assert found.error[0] == 0  # nothing but the input is left
    assert found.intact_error > 0


class Mixing(keras.layers.Layer):
    """A branch that reshapes by the size of the batch it is given."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)

    def call(self, x):
        return x + keras.ops.reshape(self.dense(x), keras.ops.shape(x))


def test_batches_are_of_one_size():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, Mixing()(inputs))
    images = harness.images(5, 4)
    found = kp.analysis.lesions(model, images, np.argmax(images, axis=-1), [(0,)], batch_size=2)
    assert found.error[0] == 0
    want = np.argmax(keras.ops.convert_to_numpy(model(images)), axis=-1) != np.argmax(
        images, axis=-1
    )
    assert found.intact_error == pytest.approx(want.mean())


def test_random_sets():
    sets = list(kp.analysis.random_lesions(6, [0, 2, 6], repeats=50, seed=1))
    assert [len(each) for each in sets] == [0] * 50 + [2] * 50 + [6] * 50
    assert len(set(sets[50:100])) > 10
    assert all(len(set(each)) == len(each) and max(each, default=0) < 6 for each in sets)
    assert list(kp.analysis.random_lesions(6, [2], repeats=3, seed=1)) == list(
        kp.analysis.random_lesions(6, [2], 3, seed=1)
    )


@pytest.mark.parametrize("units", [1, 2, 5])
def test_path_lengths_are_counted(units):
    lengths = [sum(path) for path in itertools.product((0, 1), repeat=units)]
    np.testing.assert_allclose(
        kp.analysis.path_lengths(units), np.bincount(lengths) / 2**units, rtol=1e-12
    )


def test_path_lengths_of_deep_networks():
    shares = kp.analysis.path_lengths(3333)  # 10,001 layers
    assert shares.sum() == pytest.approx(1)
    assert (shares * np.arange(3334)).sum() == pytest.approx(3333 / 2)


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (
            lambda: kp.analysis.lesions(network(), harness.images(2, 8, 8, 2), [0, 1], [(3,)]),
            ["3 units", "(3,)"],
        ),
        (
            lambda: kp.analysis.lesions(network(), [harness.images(2, 8, 8, 2)], [0, 1]),
            ["one input", "1 arrays"],
        ),
        (lambda: kp.analysis.lesions(network(), harness.images(2, 8, 8, 2), None), ["labels=None"]),
        (
            lambda: kp.analysis.lesions(
                network(), harness.images(2, 8, 8, 2), [0, 1], batch_size=0
            ),
            ["batch_size=0"],
        ),
        (lambda: list(kp.analysis.random_lesions(3, [4], 1)), ["from 0 to 3", "4"]),
        (lambda: kp.analysis.path_lengths(0), ["units=0"]),
    ],
    ids=["index", "inputs", "labels", "batch_size", "counts", "units"],
)
def test_wrong_input(call, parts):
    message = harness.error_of(call)
    for part in parts:
        assert part in message
