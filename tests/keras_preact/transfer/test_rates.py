"""Factors on the rate that fall towards the stem, and what the optimizer makes of them."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import transfer
from tests.keras_preact import harness

FACTORS = {"stem": 0.0, "stage1": 0.25, "stage2_unit1": 3.0, "stage2": 0.5, "head": 2.0}
#: A place that each layer is below, to its factor, said once more by hand.
BY_HAND = [("stem", 0), ("stage1", 0.25), ("stage2_unit1", 3), ("stage2_unit2", 0.5)]
BY_HAND += [("stage3", 1), ("head", 2)]


def factor_of(path: str) -> float:
    return next(factor for start, factor in BY_HAND if path.startswith(start))


def network(units=(1, 2, 2), **options):
    """Of dense layers: an optimizer sees no more of a network than its weights and
    their paths.
    """
    stages = [(4, each, 1) for each in units]
    options |= {"block": "dense", "input_shape": (5,), "classes": 4}
    model = kp.models.ResidualNetwork(stages, stem="dense", stem_filters=4, **options)
    harness.randomize(model)
    return model


@pytest.mark.backend
@pytest.mark.parametrize("nesterov", [False, True])
def test_three_steps_in_closed_form(nesterov):
    """v = m v - f r(t) (g + d w), w += v, or m v - f r(t) (g + d w)."""
    model, random = network(), np.random.default_rng(0)
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [0.4, 0.2, 0.1])
    optimizer = kp.optimizers.CoupledSGD(
        rate, momentum=0.5, nesterov=nesterov, coupled_weight_decay=0.1, rate_factors=FACTORS
    )
    start = harness.weights(model)
    expected = {w.path: start[w.path].astype("float64") for w in model.trainable_weights}
    velocity = dict.fromkeys(expected, 0.0)
    for r in (0.4, 0.2, 0.1):
        gradients = {path: random.normal(size=value.shape) for path, value in expected.items()}
        for path, gradient in gradients.items():
            change = factor_of(path) * r * (gradient + 0.1 * expected[path])
            velocity[path] = 0.5 * velocity[path] - change
            step = 0.5 * velocity[path] - change if nesterov else velocity[path]
            expected[path] = expected[path] + step
        tensors = [keras.ops.convert_to_tensor(g.astype("float32")) for g in gradients.values()]
        optimizer.apply(tensors, model.trainable_weights)
    after = harness.weights(model)
    for path, value in expected.items():
        np.testing.assert_allclose(after[path], value, rtol=1e-5, atol=1e-5, err_msg=path)


def test_a_file_holds_the_factors(tmp_path):
    """Those of a stack are those of its stage."""
    model = network((1, 4, 1), stacked=True)
    assert harness.longest_stack(model) == 3
    factors = transfer.rate_factors(model, decay=0.5)
    expected = {"stem": 0.0625, "stage1": 0.125, "stage2": 0.25, "stage3": 0.5, "head": 1.0}
    assert factors == expected
    optimizer = kp.optimizers.CoupledSGD(rate_factors=factors)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert loaded.get_config() == optimizer.get_config()
    assert loaded.rate_factors == expected


@pytest.mark.parametrize("decay", [0, 1.5, True, "0.5", float("nan")])
def test_a_decay_out_of_range(decay):
    message = harness.error_of(lambda: transfer.rate_factors(network(), decay))
    assert "`decay`" in message


@pytest.mark.parametrize("factor", [-1, float("inf"), "1", None])
def test_a_factor_out_of_range(factor):
    options = {"rate_factors": {"stem": factor}}
    message = harness.error_of(lambda: kp.optimizers.CoupledSGD(**options))
    assert "['stem']" in message
