"""TrainingHealth: its figures against a network differentiated by hand, what it leaves
behind, what it writes and says.
"""

import csv
import dataclasses
import math
import os
import re
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.health import HEALTHY_RANGES, HealthRecord, Range, TrainingHealth, findings
from keras_preact.health.activations import Activations
from keras_preact.health.findings import FigureValues, Rates
from keras_preact.health.outputs import CsvFile
from keras_preact.health.probe import Probe, own_variables
from keras_preact.health.weights import WeightPlace, places
from tests.keras_preact.harness import close, error_of

pytestmark = pytest.mark.backend

BACKEND = keras.backend.backend()
JIT = "auto" if BACKEND == "jax" else False
#: For what is said of the figures: those of a compiled step are compared in TestFigures.
EAGERLY = {"run_eagerly": BACKEND == "tensorflow"}
ROOT = Path(__file__).parents[2]
FEATURES, HIDDEN, OUTPUTS, BATCH = 4, 5, 2, 8
NAMES = ["first/kernel", "first/bias", "second/kernel", "second/bias"]
SGD = keras.optimizers.SGD
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def watch(interval=1, report=lambda message: None, **options) -> TrainingHealth:
    return TrainingHealth(interval, report=report, **options)


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
    model.compile(optimizer, "mse", **{"jit_compile": JIT, **compiled})
    return model


def dense_network(depth=8, rate=0.1, **options) -> keras.Model:
    model = kp.models.dense_resnet(depth, input_shape=(6,), width=5, classes=3, **options)
    model.compile(kp.optimizers.CoupledSGD(rate), CROSS_ENTROPY, jit_compile=JIT)
    return model


def vectors(rows=16) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, 6)).astype("float32")


def fit(model, x, y, *callbacks, **options):
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | options
    return model.fit(x, y, callbacks=list(callbacks), **options)


def gradients(weights, x, y):
    """Of the mean squared error of `relu(x a + b) c + d`, by hand."""
    a, b, c, d = weights
    z = x @ a + b
    h = np.maximum(z, 0)
    on_output = 2 * (h @ c + d - y) / y.size
    on_z = on_output @ c.T * (z > 0)
    return [x.T @ on_z, on_z.sum(0), h.T @ on_output, on_output.sum(0)]


@dataclasses.dataclass
class ByHand:
    """SGD in NumPy: norms of gradient, weight and update of every step, `(steps, 3,
    weights)`.
    """

    rate: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    coupled: float = 0.0
    decay: float = 0.0
    clipnorm: float | None = None
    accumulate: int = 1

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


