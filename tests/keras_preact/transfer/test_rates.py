"""Rates by layer: what an optimizer changes in a weight, times the weight's factor, on
every backend and for any optimizer.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import transfer
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

FACTORS = {"stem": 0.0, "stage1": 0.25, "stage2_unit1": 3.0, "stage2": 0.5, "head": 2.0}


def factor_of(path: str) -> float:
    """Say it once more, by hand."""
    beginnings = {
        "stem": 0.0,
        "stage1": 0.25,
        "stage2_unit1": 3.0,
        "stage2_unit2": 0.5,
        "stage3": 1.0,
        "head": 2.0,
    }
    return next(factor for beginning, factor in beginnings.items() if path.startswith(beginning))


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
    return [
        random.normal(size=weight.shape).astype("float32") for weight in model.trainable_weights
    ]


def step(optimizer, model, seed: int) -> dict[str, np.ndarray]:
    """Apply gradients; return what changed, by path."""
    before = harness.weights(model)
    tensors = [keras.ops.convert_to_tensor(each) for each in gradients(model, seed)]
    if keras.backend.backend() == "torch":
        import torch

        with torch.no_grad():
            optimizer.apply(tensors, model.trainable_weights)
    else:
        optimizer.apply(tensors, model.trainable_weights)
    after = harness.weights(model)
    return {
        weight.path: after[weight.path] - before[weight.path] for weight in model.trainable_weights
    }


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "sgd_decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.3),
    "adam": lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 10)),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.5, clipnorm=1.0),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5),
    "lion": lambda: keras.optimizers.Lion(0.01, weight_decay=0.5),
    "coupled": lambda: kp.optimizers.CoupledSGD(
        0.1, nesterov=True, coupled_weight_decay=0.5, global_clipnorm=3.0
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_the_plain_optimizer_s_times_the_factor(name):
    plain_model, model = network(), network()
    optimizer, ours = (
        OPTIMIZERS[name](),
        transfer.layerwise_rates(OPTIMIZERS[name](), model, factors=FACTORS),
    )
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
    expected = {
        weight.path: harness.weights(model)[weight.path].astype("float64")
        for weight in model.trainable_weights
    }
    velocity = {path: np.zeros_like(value) for path, value in expected.items()}
    for i, r in enumerate((0.4, 0.2, 0.1)):
        for weight, gradient in zip(model.trainable_weights, gradients(model, i), strict=True):
            path, f = weight.path, factor_of(weight.path)
            expected[path] = expected[path] * (1 - f * r * 0.1)
            velocity[path] = 0.5 * velocity[path] - f * r * gradient
            expected[path] = expected[path] + velocity[path]
        step(optimizer, model, i)
    for path, value in expected.items():
        np.testing.assert_allclose(
            harness.weights(model)[path], value, rtol=1e-5, atol=1e-5, err_msg=path
        )


def fit(model, epochs=1, **options):
    x, y = harness.images(8, 5), np.arange(8) % 4
    return model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, **options)


def compiled(model, optimizer, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False, **options)
    return model


@pytest.mark.parametrize(("name", "stacked"), [("coupled", True), ("adamw", False)])
def test_files_hold_it_with_its_state(name, stacked, tmp_path):
    """A saved and loaded model goes on as the one that was left alone."""
    model = network((1, 4, 1), stacked=stacked)
    assert harness.longest_stack(model) == (3 if stacked else 0)
    optimizer = transfer.layerwise_rates(OPTIMIZERS[name](), model, decay=0.5)
    compiled(model, optimizer, run_eagerly=True)
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    optimizer = loaded.optimizer
    assert isinstance(optimizer, transfer.LayerwiseRates)
    assert optimizer.get_config() == model.optimizer.get_config()
    assert optimizer.factors == {
        "stem": 0.0625,
        "stage1": 0.125,
        "stage2": 0.25,
        "stage3": 0.5,
        "head": 1.0,
    }
    fit(model)
    fit(loaded)
    for path, value in harness.weights(model).items():
        np.testing.assert_allclose(
            harness.weights(loaded)[path], value, rtol=1e-5, atol=1e-6, err_msg=path
        )


def test_plain_again():
    """The config holds the optimizer that it was made of, whatever backend it was made
    on.
    """
    model = network()
    optimizer = transfer.layerwise_rates(OPTIMIZERS["coupled"](), model, decay=0.5)
    assert isinstance(optimizer, kp.optimizers.CoupledSGD)
    inner = keras.optimizers.deserialize(optimizer.get_config()["optimizer"])
    assert type(inner) is kp.optimizers.CoupledSGD
    assert inner.get_config() == OPTIMIZERS["coupled"]().get_config()


def test_accumulated_gradients():
    """Two parts are one update with their mean."""
    whole, parts = network(), network()
    optimizer = transfer.layerwise_rates(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), parts, factors=FACTORS
    )
    compiled(parts, optimizer)
    assert all(not change.any() for change in step(optimizer, parts, 0).values())
    changes = step(optimizer, parts, 1)
    for weight, one, other in zip(
        whole.trainable_weights, gradients(whole, 0), gradients(whole, 1), strict=True
    ):
        expected = -0.1 * factor_of(weight.path) * (one + other) / 2
        np.testing.assert_allclose(
            changes[weight.path], expected, rtol=1e-4, atol=1e-6, err_msg=weight.path
        )


def test_loss_scale_around_it():
    """Scaled losses and unscaled gradients: the steps are those without."""
    scaled, plain = network(), network()
    compiled(plain, transfer.layerwise_rates("sgd", plain, factors=FACTORS))
    inner = transfer.layerwise_rates("sgd", scaled, factors=FACTORS)
    compiled(scaled, keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0))
    stem = harness.weights(plain)["stem_dense/kernel"]
    for model in (plain, scaled):
        fit(model)
    for path, value in harness.weights(plain).items():
        np.testing.assert_allclose(
            harness.weights(scaled)[path], value, rtol=1e-4, atol=1e-5, err_msg=path
        )
    np.testing.assert_array_equal(harness.weights(scaled)["stem_dense/kernel"], stem)


def test_training_health_sees_the_updates(tmp_path):
    model = network()
    compiled(model, transfer.layerwise_rates(keras.optimizers.SGD(0.1), model, factors=FACTORS))
    health = kp.TrainingHealth(1, csv=tmp_path / "health.csv")
    fit(model, callbacks=[health])
    rows = (tmp_path / "health.csv").read_text().splitlines()
    assert len(rows) == 3
    plain = network()
    compiled(plain, transfer.layerwise_rates(keras.optimizers.SGD(0.1), plain, factors=FACTORS))
    fit(plain)
    for path, value in harness.weights(plain).items():
        np.testing.assert_allclose(
            harness.weights(model)[path], value, rtol=1e-5, atol=1e-6, err_msg=path
        )


class TestErrors:
    def error(self, optimizer="sgd", model=None, **options) -> str:
        model = network() if model is None else model
        return harness.error_of(lambda: transfer.layerwise_rates(optimizer, model, **options))

    def test_either_or(self):
        assert "either `decay` or `factors`" in self.error()
        assert "either `decay` or `factors`" in self.error(decay=0.5, factors={})

    @pytest.mark.parametrize("decay", [0, -1, 1.5, True, "0.5", float("nan")])
    def test_decay(self, decay):
        assert "`decay` must be a number above 0, at most 1" in self.error(decay=decay)

    @pytest.mark.parametrize("factor", [-1, float("inf"), float("nan"), "1", None])
    def test_factor(self, factor):
        assert "Received: factors['stem']=" in self.error(factors={"stem": factor})

    def test_places(self):
        assert "Did you mean 'stage3'" in self.error(factors={"stage4": 1})
        model = network((3, 1, 1), stacked=True)
        assert "kp.models.unstack(model)" in self.error(model=model, factors={"stage1_unit2": 1})

    def test_loss_scale(self):
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
        assert "around it" in self.error(scaled, decay=0.5)


def test_a_stack_has_the_factor_of_its_last_unit():
    model = network((1, 2, 4), stacked=True)
    assert harness.longest_stack(model) == 3
    optimizer = transfer.layerwise_rates("sgd", model, factors={"stage3_unit4": 0.0, "stage2": 0.0})
    changes = step(optimizer, model, 0)
    assert {path.split("/")[0] for path, change in changes.items() if not change.any()} == {
        *("stage3_units", "stage2_unit1", "stage2_units")
    }
