"""Rates by layer: what an optimizer changes in a weight, times the weight's factor, on
every backend and for any optimizer.
"""

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


def gradients(model, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = [weight.shape for weight in model.trainable_weights]
    return [random.normal(size=shape).astype("float32") for shape in shapes]


def step(optimizer, model, seed: int) -> dict[str, np.ndarray]:
    """Apply gradients; return what changed, by path."""
    before = harness.weights(model)
    tensors = [keras.ops.convert_to_tensor(each) for each in gradients(model, seed)]
    optimizer.apply(tensors, model.trainable_weights)
    after = harness.weights(model)
    paths = [weight.path for weight in model.trainable_weights]
    return {path: after[path] - before[path] for path in paths}


OPTIMIZERS = {
    "sgd_decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.3),
    "adam": lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 10)),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.5, clipnorm=1.0),
    "coupled": lambda: kp.optimizers.CoupledSGD(
        0.1, nesterov=True, coupled_weight_decay=0.5, global_clipnorm=3.0
    ),
}


@pytest.mark.backend
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_the_plain_optimizer_s_times_the_factor(name):
    plain_model, model = network(), network()
    optimizer = OPTIMIZERS[name]()
    ours = transfer.layerwise_rates(OPTIMIZERS[name](), model, factors=FACTORS)
    if optimizer.weight_decay:
        for each in (optimizer, ours):
            each.exclude_from_weight_decay(var_names=["gamma", "head_norm"])
    plain, found = step(optimizer, plain_model, 0), step(ours, model, 0)
    for path, change in found.items():
        expected = plain[path] * factor_of(path)
        np.testing.assert_allclose(change, expected, rtol=2e-4, atol=1e-6, err_msg=path)
        assert np.abs(change).max() > 1e-4 or factor_of(path) == 0


def test_three_steps_of_momentum_and_schedule_in_closed_form():
    """v = m v - f r(t) g, w += v, decay outside the momentum: w -= f r(t) d w."""
    model = network()
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [0.4, 0.2, 0.1])
    optimizer = transfer.layerwise_rates(
        keras.optimizers.SGD(rate, momentum=0.5, weight_decay=0.1), model, factors=FACTORS
    )
    start = harness.weights(model)
    expected = {w.path: start[w.path].astype("float64") for w in model.trainable_weights}
    velocity = dict.fromkeys(expected, 0.0)
    for i, r in enumerate((0.4, 0.2, 0.1)):
        for path, gradient in zip(expected, gradients(model, i), strict=True):
            rate = factor_of(path) * r
            velocity[path] = 0.5 * velocity[path] - rate * gradient
            expected[path] = expected[path] * (1 - rate * 0.1) + velocity[path]
        step(optimizer, model, i)
    after = harness.weights(model)
    for path, value in expected.items():
        np.testing.assert_allclose(after[path], value, rtol=1e-5, atol=1e-5, err_msg=path)


def compiled(model, optimizer, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False, **options)
    return model


def fit(model):
    x, y = harness.images(8, 5), np.arange(8) % 4
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return harness.weights(model)


def check_same_training(one, other):
    expected = fit(other)
    for path, value in fit(one).items():
        np.testing.assert_allclose(value, expected[path], rtol=1e-4, atol=1e-5, err_msg=path)


def test_files_hold_it_with_its_state(tmp_path):
    """A saved and loaded model goes on as the one that was left alone."""
    model = network((1, 4, 1), stacked=True)
    assert harness.longest_stack(model) == 3
    optimizer = transfer.layerwise_rates(OPTIMIZERS["coupled"](), model, decay=0.5)
    assert isinstance(optimizer, kp.optimizers.CoupledSGD)
    compiled(model, optimizer, run_eagerly=True)
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, transfer.LayerwiseRates)
    assert loaded.optimizer.get_config() == optimizer.get_config()
    factors = {"stem": 0.0625, "stage1": 0.125, "stage2": 0.25, "stage3": 0.5, "head": 1.0}
    assert loaded.optimizer.factors == factors
    check_same_training(loaded, model)
    plain = keras.optimizers.deserialize(optimizer.get_config()["optimizer"])
    assert type(plain) is kp.optimizers.CoupledSGD
    assert plain.get_config() == OPTIMIZERS["coupled"]().get_config()


@pytest.mark.backend
def test_loss_scale_around_it():
    """Scaled losses and unscaled gradients: the steps are those without."""
    plain, scaled = network(), network()
    compiled(plain, transfer.layerwise_rates("sgd", plain, factors=FACTORS))
    inner = transfer.layerwise_rates("sgd", scaled, factors=FACTORS)
    compiled(scaled, keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0))
    stem = harness.weights(plain)["stem_dense/kernel"]
    check_same_training(scaled, plain)
    np.testing.assert_array_equal(harness.weights(scaled)["stem_dense/kernel"], stem)


def test_a_stack_has_the_factor_of_its_last_unit():
    model = network((1, 2, 4), stacked=True)
    assert harness.longest_stack(model) == 3
    optimizer = transfer.layerwise_rates("sgd", model, factors={"stage3_unit4": 0.0, "stage2": 0.0})
    changes = step(optimizer, model, 0)
    kept = {path.split("/")[0] for path, change in changes.items() if not change.any()}
    assert kept == {"stage3_units", "stage2_unit1", "stage2_units"}


SCALED = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({}, "either `decay` or `factors`"),
        ({"decay": 0.5, "factors": {}}, "either `decay` or `factors`"),
        *(({"decay": decay}, "`decay`") for decay in (0, 1.5, True, "0.5", float("nan"))),
        *(({"factors": {"stem": f}}, "['stem']") for f in (-1, float("inf"), "1", None)),
        ({"factors": {"stage4": 1}}, "Did you mean 'stage3'"),
        ({"factors": {"stage1_unit2": 1}}, "unstack"),
        ({"optimizer": SCALED, "decay": 0.5}, "around it"),
    ],
    ids=harness.label,
)
def test_errors(options, word):
    model = network((3, 1, 1), stacked=True)
    options = {"optimizer": "sgd"} | options
    assert word in harness.error_of(lambda: transfer.layerwise_rates(model=model, **options))
