"""TrainingHealth: its figures against a network differentiated by hand, what it leaves
behind, what it writes and says.
"""

import csv
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.health import HEALTHY_RANGES, Range, Record, TrainingHealth, findings
from keras_preact.health.activations import Activations
from keras_preact.health.findings import Measured, Rates
from keras_preact.health.probe import Probe
from keras_preact.health.weights import places
from tests.keras_preact.harness import close, error_of

BACKEND = keras.backend.backend()
ROOT = Path(__file__).parents[2]
FEATURES, HIDDEN, OUTPUTS, BATCH = 4, 5, 2, 8
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
#: Of `compile`: XLA on JAX, which has nothing else.
JIT = {"jit_compile": "auto" if BACKEND == "jax" else False}
NAMES = ["first/kernel", "first/bias", "second/kernel", "second/bias"]


def silent(message: str) -> None:
    """Report nothing."""


def data(batches=6, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(batches * BATCH, FEATURES)).astype("float32")
    return x, random.normal(size=(batches * BATCH, OUTPUTS)).astype("float32")


def network(optimizer, dtype=None, **compiled) -> keras.Model:
    """A Dense-ReLU-Dense network with weights that do not depend on the backend."""
    inputs = keras.Input((FEATURES,))
    x = keras.layers.Dense(HIDDEN, activation="relu", name="first", dtype=dtype)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(OUTPUTS, name="second", dtype=dtype)(x))
    random = np.random.default_rng(5)
    model.set_weights([random.normal(size=weight.shape) for weight in model.weights])
    model.compile(optimizer, "mse", **JIT | compiled)
    return model


def fit(model, x, y, *callbacks, epochs=1, **options):
    return model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
        **options,
    )


def gradients(weights, x, y):
    """Of the mean squared error of `relu(x a + b) c + d`, by hand."""
    a, b, c, d = weights
    z = x @ a + b
    h = np.maximum(z, 0)
    on_output = 2 * (h @ c + d - y) / y.size
    on_z = on_output @ c.T * (z > 0)
    return [x.T @ on_z, on_z.sum(0), h.T @ on_output, on_output.sum(0)]


class ByHand:
    """SGD in NumPy: norms of gradient, weight and update of every step, `(steps, 3,
    weights)`.
    """

    def __init__(
        self,
        rate=0.1,
        momentum=0.0,
        nesterov=False,
        coupled=0.0,
        decay=0.0,
        clipnorm=None,
        accumulate=1,
    ):
        self.rate, self.momentum, self.nesterov, self.coupled = rate, momentum, nesterov, coupled
        self.decay, self.clipnorm, self.accumulate = decay, clipnorm, accumulate

    def train(self, weights, x, y):
        weights = [np.array(weight, "float64") for weight in weights]
        velocity = [np.zeros_like(weight) for weight in weights]
        figures, collected = [], []
        for start in range(0, len(x), BATCH):
            collected.append(gradients(weights, x[start : start + BATCH], y[start : start + BATCH]))
            if len(collected) < self.accumulate:
                continue
            gradient = [np.mean(column, axis=0) for column in zip(*collected, strict=True)]
            collected, new = [], []
            for i, (g, w) in enumerate(zip(gradient, weights, strict=True)):
                if self.clipnorm:
                    g = g * min(1, self.clipnorm / np.linalg.norm(g))
                g = g + self.coupled * w
                v = velocity[i] = self.momentum * velocity[i] - self.rate * g
                step = self.momentum * v - self.rate * g if self.nesterov else v
                new.append(w * (1 - self.rate * self.decay) + step)
            norms = [gradient, weights, [n - w for n, w in zip(new, weights, strict=True)]]
            figures.append([[np.linalg.norm(tensor) for tensor in tensors] for tensors in norms])
            weights = new
        return np.array(figures), weights


def figures_of(record):
    return np.stack([record.gradient_norms, record.weight_norms, record.update_norms])


def check_figures(health, wanted):
    """Compare each record with the figures of its step."""
    for record in health.history:
        np.testing.assert_allclose(figures_of(record), wanted[record.step - 1], rtol=5e-4)


SGD = keras.optimizers.SGD
OPTIMIZERS = {
    "plain": (lambda: SGD(0.1), ByHand()),
    "momentum": (lambda: SGD(0.1, momentum=0.9), ByHand(momentum=0.9)),
    "coupled": (
        lambda: kp.optimizers.CoupledSGD(0.1, nesterov=True, coupled_weight_decay=0.1),
        ByHand(momentum=0.9, nesterov=True, coupled=0.1),
    ),
    "decayed": (lambda: SGD(0.1, weight_decay=0.2), ByHand(decay=0.2)),
    "clipped": (lambda: SGD(0.1, clipnorm=0.3), ByHand(clipnorm=0.3)),
    "averaged": (lambda: SGD(0.1, use_ema=True, ema_momentum=0.9), ByHand()),
    "accumulated": (
        lambda: SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
        ByHand(momentum=0.9, accumulate=2),
    ),
    "scaled": (lambda: SGD(0.1, loss_scale_factor=8.0), ByHand()),
    "dynamically scaled": (
        lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1), initial_scale=4.0),
        ByHand(),
    ),
}