def compare(record, figures, rtol=2e-4):
    """Compare a record's norms with `(3, weights)`."""
    norms = np.stack([record.gradient_norms, record.weight_norms, record.update_norms])
    np.testing.assert_allclose(norms, figures, rtol=rtol)


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
        health = watch()
        fit(model, x, y, health)
        assert health.weights == NAMES
        assert [record.step for record in health.history] == list(range(1, len(wanted) + 1))
        for record, figures in zip(health.history, wanted, strict=True):
            compare(record, figures)
            gradient, weight, update = figures
            np.testing.assert_allclose(record.gradient_norm, np.linalg.norm(gradient), rtol=2e-4)
            np.testing.assert_allclose(record.gradient_weight_ratios, gradient / weight, rtol=2e-4)
            np.testing.assert_allclose(record.update_ratios, update / weight, rtol=2e-4)
            layers = [np.linalg.norm(gradient[:2]), np.linalg.norm(gradient[2:])]
            np.testing.assert_allclose(
                record.layer_gradient_ratio, layers[0] / layers[1], rtol=2e-4
            )

    @pytest.mark.parametrize("execution", [1, 4])
    def test_only_at_the_interval(self, execution):
        """Executions of 4, 4, 3 steps: each has its last multiple of 3."""
        if BACKEND == "torch" and execution > 1:
            pytest.skip("Keras has no steps_per_execution on torch")
        x, y = data(11)
        model = network(SGD(0.01, momentum=0.9), steps_per_execution=execution)
        twice = [np.tile(array, (2, 1)) for array in (x, y)]
        wanted, _ = ByHand(0.01, momentum=0.9).train(model.get_weights(), *twice)
        health = watch(3)
        logged = fit(model, x, y, health, epochs=2)
        steps = [(record.step, record.epoch) for record in health.history]
        second = [12, 15, 18, 21] if execution == 1 else [15, 18, 21]
        assert steps == [(3, 0), (6, 0), (9, 0), *((step, 1) for step in second)]
        for record in health.history:
            compare(record, wanted[record.step - 1])
        losses = [record.loss for record in health.history]  # of the epoch so far
        assert losses[0] != logged.history["loss"][0]

    @pytest.mark.skipif(BACKEND == "torch", reason="torch.compile needs a compiler of C++")
    def test_compiled_by_xla(self):
        x, y = data(2)
        model = network(SGD(0.1, momentum=0.9), jit_compile=True)
        wanted, _ = ByHand(momentum=0.9).train(model.get_weights(), x, y)
        health = watch(2, stop_on_divergence=True)
        fit(model, x, y, health)
        compare(health.history[0], wanted[1])

    def test_frozen_weights_are_not_watched(self):
        x, y = data(2)
        model = network("sgd")
        model.get_layer("first").trainable = False
        model.compile(SGD(0.1), "mse", jit_compile=JIT)
        wanted, _ = ByHand().train(model.get_weights(), x, y)
        health = watch()
        fit(model, x, y, health)
        assert health.weights == NAMES[2:]
        compare(health.history[0], wanted[0][:, 2:])

    def test_rows_of_an_embedding_that_are_read_twice(self):
        """Their gradients are added before the norm is taken."""
        x = np.array([[1, 1, 2]] * BATCH)
        layers = [
            keras.layers.Embedding(5, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(OUTPUTS, use_bias=False),
        ]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        model.compile(SGD(0.1), "mse", jit_compile=JIT)
        embedding, kernel = (np.array(weight, "float64") for weight in model.get_weights())
        health = watch(stop_on_divergence=True)
        fit(model, x, np.ones((BATCH, OUTPUTS)), health)
        on_output = 2 * (embedding[x].reshape(BATCH, 12) @ kernel - 1) / (BATCH * OUTPUTS)
        gradient = np.zeros_like(embedding)
        np.add.at(gradient, x, (on_output @ kernel.T).reshape(BATCH, 3, 4))
        norm = np.linalg.norm(gradient)
        found = health.history[0].gradient_norms[0], health.history[0].update_norms[0]
        np.testing.assert_allclose(found, [norm, 0.1 * norm], rtol=1e-4)

    @pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
    def test_mixed_precision(self, dtype):
        """Gradients without the loss scale, which Keras uses for float16 by itself."""
        x, y = data(3)
        model = network(SGD(0.1), dtype=dtype, auto_scale_loss=True)
        wanted, _ = ByHand().train(model.get_weights(), x, y)
        health = watch(3)
        fit(model, x, y, health)
        compare(health.history[0], wanted[2], rtol=0.05)

    def test_steps_that_a_loss_scale_skips_do_not_count(self):
        """A loss of about 30 times 2**127 is too much for float32; 2**122 is not."""
        x, y = data(10)
        scaled = keras.optimizers.LossScaleOptimizer(SGD(0.1), initial_scale=2.0**127)
        model = network(scaled)
        weights = model.get_weights()
        health = watch(3, stop_on_divergence=True)
        fit(model, x, y, health)
        skipped = 10 - int(scaled.inner_optimizer.iterations)
        assert 0 < skipped < 7
        wanted, _ = ByHand().train(weights, x[skipped * BATCH :], y[skipped * BATCH :])
        assert [record.step for record in health.history] == [3, 6, 9][: (10 - skipped) // 3]
        for record in health.history:
            compare(record, wanted[record.step - 1])

    @pytest.mark.soak
    def test_units_of_a_stack_are_those_of_single_units(self):
        x = vectors()
        single = dense_network(12, stacked=False)
        stacked = kp.models.stack(single)
        stacked.compile(kp.optimizers.CoupledSGD(0.1), CROSS_ENTROPY, jit_compile=JIT)
        found = []
        for model in (single, stacked):
            health = watch(2, sample=x)
            fit(model, x, np.arange(16) % 3, health)
            [record] = health.history
            rows = [record.gradient_norms, record.weight_norms, record.update_norms]
            found.append([dict(zip(health.weights, row, strict=True)) for row in rows])
            rows = [record.activation_means, record.activation_stds]
            found[-1] += [dict(zip(health.inputs, row, strict=True)) for row in rows]
            found[-1].append({"ratio": record.layer_gradient_ratio})
        for ours, theirs in zip(*found, strict=True):
            assert ours.keys() == theirs.keys()
            np.testing.assert_allclose(
                [ours[key] for key in ours], [theirs[key] for key in ours], rtol=1e-3, atol=1e-6
            )
        norms, first, last = found[1][0], single.units[0].name, single.units[-1].name
        squares = [
            sum(norm**2 for key, norm in norms.items() if key.startswith(f"{unit}/"))
            for unit in (first, last)
        ]
        np.testing.assert_allclose(
            found[1][-1]["ratio"], np.sqrt(squares[0] / squares[1]), rtol=1e-4
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


def inputs_of(model, sample) -> dict[str, tuple[float, float]]:
    """Mean and deviation of the inputs of a model's weight layers, by name."""
    measure = Activations(model, sample)
    names = [place.name.rsplit("/", 1)[0] for place in measure.places]
    return dict(zip(names, zip(*measure(), strict=True), strict=True))


class TestActivations:
    def test_by_hand_with_the_weights_of_each_record(self):
        x, y = data(2)
        model = network(SGD(0.5))
        health = watch(sample=x)
        weights = [ByHand(0.5).train(model.get_weights(), x[:n], y[:n])[1] for n in (BATCH, None)]
        fit(model, x, y, health)
        assert health.inputs == ["first/kernel", "second/kernel"]
        for record, (a, b, _, _) in zip(health.history, weights, strict=True):
            hidden = np.maximum(x @ a + b, 0)  # after the update
            means, deviations = [x.mean(), hidden.mean()], [x.std(), hidden.std()]
            np.testing.assert_allclose(record.activation_means, means, rtol=1e-4)
            np.testing.assert_allclose(record.activation_stds, deviations, rtol=1e-4)

    def test_inside_units_and_stacks(self):
        """What a unit's first weight reads is relu(x_l), without normalisation; the
        second, relu of the first one's output.
        """
        x = vectors(32)
        model = dense_network(stacked=True, normalization="none")
        found = inputs_of(model, x)
        outputs = keras.Model(model.input, model.unit_outputs).predict_on_batch(x)
        for unit, before in zip(model.units[1:], outputs, strict=False):
            own = {weight.path.split("/branch/")[1]: np.array(weight) for weight in unit.weights}
            read = np.maximum(before, 0)
            for layer in ("dense_1", "dense_2"):
                figures = found[f"{unit.name}/branch/{layer}"]
                close(np.array(figures), np.array([read.mean(), read.std()]), message=unit.name)
                read = np.maximum(read @ own[f"{layer}/kernel"], 0)

    def test_moving_statistics_and_dropout_seeds_stay(self):
        model = dense_network(6, dropout=0.5)
        before = [np.array(variable) for variable in model.variables]
        assert np.isfinite(list(inputs_of(model, vectors()).values())).all()
        for variable, value in zip(model.variables, before, strict=True):
            np.testing.assert_array_equal(np.array(variable), value)

    def test_inside_layers_of_keras_and_of_a_user(self):
        """A layer that is called twice counts once; one that is not called has NaN."""

        class Network(keras.Model):
            def __init__(self):
                super().__init__(name="own")
                self.attention = keras.layers.MultiHeadAttention(2, 4, name="attention")
                self.head = keras.layers.Dense(3, name="head")
                self.unused = keras.layers.Dense(3, name="unused")
                self.unused.build((None, 4))

            def call(self, x):
                x = self.attention(x, x) + x
                return self.head(ops.relu(self.head(x)) + 9)

        ops = keras.ops
        model = Network()
        x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("float32")
        model(x)
        found = {name.removeprefix("own/"): value for name, value in inputs_of(model, x).items()}
        summed = ops.convert_to_numpy(model.attention(x, x)) + x
        for name, read in (("attention/query", x), ("attention/value", x), ("head", summed)):
            np.testing.assert_allclose(found[name], [read.mean(), read.std()], rtol=1e-4)
        assert np.isfinite(found["attention/attention_output"]).all()
        assert np.isnan(found["unused"]).all()

    @pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
    def test_several_inputs(self, names):
        inputs = {name: keras.Input((2,), name=name) for name in names}
        layers = {name: keras.layers.Dense(1, name=f"on_{name}") for name in names}
        both = [layers[name](x) for name, x in inputs.items()]
        sample = {"a": np.full((4, 2), 1.0), "b": np.full((4, 2), 2.0)}
        for given in (inputs, list(inputs.values())):
            found = inputs_of(keras.Model(given, both), sample)
            assert {name: float(mean) for name, (mean, _) in found.items()} == {
                "on_a": 1.0,
                "on_b": 2.0,
            }

    def test_model_that_cannot_be_traced(self):
        class Branching(keras.Model):
            def call(self, x):
                return x if float(x[0, 0]) > 0 else -x

        model = Branching(name="branching")
        model.build((None, 2))
        message = error_of(lambda: Activations(model, np.ones((2, 2), "float32")))
        assert "The graph of 'branching' (Branching) cannot be traced" in message


def check_weights_bit_for_bit():
    x = vectors(24)
    trained = []
    for callbacks in ([], [watch(2, sample=x, stop_on_divergence=1e6)]):
        keras.utils.set_random_seed(3)
        model = dense_network(6, dropout=0.3)
        fit(model, x, np.arange(24) % 3, *callbacks, epochs=2)
        trained.append(list(map(np.array, (*model.variables, *model.optimizer.variables))))
    for plain, watched in zip(*trained, strict=True):
        np.testing.assert_array_equal(watched, plain)
    print("bit for bit")


class TestNothingElseChanges:
    @pytest.mark.soak
    def test_weights_are_the_same_bit_for_bit(self, tmp_path):
        """On JAX in a process with XLA's own settings: those of conftest.py round the
        two programs differently.
        """
        if BACKEND != "jax":
            check_weights_bit_for_bit()
            return
        code = (
            "from tests.keras_preact import test_training_health as tests\n"
            "tests.check_weights_bit_for_bit()"
        )
        assert in_process(code, tmp_path, XLA_FLAGS="").endswith("bit for bit\n")

    @pytest.mark.parametrize("name", ["averaged", "dynamically scaled"])
    def test_the_optimizer(self, name):
        """During `fit` callbacks set and read the user's optimizer; then it is back."""
        x, y = data(4)
        model = network(OPTIMIZERS[name][0]())
        optimizer = model.optimizer
        optimizer.build(model.trainable_variables)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        before = list(map(id, optimizer.variables)), set(vars(optimizer)), set(vars(inner))
        seen = []

        class Look(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                found = self.model.optimizer
                assert found is not optimizer
                assert isinstance(found, type(optimizer))
                assert list(map(id, own_variables(self.model))) == before[0]
                assert found.get_config() == optimizer.get_config()
                seen.append((float(inner.learning_rate), int(found.iterations)))

        schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.2 * 0.5**epoch)
        plain = network(OPTIMIZERS[name][0]())
        fit(plain, x, y, keras.callbacks.LearningRateScheduler(schedule.schedule), epochs=2)
        fit(model, x, y, watch(2), Look(), schedule, epochs=2)
        assert seen == [(pytest.approx(0.2), 4), (pytest.approx(0.1), 8)]
        assert model.optimizer is optimizer
        after = list(map(id, optimizer.variables)), set(vars(optimizer)), set(vars(inner))
        assert after == before
        for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)

    @pytest.mark.parametrize("name", ["momentum", "dynamically scaled"])
    def test_what_is_saved_and_loaded_in_the_middle(self, name, tmp_path):
        """A checkpoint of the first epoch resumes as if nothing had been interrupted."""
        x, y = data()

        class Save(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                self.model.save(tmp_path / f"{epoch}.keras")

        class Load(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                self.model.load_weights(tmp_path / "0.keras")

        model = network(OPTIMIZERS[name][0]())
        fit(model, x, y, watch(2), Save(), epochs=2)
        plain = network(OPTIMIZERS[name][0]())
        fit(plain, x, y)
        plain.save(tmp_path / "plain.keras")
        with (
            zipfile.ZipFile(tmp_path / "0.keras") as ours,
            zipfile.ZipFile(tmp_path / "plain.keras") as theirs,
        ):
            assert len(ours.read("model.weights.h5")) == len(theirs.read("model.weights.h5"))
        loaded = keras.saving.load_model(tmp_path / "0.keras")
        for ours, theirs in zip(loaded.optimizer.variables, plain.optimizer.variables, strict=True):
            np.testing.assert_array_equal(np.array(ours), np.array(theirs))
        resumed = network(OPTIMIZERS[name][0]())
        health = watch(6)
        fit(resumed, x, y, health, Load())
        assert [record.step for record in health.history] == [12]
        fit(loaded, x, y)
        for each in (loaded, resumed):
            for ours, theirs in zip(each.get_weights(), model.get_weights(), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-6)

    def test_several_fits_of_which_one_ends_in_an_exception(self):
        x, y = data(4)

        class Fail(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 2:
                    raise KeyboardInterrupt

        model = network(SGD(0.1, momentum=0.9))
        optimizer = model.optimizer
        many = [np.tile(array, (4, 1)) for array in (x, y)]
        wanted, _ = ByHand(momentum=0.9).train(model.get_weights(), *many)
        health = watch(3)
        fit(model, x, y, health)
        fit(model, x, y)
        fit(model, x, y, health)
        assert [record.step for record in health.history] == [3, 9, 12]
        for record in health.history:
            compare(record, wanted[record.step - 1], rtol=5e-4)
        with pytest.raises(KeyboardInterrupt):
            fit(model, x, y, health, Fail())
        assert Probe.of(model.optimizer) is not None
        again = watch()
        steps = int(model.optimizer.iterations)
        rolled = [np.roll(array, -steps * BATCH, 0) for array in (x, y)]
        fit(model, *rolled, again)
        assert model.optimizer is optimizer
        compare(again.history[0], wanted[steps], rtol=5e-4)
        with pytest.raises(KeyboardInterrupt):
            fit(model, x, y, health, Fail())
        health.remove()
        assert model.optimizer is optimizer
        health.remove()  # nothing is left to do
        fit(model, x, y)


class TestOutputs:
    def test_csv(self, tmp_path):
        x, y = data(4)
        model = network(SGD(0.1), metrics=["mae"], **EAGERLY)
        health = watch(2, sample=x, csv=tmp_path / "health.csv")
        for _ in range(2):
            fit(model, x, y, health, validation_data=(x, y))
        assert (tmp_path / "health.csv").read_bytes().endswith(b"\n")
        with open(tmp_path / "health.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["step"] for row in rows] == ["2", "4", "6", "8"]
        for row, record in zip(rows, health.history, strict=True):
            assert int(row.pop("epoch")) == record.epoch
            assert int(row.pop("step")) == record.step
            assert row.pop("train_validation_gap") == ""
            expected = {
                name: getattr(record, name)
                for name in ("loss", "gradient_norm", "layer_gradient_ratio")
            }
            for names, figures in (
                (health.weights, ("gradient_norm", "weight_norm", "update_norm")),
                (health.inputs, ("activation_mean", "activation_std")),
            ):
                for figure in figures:
                    values = zip(names, getattr(record, f"{figure}s"), strict=True)
                    expected |= {f"{figure}/{name}": value for name, value in values}
            assert {name: float(cell) for name, cell in row.items()} == pytest.approx(
                expected, rel=1e-6
            )

    def test_csv_of_another_model(self, tmp_path):
        path = tmp_path / "health.csv"
        path.write_text("step,epoch\n1,2\n")
        model = network(SGD(0.1))
        message = error_of(lambda: fit(model, *data(1), watch(csv=path)))
        assert "other columns than this model" in message
        assert Probe.of(model.optimizer) is None
        assert path.read_text() == "step,epoch\n1,2\n"

    def test_full_disk_leaves_whole_lines(self, tmp_path):
        """A file may have 800 bytes here; a line has about 280, the header 140."""
        file = CsvFile(tmp_path / "health.csv", ["figure"] * 20)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (800, limits[1]))
        try:
            for _ in range(2):
                file.append([1.23456789012] * 20)
            with pytest.raises(OSError, match="No space left"):
                file.append([1.23456789012] * 20)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        lines = (tmp_path / "health.csv").read_text().splitlines(keepends=True)
        assert len(lines) == 3
        assert all(line.endswith("\n") and line.count(",") == 19 for line in lines)

    def test_tensorboard(self, tmp_path):
        import tensorflow as tf
        from tensorflow.core.util import event_pb2

        x, y = data(4)
        model = network(SGD(0.1), metrics=["accuracy"], **EAGERLY)
        health = watch(2, tensorboard=tmp_path / "events")
        fit(model, x, y, health, validation_data=(x[::-1], y))
        [path] = (tmp_path / "events").iterdir()
        written: dict = {}
        for record in tf.data.TFRecordDataset([str(path)]).as_numpy_iterator():
            event = event_pb2.Event.FromString(record)
            for value in event.summary.value:
                number = float(tf.make_ndarray(value.tensor))
                written.setdefault(value.tag, []).append((event.step, number))
        gap = written.pop("health/train_validation_gap")
        assert gap == [(4, pytest.approx(health.gaps[0], abs=1e-6))]
        ratios = [record.update_ratios[[0, 2]] for record in health.history]
        expected = {
            "health/gradient_norm": [each.gradient_norm for each in health.history],
            "health/layer_gradient_ratio": [each.layer_gradient_ratio for each in health.history],
            "health_gradient_norm/first": [
                np.linalg.norm(each.gradient_norms[:2]) for each in health.history
            ],
            "health_update_ratio/min": list(map(min, ratios)),
            "health_update_ratio/median": list(map(np.median, ratios)),
            "health_update_ratio/max": list(map(max, ratios)),
        }
        for tag, values in expected.items():
            assert [step for step, _ in written[tag]] == [2, 4]
            np.testing.assert_allclose([value for _, value in written[tag]], values, rtol=1e-5)
        assert np.isfinite([value for rows in written.values() for _, value in rows]).all()


def test_ranges_are_those_of_the_guide():
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
        (Range("figure", 0.1, 10), [0.0999, 0.1, 10, 10.001, math.inf, math.nan], [0], [3, 4]),
        (Range("figure", 0.1, 10, margin=5), [0.019, 0.021, 49, 51], [0], [3]),
        (Range("figure", -4, -0.5, margin=2), [-8.1, -7.9, -0.26, -0.24], [0], [3]),
    ],
)
def test_outside_of_a_range(row, values, below, above):
    assert np.flatnonzero(row.outside(np.array(values), "below")).tolist() == below
    assert np.flatnonzero(row.outside(np.array(values), "above")).tolist() == above


def causes(*, stuck: bool, now=0.1, highest=0.1, **values: float) -> list[tuple[str, str]]:
    """Which causes a record shows, from figures that are chosen here."""
    healthy = {
        "gradient_norm": 1.0,
        "update_ratio": 5e-3,
        "gradient_weight_ratio": 0.01,
        "layer_gradient_ratio": 1.0,
        "activation_mean": 0.4,
        "activation_std": 0.6,
    }
    figures = {
        name: FigureValues(np.array([value, math.nan]))
        for name, value in (healthy | values).items()
    }
    found = findings.causes(figures, HEALTHY_RANGES, Rates(now, highest), stuck)
    return [(cause.figure, cause.side) for cause in found]


class TestCauses:
    def test_learning_rate_before_its_effects(self):
        values = {"gradient_norm": 70.0, "activation_std": 1e3, "activation_mean": 99.0}
        first, *_ = causes(stuck=True, update_ratio=0.3, layer_gradient_ratio=4e-6, **values)
        assert first == ("update_ratio", "above")
        assert causes(stuck=True, **values)[0] == ("activation_std", "above")
        values = {"layer_gradient_ratio": 4e-6, "gradient_norm": 1e-3, "update_ratio": 1e-9}
        assert causes(stuck=True, **values) == [(figure, "below") for figure in values]

    @pytest.mark.parametrize(
        "values",
        [
            {},
            {"gradient_norm": 1e-3},
            {"gradient_norm": 99.0},
            {"update_ratio": 1e-9},
            {"gradient_weight_ratio": 1e-9},
            {"layer_gradient_ratio": 96.0},
            {"activation_std": 1e-3},
        ],
    )
    def test_no_alarm_in_a_network_that_learns(self, values):
        assert causes(stuck=False, **values) == []
        assert len(causes(stuck=True, **values)) == len(values)

    def test_small_updates_are_judged_at_the_highest_rate(self):
        """As in a warm-up, and at the end of a cosine."""
        assert causes(stuck=True, update_ratio=1e-6, now=1e-4, highest=0.1) == []
        found = causes(stuck=True, update_ratio=1e-6, now=1e-2, highest=0.1)
        assert found == [("update_ratio", "below")]
        assert causes(stuck=True, update_ratio=0.0, now=0.0, highest=0.1) == []

    @pytest.mark.parametrize(
        ("step", "loss", "accuracies", "stuck"),
        [
            (100, 2.3, [0.1], True),
            (100, 2.3, [], True),
            (100, math.nan, [], True),
            (100, 1.7, [0.1], False),
            (100, 2.3, [0.95], False),
            (99, 2.3, [0.1], False),
        ],
    )
    def test_stuck(self, step, loss, accuracies, stuck):
        nothing = np.zeros(0)
        norms, activations = [nothing] * 3, [nothing] * 2
        record = HealthRecord(step, 0, loss, *norms, math.nan, *activations, math.nan)
        assert findings.is_stuck(record, 2.3, accuracies) == stuck

    @pytest.mark.parametrize("warmup", [0, 1, 7, 333, 990])
    @pytest.mark.parametrize("steps", [1, 2, 3, 1000])
    def test_highest_rate(self, warmup, steps):
        def rate(step):
            return (step + 1) / (warmup + 1) if step < warmup else math.cos((step - warmup) / 1000)

        assert findings.highest_rate(rate, steps) == max(map(rate, range(steps)))

    def test_places_of_units_and_layers(self):
        kernels = [("a/k", "a", True), ("a/l", "a", True), ("b/k", "b", True), ("c/k", "c", False)]
        figure = FigureValues(np.array([2, 0.5, 1, 5]), [WeightPlace(*each) for each in kernels])
        row = Range("figure", 1.5, 9, below="Dead", if_below="Check")
        cause = findings.Cause("gradient_weight_ratio", "below", if_stuck=True)
        text = findings.message(cause, {cause.figure: figure}, row, Rates(0.1, 0.1))
        assert text == (
            "Dead: figure 0.5 at a/l, outside in 2 of 3 units and layers (healthy: above 1.5), and "
            "the loss does not fall. Check."
        )


ONLY: dict = dict.fromkeys(HEALTHY_RANGES)


class TestMessages:
    @pytest.fixture(autouse=True)
    def stuck_soon(self, monkeypatch):
        monkeypatch.setattr(findings, "STUCK_UPDATES", 2)

    def messages(
        self, x, y, *, optimizer=None, epochs=1, metrics=(), validation=None, interval=2, **ranges
    ):
        told: list[str] = []
        model = network(optimizer or SGD(1e-6), metrics=list(metrics), **EAGERLY)
        health = watch(interval, told.append, sample=x, ranges=ONLY | ranges)
        fit(model, x, y, health, epochs=epochs, validation_data=validation)
        return told, health

    @pytest.mark.parametrize("schedule", [False, True])
    def test_learning_rate_that_is_too_high(self, schedule):
        """The highest rate of the run is named, in its first message; what follows is
        an effect of it.
        """
        rate = 50.0
        if schedule:
            rate = kp.schedules.step_schedule(50.0, [9], warmup_steps=4, warmup_learning_rate=2.0)
        told, health = self.messages(*data(12), optimizer=SGD(rate), interval=1, **HEALTHY_RANGES)
        ratio = 100 * np.median(health.history[0].update_ratios[[0, 2]])
        change = f"{float(f'{ratio:.2g}'):,g} %"
        assert told[0].startswith(
            f"Learning rate 50 is too high: weights change by {change} per update "
        )
        better = float(re.fullmatch(r".*\(healthy: below 1 %\)\. Try ([\d.e-]+)\.", told[0])[1])
        assert f"{better:.0e}"[0] in "125"
        wanted = (2.0 if schedule else 50.0) / ratio  # changes weights by 1 %
        assert wanted / 2.51 <= better <= wanted
        assert all(message.startswith("Training diverged in update ") for message in told[1:])
        assert len(told) <= 2

    @pytest.mark.parametrize("scaled", [False, True])
    def test_muon_takes_larger_steps(self, scaled):
        """A fifth of a weight is an alarm with SGD, and none with Muon."""

        def told(share, **ranges):
            """Train with a rate that changes the weights by this share."""
            texts: list[str] = []
            rate = share
            for _ in range(2):  # the change is in proportion to the rate
                optimizer = kp.optimizers.Muon(rate, weight_decay=None, adam_weight_decay=None)
                if scaled:
                    optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
                keras.utils.set_random_seed(0)
                health = watch(1, texts.append, ranges=ranges)
                fit(network(optimizer, **EAGERLY), *data(1), health)
                rate *= share / float(np.median(health.history[0].update_ratios[[0, 2]]))
                texts, last = [], texts
            return [text for text in last if "Learning rate" in text]

        assert told(0.2) == []
        [text] = told(0.8)
        assert "weights change by 80 % per update (healthy: below 10 %)" in text
        [text] = told(0.2, update_ratio=HEALTHY_RANGES["update_ratio"])
        assert "weights change by 20 % per update (healthy: below 1 %)" in text

    def test_learning_rate_that_is_too_low(self):
        x, y = (np.tile(array, (4, 1)) for array in data(1))
        row = {"update_ratio": HEALTHY_RANGES["update_ratio"]}
        told, health = self.messages(x, y, optimizer=SGD(1e-6), epochs=2, **row)
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
        row = {"gradient_norm": HEALTHY_RANGES["gradient_norm"]}
        told, health = self.messages(x, 1000 * y, epochs=2, **row)
        norm = health.history[1].gradient_norm  # the first record alone may be chance
        assert told == [
            f"The gradient explodes: gradient norm {norm:.3g} (healthy: below 10), and the loss "
            "does not fall. Lower the learning rate or clip the gradients."
        ]

    def test_what_two_records_show_is_reported_with_its_place(self):
        """In the third epoch the hidden layer's input is out of the range, too: nothing
        is said again.
        """
        x, y = data(4)
        row = Range("mean of an input", -10.0, 0.0, above="shifted", if_above="Shift it back")
        told: list[str] = []
        model = network(SGD(0.0), **EAGERLY)
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
        health = watch(4, told.append, sample=np.abs(x), ranges=ONLY | {"activation_mean": row})
        fit(model, x, y, health, Raise(), record, epochs=4)
        assert count == [0, 1, 1, 1]
        assert told == [
            f"shifted: mean of an input {np.abs(x).mean():.3g} at first/kernel, outside in 1 of 2 "
            "layers (healthy: below 0). Shift it back."
        ]

    @pytest.mark.parametrize("epochs", [4, 6])
    def test_gap_of_the_accuracy(self, epochs):
        """It is reported once it was large for five epochs."""
        x, y = data(4)
        labels = np.eye(OUTPUTS)[(y[:, 0] > y[:, 1]).astype(int)]
        row = Range("gap", -math.inf, -1.5, above="Too much", if_above="Regularise")
        told, health = self.messages(
            x,
            labels,
            metrics=["accuracy"],
            validation=(x, 1 - labels),  # the opposite labels
            epochs=epochs,
            train_validation_gap=row,
        )
        accuracy = (health.model.predict_on_batch(x).argmax(1) == labels.argmax(1)).mean()
        assert health.gaps[0] == pytest.approx(2 * accuracy - 1, abs=1e-6)
        text = f"Too much: gap {health.gaps[0]:.3g}, large for 5 epochs (healthy: below -1.5). "
        assert told == ([f"{text}Regularise."] if epochs > 4 else [])
        gaps = [record.gap for record in health.history[:3]]
        np.testing.assert_array_equal(gaps, [math.nan, math.nan, health.gaps[0]])

    def test_gap_of_one_good_epoch(self):
        told: list[str] = []
        health = watch(9, told.append, ranges={})

        class Gaps(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                validation = 0.95 if epoch == 3 else 0.5
                health.on_epoch_end(epoch, {"accuracy": 1.0, "val_accuracy": validation})
                assert len(told) == (epoch >= 8)

        fit(network(SGD(1e-6), **EAGERLY), *data(1), health, Gaps(), epochs=10)

    def test_gap_of_another_metric_is_relative(self):
        x, y = data(4)
        _, health = self.messages(x, y, metrics=["mae"], validation=(x, y + 1))
        output = health.model.predict_on_batch(x)
        train, validation = np.abs(output - y).mean(), np.abs(output - y - 1).mean()
        assert health.gaps[0] == pytest.approx(abs(validation - train) / train, rel=1e-3)
        assert self.messages(x, y, validation=(x, y))[1].gaps == {}  # no metric, no gap


class TestInput:
    """The range of the sample, after the model's own preprocessing."""

    PIXELS = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 3)).astype("float32")

    def messages(self, sample, *preprocessing) -> list[str]:
        layers = keras.layers
        inputs = keras.Input((8, 8, 3))
        x = inputs
        for layer in preprocessing:
            x = layer(x)
        x = layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3, name="stem")(x))
        model = keras.Model(inputs, layers.Dense(10)(x))
        model.compile("sgd", CROSS_ENTROPY, **EAGERLY)
        said: list[str] = []
        health = watch(1000, said.append, sample=sample)
        fit(model, np.zeros((8, 8, 8, 3)), np.zeros(8), health)
        return said

    @pytest.mark.parametrize(
        ("preprocessing", "right"),
        [
            ([], 1 / 255),
            ([keras.layers.Normalization(mean=[127.0] * 3, variance=[74.0**2] * 3)], 1.0),
            ([keras.layers.Rescaling(1 / 127.5, -1.0), keras.layers.ReLU()], 1.0),
        ],
        ids=["none", "normalization", "rescaling"],
    )
    def test_a_wrong_range_is_reported_first(self, preprocessing, right):
        assert self.messages(self.PIXELS * right, *preprocessing) == []
        wrong = self.PIXELS / 255 / right
        [message] = self.messages(wrong, *preprocessing)
        z = wrong
        for layer in preprocessing:
            z = keras.ops.convert_to_numpy(layer(z))
        std = np.sqrt(z.var((0, 1, 2)).mean())
        assert message.startswith("The input has the wrong range")
        assert f"a mean of {z.mean():.3g} and a standard deviation of {std:.3g}" in message

    def test_black_images_are_no_reason(self):
        assert self.messages(self.PIXELS * 0, keras.layers.Rescaling(1 / 127.5, -1.0)) == []


