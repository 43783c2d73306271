"""Units taken out of a network, against networks that were built without them; lengths
of paths.
"""

import itertools

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness
from tests.keras_preact.analysis.test_propagation import first_input, numpy_units


@pytest.mark.parametrize("stacked", [False, pytest.param(True, marks=pytest.mark.backend)])
def test_errors_without_units(stacked):
    options = {"stem": "3x3", "stem_filters": 4, "block": "basic", "shape_shortcut": "zero_pad"}
    model = kp.models.ResidualNetwork(
        [(4, 4, 1), (8, 1, 2)], input_shape=(8, 8, 2), classes=10, **options
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
    assert found.units == tuple(model.unit_names)

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


def test_models_of_others():
    x = inputs = keras.Input((4,))
    for _ in range(2):
        x = x + keras.layers.Dense(4)(keras.layers.Dense(4, activation="tanh")(x))
    images = harness.images(20, 4)
    labels = np.argmax(images, axis=-1)
    found = kp.analysis.lesions(keras.Model(inputs, x), images, labels, [(0, 1), (0,)])
    assert found.error[0] == 0  # nothing but the input is left
    assert found.intact_error > 0


def test_random_sets():
    sets = list(kp.analysis.random_lesions(6, [0, 2, 6], repeats=50, seed=1))
    assert [len(each) for each in sets] == [0] * 50 + [2] * 50 + [6] * 50
    assert len(set(sets[50:100])) > 10
    assert all(len(set(each)) == len(each) and max(each, default=0) < 6 for each in sets)
    assert sets == list(kp.analysis.random_lesions(6, [0, 2, 6], 50, seed=1))


def test_path_lengths():
    for units in (1, 2, 5):
        lengths = [sum(path) for path in itertools.product((0, 1), repeat=units)]
        want = np.bincount(lengths) / 2**units
        np.testing.assert_allclose(kp.analysis.path_lengths(units), want, rtol=1e-12)
    shares = kp.analysis.path_lengths(3333)  # 10,001 layers
    assert shares.sum() == pytest.approx(1)
    assert (shares * np.arange(3334)).sum() == pytest.approx(3333 / 2)