class TestFigures:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_norms_of_every_step(self, name):
        make, by_hand = OPTIMIZERS[name]
        x, y = data()
        model = network(make())
        wanted, _ = by_hand.train(model.get_weights(), x, y)
        health = TrainingHealth(1, report=silent)
        fit(model, x, y, health)
        assert health.weights == NAMES
        assert [record.step for record in health.history] == list(range(1, len(wanted) + 1))
        for record, figures in zip(health.history, wanted, strict=True):
            np.testing.assert_allclose(figures_of(record), figures, rtol=2e-4)
            gradient, weight, update = figures
            np.testing.assert_allclose(record.gradient_norm, np.linalg.norm(gradient), rtol=2e-4)
            np.testing.assert_allclose(record.gradient_weight_ratios, gradient / weight, rtol=2e-4)
            np.testing.assert_allclose(record.update_ratios, update / weight, rtol=2e-4)
            layers = [np.linalg.norm(gradient[:2]), np.linalg.norm(gradient[2:])]
            np.testing.assert_allclose(
                record.layer_gradient_ratio, layers[0] / layers[1], rtol=2e-4
            )

    def test_only_at_the_interval(self):
        x, y = data(7)
        model = network(SGD(0.1, momentum=0.9))
        wanted, _ = ByHand(momentum=0.9).train(
            model.get_weights(), np.tile(x, (2, 1)), np.tile(y, (2, 1))
        )
        health = TrainingHealth(3, report=silent)
        logged = fit(model, x, y, health, epochs=2)
        assert [record.step for record in health.history] == [3, 6, 9, 12]
        assert [record.epoch for record in health.history] == [0, 0, 1, 1]
        check_figures(health, wanted)
        for record in health.history:
            assert record.loss != logged.history["loss"][record.epoch]  # of the epoch so far

    @pytest.mark.skipif(BACKEND == "torch", reason="Keras has no steps_per_execution on torch")
    def test_several_steps_an_execution(self):
        """Executions of 4, 4, 3 steps: each has its last multiple of 3."""
        x, y = data(11)
        model = network(SGD(0.1), steps_per_execution=4)
        wanted, _ = ByHand().train(model.get_weights(), x, y)
        health = TrainingHealth(3, report=silent)
        fit(model, x, y, health)
        assert [record.step for record in health.history] == [3, 6, 9]
        check_figures(health, wanted)

    @pytest.mark.skipif(BACKEND == "torch", reason="torch.compile needs a compiler of C++")
    def test_compiled_by_xla(self):
        x, y = data(2)
        model = network(SGD(0.1, momentum=0.9), jit_compile=True)
        wanted, _ = ByHand(momentum=0.9).train(model.get_weights(), x, y)
        health = TrainingHealth(2, stop_on_divergence=True, report=silent)
        fit(model, x, y, health)
        np.testing.assert_allclose(figures_of(health.history[0]), wanted[1], rtol=2e-4)

    def test_frozen_weights_are_not_watched(self):
        x, y = data(2)
        model = network("sgd")
        model.get_layer("first").trainable = False
        model.compile(SGD(0.1), "mse")
        wanted, _ = ByHand().train(model.get_weights(), x, y)
        health = TrainingHealth(1, report=silent)
        fit(model, x, y, health)
        assert health.weights == NAMES[2:]
        np.testing.assert_allclose(figures_of(health.history[0]), wanted[0][:, 2:], rtol=2e-4)

    def test_rows_of_an_embedding_that_are_read_twice(self):
        """Their gradients are added before the norm is taken."""
        x = np.array([[1, 1, 2]] * BATCH)
        layers = [
            keras.layers.Embedding(5, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(OUTPUTS, use_bias=False),
        ]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        model.compile(SGD(0.1), "mse", **JIT)
        embedding, kernel = (np.array(weight, "float64") for weight in model.get_weights())
        health = TrainingHealth(1, stop_on_divergence=True, report=silent)
        fit(model, x, np.ones((BATCH, OUTPUTS)), health)
        on_output = 2 * (embedding[x].reshape(BATCH, 12) @ kernel - 1) / (BATCH * OUTPUTS)
        gradient = np.zeros_like(embedding)
        np.add.at(gradient, x, (on_output @ kernel.T).reshape(BATCH, 3, 4))
        np.testing.assert_allclose(
            health.history[0].gradient_norms[0], np.linalg.norm(gradient), rtol=1e-4
        )
        np.testing.assert_allclose(
            health.history[0].update_norms[0], 0.1 * np.linalg.norm(gradient), rtol=1e-4
        )

    @pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
    def test_mixed_precision(self, dtype):
        """Gradients without the loss scale, which Keras uses for float16 by itself."""
        x, y = data(3)
        model = network("sgd", dtype=dtype)
        model.compile(SGD(0.1), "mse", jit_compile=BACKEND == "jax", auto_scale_loss=True)
        wanted, _ = ByHand().train(model.get_weights(), x, y)
        health = TrainingHealth(3, report=silent)
        fit(model, x, y, health)
        np.testing.assert_allclose(figures_of(health.history[0]), wanted[2], rtol=0.05)

    def test_steps_that_a_loss_scale_skips_do_not_count(self):
        """A loss of about 30 times 2**127 is too much for float32; 2**122 is not."""
        x, y = data(10)
        scaled = keras.optimizers.LossScaleOptimizer(SGD(0.1), initial_scale=2.0**127)
        model = network(scaled)
        weights = model.get_weights()
        health = TrainingHealth(3, report=silent)
        fit(model, x, y, health)
        skipped = 10 - int(scaled.inner_optimizer.iterations)
        assert 0 < skipped < 7
        wanted, _ = ByHand().train(weights, x[skipped * BATCH :], y[skipped * BATCH :])
        assert [record.step for record in health.history] == [3, 6, 9][: (10 - skipped) // 3]
        check_figures(health, wanted)

    def test_units_of_a_stack_are_those_of_single_units(self):
        x = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
        records = {}
        single = kp.models.dense_resnet(12, input_shape=(6,), width=5, classes=3, stacked=False)
        for name, model in (("single", single), ("stacked", kp.models.stack(single))):
            model.compile(kp.optimizers.CoupledSGD(0.1), CROSS_ENTROPY, **JIT)
            health = TrainingHealth(2, sample=x, report=silent)
            fit(model, x, np.arange(16) % 3, health, epochs=2)
            weights = [
                dict(zip(health.weights, row, strict=True))
                for row in figures_of(health.history[-1])
            ]
            record = health.history[-1]
            rows = (record.activation_means, record.activation_stds)
            inputs = [dict(zip(health.inputs, row, strict=True)) for row in rows]
            records[name] = ([*weights, *inputs], record.layer_gradient_ratio)
        assert any(
            f"{unit.name}/branch/dense_2/kernel" in records["stacked"][0][0]
            for unit in single.units[1:]
        )
        for ours, theirs in zip(*(records[name][0] for name in records), strict=True):
            assert ours.keys() == theirs.keys()
            np.testing.assert_allclose(
                [ours[key] for key in ours], [theirs[key] for key in ours], rtol=1e-3, atol=1e-6
            )
        np.testing.assert_allclose(records["single"][1], records["stacked"][1], rtol=1e-3)
        norms, first, last = records["single"][0][0], single.units[0].name, single.units[-1].name
        squares = [
            sum(norm**2 for key, norm in norms.items() if key.startswith(f"{unit}/"))
            for unit in (first, last)
        ]
        np.testing.assert_allclose(
            records["single"][1], np.sqrt(squares[0] / squares[1]), rtol=1e-4
        )


def test_names_of_units_inside_other_layers():
    """A stack's weights have the names of single units', and units in other layers keep
    those layers' names.
    """
    stack = kp.UnitStack(kp.ResidualUnit(4, block="dense", name="part_unit2"), 2, name="part_units")
    unit = kp.ResidualUnit(4, block="dense", name="part")
    found = [
        places("a/part_units/branch/dense_1/kernel", stack),
        places("b/part/branch/part/bias", unit),
        places("c/k", None),
    ]
    assert [(place.name, place.group) for row in found for place in row] == [
        ("a/part_unit2/branch/dense_1/kernel", "a/part_unit2"),
        ("a/part_unit3/branch/dense_1/kernel", "a/part_unit3"),
        ("b/part/branch/part/bias", "b/part"),
        ("c/k", "c"),
    ]


class TestActivations:
    def test_by_hand(self):
        """Each record sees the weights after the update of its step."""
        x, y = data(2)
        model = network(SGD(0.5))
        weights = [ByHand(0.5).train(model.get_weights(), x[:n], y[:n])[1] for n in (BATCH, len(x))]
        health = TrainingHealth(1, sample=x, report=silent)
        fit(model, x, y, health)
        assert health.inputs == ["first/kernel", "second/kernel"]
        for record, (a, b, *_) in zip(health.history, weights, strict=True):
            hidden = np.maximum(x @ a + b, 0)
            for found, figure in (
                (record.activation_means, np.mean),
                (record.activation_stds, np.std),
            ):
                np.testing.assert_allclose(found, [figure(x), figure(hidden)], rtol=5e-4)

    def test_inside_units_and_stacks(self):
        """What a unit's first weight reads is relu(x_l), without normalisation; the
        second, relu of the first one's output.
        """
        x = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
        model = kp.models.dense_resnet(
            8, input_shape=(6,), width=5, classes=3, stacked=True, normalization="none"
        )
        model.compile(SGD(0.0), "mse", **JIT)
        health = TrainingHealth(1, sample=x, report=silent)
        fit(model, x[:BATCH], np.zeros((BATCH, 3)), health)
        found = dict(zip(health.inputs, health.history[0].activation_means, strict=True))
        deviations = dict(zip(health.inputs, health.history[0].activation_stds, strict=True))
        outputs = keras.Model(model.input, model.unit_outputs).predict_on_batch(x)
        for unit, before in zip(model.units[1:], outputs, strict=False):
            own = {weight.path.split("/branch/")[1]: np.array(weight) for weight in unit.weights}
            read = np.maximum(before, 0)
            for kernel in ("dense_1/kernel", "dense_2/kernel"):
                close(found[f"{unit.name}/branch/{kernel}"], read.mean(), message=unit.name)
                close(deviations[f"{unit.name}/branch/{kernel}"], read.std(), message=unit.name)
                read = np.maximum(read @ own[kernel], 0)

    def test_moving_statistics_and_dropout_seeds_stay(self):
        x = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
        model = kp.models.dense_resnet(6, input_shape=(6,), width=5, dropout=0.5)
        before = [np.array(variable) for variable in model.variables]
        measure = Activations(model, x)
        means, deviations = measure()
        assert means.shape == deviations.shape == (len(measure.places),)
        assert np.isfinite([means, deviations]).all()
        for variable, value in zip(model.variables, before, strict=True):
            np.testing.assert_array_equal(np.array(variable), value)


def check_weights_bit_for_bit():
    x = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
    trained = []
    for callbacks in ([], [TrainingHealth(2, sample=x, stop_on_divergence=1e6, report=silent)]):
        keras.utils.set_random_seed(3)
        model = kp.models.dense_resnet(6, input_shape=(6,), width=5, classes=3, dropout=0.3)
        model.compile(kp.optimizers.CoupledSGD(0.1), CROSS_ENTROPY, **JIT)
        fit(model, x, np.arange(24) % 3, *callbacks, epochs=2)
        trained.append(
            [np.array(variable) for variable in (*model.variables, *model.optimizer.variables)]
        )
    for plain, watched in zip(*trained, strict=True):
        np.testing.assert_array_equal(watched, plain)
    print("bit for bit")


class TestNothingElseChanges:
    def test_weights_are_the_same_bit_for_bit(self, tmp_path):
        """On JAX in a process with XLA's own settings: those of conftest.py round the
        two programs differently.
        """
        if BACKEND != "jax":
            check_weights_bit_for_bit()
            return
        module = "tests.keras_preact.test_training_health"
        code = f"import {module} as tests; tests.check_weights_bit_for_bit()"
        printed = in_process(code, tmp_path, XLA_FLAGS="", KERAS_BACKEND=BACKEND)
        assert printed.endswith("bit for bit\n")

    @pytest.mark.parametrize("name", ["momentum", "dynamically scaled"])
    def test_optimizer_is_as_before(self, name):
        x, y = data()
        model = network(OPTIMIZERS[name][0]())
        model.optimizer.build(model.trainable_variables)
        inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        before = [
            (list(map(id, each.variables)), set(vars(each))) for each in (model.optimizer, inner)
        ]
        fit(model, x, y, TrainingHealth(2, report=silent))
        assert [
            (list(map(id, each.variables)), set(vars(each))) for each in (model.optimizer, inner)
        ] == before
        assert Probe.of(model.optimizer) is None

    @pytest.mark.parametrize("name", ["momentum", "dynamically scaled"])
    def test_what_is_saved_in_the_middle(self, name, tmp_path):
        """A checkpoint of the first epoch goes on as if nothing had been interrupted,
        with the optimizer's state.
        """
        x, y = data()

        class Save(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                self.model.save(tmp_path / f"{epoch}.keras")

        model = network(OPTIMIZERS[name][0]())
        fit(model, x, y, TrainingHealth(2, report=silent), Save(), epochs=2)
        plain = network(OPTIMIZERS[name][0]())
        fit(plain, x, y)
        loaded = keras.saving.load_model(tmp_path / "0.keras")
        assert len(loaded.optimizer.variables) == len(plain.optimizer.variables)
        for ours, theirs in zip(loaded.optimizer.variables, plain.optimizer.variables, strict=True):
            np.testing.assert_array_equal(np.array(ours), np.array(theirs))
        fit(loaded, x, y)
        for ours, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)

    def test_state_can_be_loaded_in_the_middle(self, tmp_path):
        """Going back to the weights and momenta of another run, where callbacks such as
        BackupAndRestore do it.
        """
        x, y = data()
        other = network(SGD(0.1, momentum=0.9))
        fit(other, x, y)
        other.save_weights(tmp_path / "other.weights.h5")

        class Load(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                self.model.load_weights(tmp_path / "other.weights.h5")

        model = network(SGD(0.1, momentum=0.9))
        health = TrainingHealth(6, report=silent)
        fit(model, x, y, health, Load())
        fit(other, x, y)
        for ours, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert [record.step for record in health.history] == [12]

    def test_second_fit(self):
        x, y = data(4)
        model = network(SGD(0.1, momentum=0.9))
        wanted, _ = ByHand(momentum=0.9).train(
            model.get_weights(), np.tile(x, (3, 1)), np.tile(y, (3, 1))
        )
        health = TrainingHealth(3, report=silent)
        fit(model, x, y, health)
        fit(model, x, y)
        assert [record.step for record in health.history] == [3]
        fit(model, x, y, health)
        assert [record.step for record in health.history] == [3, 9, 12]
        check_figures(health, wanted)

    def test_fit_that_ends_in_an_exception(self):
        x, y = data(4)

        class Fail(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 2:
                    raise KeyboardInterrupt

        model = network(SGD(0.1))
        wanted, _ = ByHand().train(model.get_weights(), np.tile(x, (2, 1)), np.tile(y, (2, 1)))
        variables = list(map(id, model.trainable_variables))
        health = TrainingHealth(1, report=silent)
        with pytest.raises(KeyboardInterrupt):
            fit(model, x, y, health, Fail())
        assert Probe.of(model.optimizer) is not None
        again = TrainingHealth(1, report=silent)
        steps = int(model.optimizer.iterations)
        fit(model, np.roll(x, -steps * BATCH, 0), np.roll(y, -steps * BATCH, 0), again)
        assert Probe.of(model.optimizer) is None
        assert list(map(id, model.trainable_variables)) == variables
        np.testing.assert_allclose(figures_of(again.history[-1]), wanted[steps + 3], rtol=2e-4)
        with pytest.raises(KeyboardInterrupt):
            fit(model, x, y, health, Fail())
        count = len(model.optimizer.variables)
        health.remove()
        assert len(model.optimizer.variables) == count - 2
        health.remove()  # nothing is left to do
        fit(model, x, y)


class TestOutputs:
    def test_csv(self, tmp_path):
        x, y = data(4)
        model = network(SGD(0.1), metrics=["mae"])
        health = TrainingHealth(2, sample=x, csv=tmp_path / "health.csv", report=silent)
        for _ in range(2):
            fit(model, x, y, health, validation_data=(x, y))
        assert (tmp_path / "health.csv").read_bytes().endswith(b"\n")
        with open(tmp_path / "health.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["step"] for row in rows] == ["2", "4", "6", "8"]
        for row, record in zip(rows, health.history, strict=True):
            assert int(row["epoch"]) == record.epoch
            assert row["train_validation_gap"] == ""
            for scalar in ("loss", "gradient_norm", "layer_gradient_ratio"):
                assert float(row[scalar]) == pytest.approx(getattr(record, scalar), rel=1e-6)
            for figure in ("gradient_norm", "weight_norm", "update_norm"):
                written = [float(row[f"{figure}/{name}"]) for name in health.weights]
                np.testing.assert_allclose(written, getattr(record, f"{figure}s"), rtol=1e-6)
            for figure in ("activation_mean", "activation_std"):
                written = [float(row[f"{figure}/{name}"]) for name in health.inputs]
                np.testing.assert_allclose(written, getattr(record, f"{figure}s"), rtol=1e-6)
        assert len(rows[0]) == 6 + 3 * 4 + 2 * 2

    def test_csv_of_another_model(self, tmp_path):
        path = tmp_path / "health.csv"
        path.write_text("step,epoch\n1,2\n")
        x, y = data(1)
        model = network(SGD(0.1))
        message = error_of(lambda: fit(model, x, y, TrainingHealth(1, csv=path)))
        assert "other columns than this model" in message
        assert Probe.of(model.optimizer) is None
        assert path.read_text() == "step,epoch\n1,2\n"

    @pytest.mark.once
    def test_full_disk_leaves_whole_lines(self, tmp_path):
        """A file may have 700 bytes here; a line has about 260."""
        code = (
            "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "from keras_preact.health.outputs import CsvFile\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))\n"
            "file = CsvFile('health.csv', ['figure'] * 20)\n"
            "try:\n"
            "    for _ in range(9): file.append([1.23456789012] * 20)\n"
            "except OSError as error: print(type(error).__name__)\n"
        )
        result = in_process(code, tmp_path, KERAS_BACKEND=BACKEND)
        assert result == "OSError\n"
        lines = (tmp_path / "health.csv").read_text().splitlines(keepends=True)
        assert len(lines) == 3
        assert all(line.endswith("\n") and line.count(",") == 19 for line in lines)

    def test_tensorboard(self, tmp_path):
        import tensorflow as tf
        from tensorflow.core.util import event_pb2

        x, y = data(4)
        model = network(SGD(0.1), metrics=["accuracy"])
        health = TrainingHealth(2, tensorboard=tmp_path / "events", report=silent)
        fit(model, x, y, health, validation_data=(x[::-1], y))
        [path] = (tmp_path / "events").iterdir()
        written: dict = {}
        for record in tf.data.TFRecordDataset([str(path)]).as_numpy_iterator():
            event = event_pb2.Event.FromString(record)
            for value in event.summary.value:
                written.setdefault(value.tag, []).append(
                    (event.step, float(tf.make_ndarray(value.tensor)))
                )
        ratios = [record.update_ratios[[0, 2]] for record in health.history]
        expected = {
            "health/gradient_norm": [record.gradient_norm for record in health.history],
            "health/layer_gradient_ratio": [
                record.layer_gradient_ratio for record in health.history
            ],
            "health_gradient_norm/first": [
                np.linalg.norm(record.gradient_norms[:2]) for record in health.history
            ],
            "health_update_ratio/min": list(map(min, ratios)),
            "health_update_ratio/median": list(map(np.median, ratios)),
            "health_update_ratio/max": list(map(max, ratios)),
        }
        for tag, values in expected.items():
            assert [step for step, _ in written[tag]] == [2, 4]
            np.testing.assert_allclose([value for _, value in written[tag]], values, rtol=1e-5)
        assert written["health/train_validation_gap"] == [
            (4, pytest.approx(health.gaps[0], abs=1e-6))
        ]
        assert not any(
            "nan" in tag or math.isnan(value) for tag, rows in written.items() for _, value in rows
        )


@pytest.mark.once
class TestRanges:
    def test_table_is_the_guides(self):
        bounds = {name: (row.low, row.high) for name, row in HEALTHY_RANGES.items()}
        assert bounds == {
            "gradient_norm": (0.1, 10),
            "update_ratio": (0.001, 0.01),
            "gradient_weight_ratio": (0.0001, 0.1),
            "layer_gradient_ratio": (0.1, 10),
            "activation_mean": (-0.5, 0.5),
            "activation_std": (0.5, 2),
            "train_validation_gap": (-math.inf, 0.05),
        }

    @pytest.mark.parametrize(
        ("row", "values", "below", "above"),
        [
            (Range("figure", 0.1, 10), [0.1, 0.0999, 10, 10.001, math.nan, math.inf], [1], [3, 5]),
            (Range("figure", 0.1, 10, margin=5), [0.019, 0.021, 49, 51], [0], [3]),
            (Range("figure", -4, -0.5, margin=2), [-8.1, -7.9, -0.26, -0.24], [0], [3]),
        ],
        ids=["bounds belong to the range", "margin", "negative"],
    )
    def test_outside(self, row, values, below, above):
        for side, numbers in (("below", below), ("above", above)):
            assert np.flatnonzero(row.outside(np.array(values), side)).tolist() == numbers


@pytest.mark.once
class TestCauses:
    """Which cause a record shows, from figures that are chosen here."""

    def causes(
        self, *, stuck: bool, now=0.1, highest=0.1, **values: float
    ) -> list[tuple[str, str]]:
        healthy = {
            "gradient_norm": 1.0,
            "update_ratio": 5e-3,
            "gradient_weight_ratio": 0.01,
            "layer_gradient_ratio": 1.0,
        }
        healthy |= {"activation_mean": 0.4, "activation_std": 0.6}
        figures = {
            name: Measured(np.array([value, math.nan]))
            for name, value in (healthy | values).items()
        }
        found = findings.causes(figures, HEALTHY_RANGES, Rates(now, highest), stuck)
        return [(cause.figure, cause.side) for cause in found]

    @pytest.mark.parametrize("stuck", [False, True])
    def test_healthy(self, stuck):
        assert self.causes(stuck=stuck) == []

    def test_learning_rate_before_its_effects(self):
        values = {
            "gradient_norm": 70.0,
            "activation_std": 1e3,
            "activation_mean": 99.0,
            "gradient_weight_ratio": 1e-9,
        }
        first, *_ = self.causes(stuck=True, update_ratio=0.3, layer_gradient_ratio=4e-6, **values)
        assert first == ("update_ratio", "above")
        assert self.causes(stuck=True, **values)[0] == ("activation_std", "above")
        low = {"layer_gradient_ratio": 4e-6, "gradient_norm": 1e-3, "update_ratio": 1e-9}
        assert self.causes(stuck=True, **low) == [(figure, "below") for figure in low]

    @pytest.mark.parametrize(
        "values",
        [
            {"gradient_norm": 1e-3},
            {"gradient_norm": 99.0},
            {"update_ratio": 1e-9},
            {"gradient_weight_ratio": 1e-9},
            {"layer_gradient_ratio": 96.0},
            {"activation_std": 1e-3},
        ],
    )
    def test_no_alarm_in_a_network_that_learns(self, values):
        assert self.causes(stuck=False, **values) == []
        assert len(self.causes(stuck=True, **values)) == 1

    def test_small_updates_are_judged_at_the_highest_rate(self):
        """As in a warm-up, and at the end of a cosine."""
        assert self.causes(stuck=True, update_ratio=1e-6, now=1e-4, highest=0.1) == []
        assert self.causes(stuck=True, update_ratio=1e-6, now=1e-2, highest=0.1) == [
            ("update_ratio", "below")
        ]
        assert self.causes(stuck=True, update_ratio=0.0, now=0.0, highest=0.1) == []

    @pytest.mark.parametrize(
        ("step", "loss", "accuracies", "stuck"),
        [
            (100, 2.3, [0.1], True),
            (100, 2.3, [], True),
            (100, 1.7, [0.1], False),
            (100, 2.3, [0.95], False),
            (100, math.nan, [], True),
            (99, 2.3, [0.1], False),
        ],
    )
    def test_stuck(self, step, loss, accuracies, stuck):
        record = Record(step, 0, loss, *(np.zeros(0),) * 3, math.nan, *(np.zeros(0),) * 2, math.nan)
        assert findings.is_stuck(record, 2.3, accuracies) == stuck

    @pytest.mark.parametrize("warmup", [0, 1, 7, 333, 990])
    @pytest.mark.parametrize("steps", [1, 2, 3, 1000])
    def test_highest_rate(self, warmup, steps):
        def rate(step):
            return (step + 1) / (warmup + 1) if step < warmup else math.cos((step - warmup) / 1000)

        assert findings.highest_rate(rate, steps) == max(map(rate, range(steps)))


class TestMessages:
    ONLY = dict.fromkeys(HEALTHY_RANGES)

    @pytest.fixture(autouse=True)
    def stuck_soon(self, monkeypatch):
        monkeypatch.setattr(findings, "STUCK_UPDATES", 2)

    def messages(
        self, x, y, *, optimizer=None, epochs=1, metrics=(), validation=None, interval=2, **ranges
    ):
        told: list[str] = []
        model = network(optimizer or SGD(1e-6), metrics=list(metrics))
        health = TrainingHealth(interval, sample=x, ranges=self.ONLY | ranges, report=told.append)
        fit(model, x, y, health, epochs=epochs, validation_data=validation)
        return told, health

    @pytest.mark.parametrize("schedule", [False, True])
    def test_learning_rate_that_is_too_high(self, schedule):
        """The highest rate of the run is named, in its first message; what follows is
        an effect of it.
        """
        x, y = data(12)
        rate = (
            kp.schedules.step_schedule(50.0, [9], warmup_steps=4, warmup_learning_rate=2.0)
            if schedule
            else 50.0
        )
        told, health = self.messages(x, y, optimizer=SGD(rate), interval=1, **HEALTHY_RANGES)
        ratio = 100 * np.median(health.history[0].update_ratios[[0, 2]])
        assert told[0].startswith(
            f"Learning rate 50 is too high: weights change by {float(f'{ratio:.2g}'):,g} % per "
            "update "
        )
        better = float(re.fullmatch(r".*\(healthy: below 1 %\)\. Try ([\d.e-]+)\.", told[0])[1])
        assert f"{better:.0e}"[0] in "125"
        wanted = (2.0 if schedule else 50.0) / ratio  # changes weights by 1 %
        assert wanted / 2.51 <= better <= wanted
        assert all(message.startswith("Training diverged in update ") for message in told[1:])
        assert len(told) <= 2

    def test_learning_rate_that_is_too_low(self):
        x, y = (np.tile(array, (4, 1)) for array in data(1))
        told, health = self.messages(
            x, y, optimizer=SGD(1e-6), epochs=2, update_ratio=HEALTHY_RANGES["update_ratio"]
        )
        ratio = 100 * np.median(health.history[1].update_ratios[[0, 2]])
        change = f"{float(f'{ratio:.2g}'):g} %"
        better = float(told[0].split("Try ")[1][:-1])
        assert told == [
            f"Learning rate 1e-06 is too low: weights change by {change} per update (healthy: "
            f"above 0.1 %), and the loss does not fall. Try {better:g}."
        ]
        assert better <= 1e-6 * 0.1 / ratio <= 2.51 * better

    def test_figure_of_the_network_once(self):
        x, y = data(4)
        told, health = self.messages(
            x, 1000 * y, epochs=2, gradient_norm=HEALTHY_RANGES["gradient_norm"]
        )
        norm = health.history[1].gradient_norm  # the first record alone may be chance
        assert told == [
            f"The gradient explodes: gradient norm {norm:.3g} (healthy: below 10), and the loss "
            "does not fall. Lower the learning rate or clip the gradients."
        ]

    def test_what_two_records_show_is_reported_with_its_place(self):
        """In the second epoch the hidden layer's input is out of the range, too:
        nothing is said again.
        """
        x, y = data(4)
        row = Range(
            "mean of a layer's input", -10.0, 0.0, above="shifted", if_above="Shift it back"
        )
        told: list[str] = []
        model = network(SGD(0.0))
        weights = model.get_weights()
        weights[0][:], weights[1][:] = 0, -1  # the hidden layer is 0: its mean is in the range
        model.set_weights(weights)

        class Raise(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 2:
                    self.model.get_layer("first").bias.assign(np.ones(HIDDEN))

        count: list[int] = []
        record = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: count.append(len(told))
        )
        health = TrainingHealth(
            4, sample=np.abs(x), ranges=self.ONLY | {"activation_mean": row}, report=told.append
        )
        fit(model, x, y, health, Raise(), record, epochs=4)
        assert count == [0, 1, 1, 1]
        mean = np.abs(x).mean()
        where = "at first/kernel, outside in 1 of 2 layers"
        assert told == [
            f"shifted: mean of a layer's input {mean:.3g} {where} (healthy: below 0). Shift it "
            "back."
        ]

    def test_units_and_layers(self):
        x = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
        model = kp.models.dense_resnet(12, input_shape=(6,), width=5, classes=3, stacked=True)
        model.compile(SGD(1e-6), CROSS_ENTROPY, **JIT)
        told: list[str] = []
        row = Range("gradient/weight ratio", 1e3, 1e4, below="dead", if_below="Check them")
        health = TrainingHealth(
            1, ranges=self.ONLY | {"gradient_weight_ratio": row}, report=told.append
        )
        fit(model, x, np.arange(8) % 3, health, epochs=3)
        units = len(model.units)
        least = int(
            np.argmin(
                np.where(health._watched.kernels, health.history[2].gradient_weight_ratios, np.inf)
            )
        )
        assert len(told) == 1
        assert (
            f" at {health.weights[least]}, outside in {units + 2} of {units + 2} units and layers "
            "(healthy: " in told[0]
        )
        assert told[0].endswith(", and the loss does not fall. Check them.")

    def test_gap_of_the_accuracy(self):
        """It is reported once it was large for five epochs."""
        x, y = data(4)
        labels = np.eye(OUTPUTS)[(y[:, 0] > y[:, 1]).astype(int)]
        for epochs in (4, 6):
            told, health = self.messages(
                *(x, labels),
                metrics=["accuracy"],
                validation=(x, 1 - labels),
                epochs=epochs,
                train_validation_gap=Range(
                    "gap", -math.inf, -1.5, above="Too much", if_above="Regularise"
                ),
            )
            # the validation labels are the opposite ones
            assert health.gaps[0] == pytest.approx(
                2 * self.accuracy(health.model, x, labels) - 1, abs=1e-6
            )
            expected = (
                f"Too much: gap {health.gaps[4]:.3g}, large for 5 epochs (healthy: below -1.5). "
                "Regularise."
                if epochs > 4
                else None
            )
            assert told == ([expected] if expected else [])
        assert [record.gap for record in health.history[:2]] == [
            pytest.approx(math.nan, nan_ok=True)
        ] * 2
        assert health.history[2].gap == health.gaps[0]

    def test_gap_of_one_good_epoch(self):
        told: list[str] = []
        x, y = data(1)
        health = TrainingHealth(9, ranges={}, report=told.append)
        model = network(SGD(1e-6))

        class Gaps(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                validation = 0.95 if epoch == 3 else 0.5
                health.on_epoch_end(epoch, {"accuracy": 1.0, "val_accuracy": validation})
                assert len(told) == (epoch >= 8)

        fit(model, x, y, health, Gaps(), epochs=10)

    @staticmethod
    def accuracy(model, x, labels):
        return (model.predict_on_batch(x).argmax(1) == labels.argmax(1)).mean()

    def test_gap_of_another_metric_is_relative(self):
        x, y = data(4)
        _, health = self.messages(x, y, metrics=["mae"], validation=(x, y + 1))
        output = health.model.predict_on_batch(x)
        train, validation = np.abs(output - y).mean(), np.abs(output - y - 1).mean()
        assert health.gaps[0] == pytest.approx(abs(validation - train) / train, rel=1e-3)

    def test_no_gap_without_a_metric(self):
        x, y = data(2)
        assert self.messages(x, y, validation=(x, y))[1].gaps == {}


class TestDivergence:
    def two_outputs(self, **losses) -> keras.Model:
        inputs = [keras.Input((3,), name=name) for name in ("x", "z")]
        outputs = {
            name: keras.layers.Dense(2, name=name)(x)
            for name, x in zip(("a", "b"), inputs, strict=True)
        }
        model = keras.Model(inputs, outputs)
        model.compile(SGD(0.01), {"a": "mse", "b": "mse"}, **JIT)
        return model

    def test_of_one_layer(self):
        """From the second of 8 steps on, one of two inputs is not finite, and the
        gradient of the layer behind it.
        """
        x = np.ones((8, 3), "float32")
        z = x.copy()
        z[1:] = np.nan
        targets = {"a": np.zeros((8, 2)), "b": np.zeros((8, 2))}
        told: list[str] = []
        health = TrainingHealth(
            4, ranges=TestMessages.ONLY, stop_on_divergence=True, report=told.append
        )
        model = self.two_outputs()
        steps = []
        count = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: steps.append(batch)
        )
        model.fit(
            [x, z],
            targets,
            batch_size=1,
            shuffle=False,
            verbose=0,
            epochs=3,
            callbacks=[health, count],
        )
        assert steps == [0, 1, 2, 3]
        assert [record.step for record in health.history] == [2]
        assert np.isfinite(health.history[0].gradient_norms).tolist() == [True, True, False, False]
        assert health.divergence == (
            "Learning rate 0.01 is probably too high; training diverged in update 2: the "
            "gradient is not finite in 2 of 4 weights, the first of them b/kernel, and the loss "
            "is nan. Divide it by at least ten, warm up longer, or clip the gradients."
        )
        assert told == [health.divergence]

    def test_is_told_and_does_not_stop_unless_asked(self):
        x, y = data(4)
        y[:] = np.nan
        told: list[str] = []
        model = network(SGD(0.1))
        health = TrainingHealth(1, ranges=TestMessages.ONLY, report=told.append)
        fit(model, x, y, health)
        assert health.divergence is None
        assert [record.step for record in health.history] == [1, 2, 3, 4]
        assert len(told) == 1
        assert told[0].startswith(
            "The data or the initial weights are wrong, with a loss of nan in the first update; "
            "training diverged in update 1: the gradient is not finite in 4 of 4 weights, the "
            "first of them first/"
        )

    @pytest.mark.parametrize("accumulate", [None, 2])
    def test_gradient_norm_above_a_limit(self, accumulate):
        """The third update of the seven has targets far away."""
        steps = accumulate or 1
        x, y = data(7 * steps)
        y[2 * steps * BATCH : 3 * steps * BATCH] = 1e4
        model = network(SGD(1e-3, gradient_accumulation_steps=accumulate))
        health = TrainingHealth(
            5, ranges=TestMessages.ONLY, stop_on_divergence=500.0, report=silent
        )
        wanted, _ = ByHand(1e-3, accumulate=steps).train(model.get_weights(), x, y)
        fit(model, x, y, health)
        assert [record.step for record in health.history] == [3]
        np.testing.assert_allclose(figures_of(health.history[0]), wanted[2], rtol=5e-4)
        assert "training diverged in update 3: the gradient norm is" in health.divergence
        assert "(limit: 500), most of it in second/" in health.divergence
        assert int(model.optimizer.iterations) == 5

    def test_healthy_training_goes_on(self):
        x, y = data(6)
        health = TrainingHealth(2, ranges=TestMessages.ONLY, stop_on_divergence=True, report=silent)
        fit(network(SGD(0.1)), x, y, health)
        assert health.divergence is None
        assert [record.step for record in health.history] == [2, 4, 6]


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"interval": 0}, ("`interval` must be a positive integer", "interval=0")),
            ({"stop_on_divergence": -1.0}, ("a positive gradient norm", "stop_on_divergence=-1.0")),
            (
                {"ranges": {"gradient_nrm": None}},
                ("Did you mean 'gradient_norm'", "ranges='gradient_nrm'"),
            ),
            (
                {"ranges": {"gradient_norm": (0, 1)}},
                ("`kp.health.Range`", "ranges['gradient_norm']=(0, 1)"),
            ),
        ],
    )
    def test_arguments(self, options, words):
        message = error_of(lambda: TrainingHealth(**options))
        for word in words:
            assert word in message

    def test_range_upside_down(self):
        assert "low=1.0, high=0.5" in error_of(lambda: Range("figure", 1.0, 0.5))
        assert "margin=0.5" in error_of(lambda: Range("figure", 0.0, 1.0, margin=0.5))

    def test_folder_that_does_not_exist(self, tmp_path):
        x, y = data(1)
        message = error_of(
            lambda: fit(network(SGD(0.1)), x, y, TrainingHealth(csv=tmp_path / "no" / "health.csv"))
        )
        assert "`csv` must be a file in an existing folder" in message

    def test_two_in_one_fit(self):
        x, y = data(1)
        model = network(SGD(0.1))
        assert "A fit takes one TrainingHealth" in error_of(
            lambda: fit(model, x, y, TrainingHealth(), TrainingHealth())
        )
        health = TrainingHealth(1, report=silent)
        fit(model, x, y, health)
        assert len(health.history) == 1

    def test_missing_tensorboard(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        x, y = data(1)
        with pytest.raises(ImportError, match=r"keras-preact\[training\]"):
            fit(network(SGD(0.1)), x, y, TrainingHealth(tensorboard=tmp_path))


def in_process(code: str, cwd: Path, **environment: str) -> str:
    """Run Python code in a process of its own and return what it prints."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"} | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


#: Trains on two devices and compares with the network by hand, as one device would do it.
DISTRIBUTED = """
{setup}
import numpy as np
from keras_preact.health import TrainingHealth
from tests.keras_preact import test_training_health as tests

x, y = tests.data(4)
with scope:
    model = tests.network(tests.SGD(0.1, momentum=0.9){compiled})
wanted, _ = tests.ByHand(momentum=0.9).train(model.get_weights(), x, y)
health = TrainingHealth(2, sample=x, stop_on_divergence=True, report=tests.silent)
tests.fit(model, x, y, health)
assert [record.step for record in health.history] == [2, 4], health.history
tests.check_figures(health, wanted)
assert np.isfinite(health.history[-1].activation_means).all()
tests.fit(model, x, y)
print("as on one device")
"""

SETUPS = {
    "tensorflow": """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
assert strategy.num_replicas_in_sync == 2
scope = strategy.scope()
""",
    "jax": """
import contextlib
import jax
import keras
assert len(jax.devices()) == 2
keras.distribution.set_distribution(keras.distribution.DataParallel())
scope = contextlib.nullcontext()
""",
}


@pytest.mark.skipif(BACKEND not in SETUPS, reason="Keras distributes on TensorFlow and JAX")
def test_two_devices(tmp_path):
    code = DISTRIBUTED.format(
        setup=SETUPS[BACKEND], compiled=", jit_compile=False" if BACKEND == "tensorflow" else ""
    )
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    assert in_process(code, tmp_path, XLA_FLAGS=flags, KERAS_BACKEND=BACKEND).endswith(
        "as on one device\n"
    )