class TestDivergence:
    def test_of_one_layer(self):
        """From the second of 8 steps on, one of two inputs is not finite, and the
        gradient of the layer after it.
        """
        inputs = [keras.Input((3,), name=name) for name in ("x", "z")]
        outputs = {
            name: keras.layers.Dense(2, name=name)(x)
            for name, x in zip(("a", "b"), inputs, strict=True)
        }
        model = keras.Model(inputs, outputs)
        model.compile(SGD(0.01), {"a": "mse", "b": "mse"}, jit_compile=JIT)
        x = np.ones((8, 3), "float32")
        z = x.copy()
        z[1:] = np.nan
        targets = {"a": np.zeros((8, 2)), "b": np.zeros((8, 2))}
        told: list[str] = []
        health = watch(4, told.append, ranges=ONLY, stop_on_divergence=True)
        steps = []
        count = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: steps.append(batch)
        )
        fit(model, [x, z], targets, health, count, batch_size=1, epochs=3)
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
        told: list[str] = []
        health = watch(1, told.append, ranges=ONLY)
        fit(network(SGD(0.1), **EAGERLY), x, np.full_like(y, np.nan), health)
        assert health.divergence is None
        assert [record.step for record in health.history] == [1, 2, 3, 4]
        [text] = told
        assert text.startswith(
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
        health = watch(5, ranges=ONLY, stop_on_divergence=500.0)
        wanted, _ = ByHand(1e-3, accumulate=steps).train(model.get_weights(), x, y)
        fit(model, x, y, health)
        assert [record.step for record in health.history] == [3]
        compare(health.history[0], wanted[2], rtol=5e-4)
        assert "training diverged in update 3: the gradient norm is" in health.divergence
        assert "(limit: 500), most of it in second/" in health.divergence
        assert int(model.optimizer.iterations) == 5

    def test_healthy_training_continues(self):
        health = watch(2, ranges=ONLY, stop_on_divergence=True)
        fit(network(SGD(0.1), **EAGERLY), *data(6), health)
        assert health.divergence is None
        assert [record.step for record in health.history] == [2, 4, 6]


class TestErrors:
    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda: watch(0), ("`interval` must be a positive integer", "interval=0")),
            (
                lambda: watch(stop_on_divergence=-1.0),
                ("a positive gradient norm", "stop_on_divergence=-1.0"),
            ),
            (
                lambda: watch(ranges={"gradient_nrm": None}),
                ("Did you mean 'gradient_norm'", "ranges='gradient_nrm'"),
            ),
            (
                lambda: watch(ranges={"gradient_norm": (0, 1)}),
                ("`kp.health.Range`", "ranges['gradient_norm']=(0, 1)"),
            ),
            (lambda: Range("figure", 1.0, 0.5), ("low=1.0, high=0.5",)),
            (lambda: Range("figure", 0.0, 1.0, margin=0.5), ("margin=0.5",)),
            (
                lambda: fit(network(SGD(0.1)), *data(1), watch(csv="no/health.csv")),
                ("`csv` must be a file in an existing folder",),
            ),
            (
                lambda: fit(network(SGD(0.1)), *data(1), watch(), watch()),
                ("A fit takes one TrainingHealth",),
            ),
        ],
    )
    def test_message(self, make, words):
        message = error_of(make)
        for word in words:
            assert word in message

    def test_missing_tensorboard(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        with pytest.raises(ImportError, match=r"keras-preact\[training\]"):
            fit(network(SGD(0.1)), *data(1), watch(tensorboard=tmp_path))


def in_process(code: str, cwd: Path, **environment: str) -> str:
    """Run Python code in a process of its own and return what it prints."""
    environment |= {"PYTHONPATH": str(ROOT), "KERAS_BACKEND": BACKEND, "TF_CPP_MIN_LOG_LEVEL": "3"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | environment,
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
from tests.keras_preact import test_training_health as tests

x, y = tests.data(4)
with scope:
    model = tests.network(tests.SGD(0.1, momentum=0.9){compiled})
wanted, _ = tests.ByHand(momentum=0.9).train(model.get_weights(), x, y)
health = tests.watch(2, sample=x, stop_on_divergence=True)
tests.fit(model, x, y, health)
assert [record.step for record in health.history] == [2, 4], health.history
for record in health.history:
    tests.compare(record, wanted[record.step - 1], rtol=5e-4)
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


@pytest.mark.soak
@pytest.mark.skipif(BACKEND not in SETUPS, reason="Keras distributes on TensorFlow and JAX")
def test_two_devices(tmp_path):
    code = DISTRIBUTED.format(
        setup=SETUPS[BACKEND], compiled=", jit_compile=False" if BACKEND == "tensorflow" else ""
    )
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    assert in_process(code, tmp_path, XLA_FLAGS=flags).endswith("as on one device\n")
