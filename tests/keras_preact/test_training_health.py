"""TrainingHealth: its figures against gradients by hand, the state that it must not
change, its files and its messages.
"""

import csv
import dataclasses
import io
import math
import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.health import HEALTHY_RANGES, HealthRecord, Range, TrainingHealth, findings
from keras_preact.health.activations import Activations
from keras_preact.health.callback import _gap
from keras_preact.health.findings import FigureValues, Rates
from keras_preact.health.outputs import CsvFile
from keras_preact.health.probe import Probe, own_variables
from keras_preact.health.ranges import replaced
from keras_preact.health.weights import Places, WeightPlace
from keras_preact.wrapped_optimizer import unwrapped
from tests.keras_preact.harness import close

BACKEND = keras.backend.backend()
JIT = "auto" if BACKEND == "jax" else False
#: For tests of messages. TestFigures compares the figures of a compiled step.
EAGERLY = {"run_eagerly": BACKEND == "tensorflow"}
FEATURES, HIDDEN, OUTPUTS, BATCH = 4, 5, 2, 8
NAMES = ["first/kernel", "first/bias", "second/kernel", "second/bias"]
SGD = keras.optimizers.SGD
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
#: Ranges with which no figure is judged.
NONE: dict = dict.fromkeys(HEALTHY_RANGES)


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


def dense_network(**options) -> keras.Model:
    model = kp.models.dense_resnet(8, input_shape=(6,), width=5, classes=3, **options)
    model.compile(kp.optimizers.CoupledSGD(0.1), CROSS_ENTROPY, jit_compile=JIT)
    return model


def with_norm(momentum, **options) -> keras.Model:
    norm = keras.layers.BatchNormalization(momentum=momentum, **options)
    model = keras.Sequential([keras.Input((FEATURES,)), norm, keras.layers.Dense(OUTPUTS)])
    model.compile(SGD(1e-6), "mse", **EAGERLY)
    return model


def pretrained(model: keras.Model) -> keras.Model:
    """Return the model with other moving statistics."""
    for layer in model.layers:
        if hasattr(layer, "moving_mean"):
            layer.moving_mean.assign(layer.moving_mean + 0.5)
    return model


def vectors() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(16, 6)).astype("float32")


def fit(model, x, y, *callbacks, **options):
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | options
    return model.fit(x, y, callbacks=list(callbacks), **options)


def gradients(weights, x, y):
    """Gradients of the mean squared error of `relu(x a + b) c + d`, by hand."""
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
    @pytest.mark.backend
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
            first, last = np.linalg.norm(gradient[:2]), np.linalg.norm(gradient[2:])
            np.testing.assert_allclose(record.layer_gradient_ratio, first / last, rtol=2e-4)

    @pytest.mark.backend
    @pytest.mark.parametrize("execution", [1, 4])
    def test_only_at_the_interval(self, execution):
        """With executions of 4, 4 and 3 steps, each records its last step that is a
        multiple of 3.
        """
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
        assert (
            health.history[0].loss != logged.history["loss"][0]
        )  # this is the mean of the epoch so far

    def test_compiled_by_xla(self):
        x, y = data(2)
        model = network(SGD(0.1, momentum=0.9), jit_compile=True)
        wanted, _ = ByHand(momentum=0.9).train(model.get_weights(), x, y)
        health = watch(2, stop_on_divergence=True)
        fit(model, x, y, health)
        compare(health.history[0], wanted[1])

    def test_rows_of_an_embedding_that_are_read_twice(self):
        """TensorFlow's gradient is a list of rows; rows with the same index are added."""
        x = np.array([[1, 1, 2]] * BATCH)
        layer = keras.layers.Embedding(5, 4)
        model = keras.Sequential([keras.Input((3,), dtype="int32"), layer])
        model.compile(SGD(0.1), "mse", jit_compile=JIT)
        embedding = np.array(model.get_weights()[0], "float64")
        health = watch(stop_on_divergence=True)
        fit(model, x, np.ones((BATCH, 3, 4)), health)
        gradient = np.zeros_like(embedding)
        np.add.at(gradient, x, 2 * (embedding[x] - 1) / (BATCH * 3 * 4))
        norm = np.linalg.norm(gradient)
        [record] = health.history
        found = [record.gradient_norms[0], record.update_norms[0]]
        np.testing.assert_allclose(found, [norm, 0.1 * norm], rtol=1e-4)

    @pytest.mark.backend
    def test_mixed_precision(self):
        """The gradients are without the loss scale, which Keras uses for float16 by default."""
        x, y = data(3)
        model = network(SGD(0.1), dtype="mixed_float16", auto_scale_loss=True)
        wanted, _ = ByHand().train(model.get_weights(), x, y)
        health = watch(3)
        fit(model, x, y, health)
        compare(health.history[0], wanted[2], rtol=0.05)

    @pytest.mark.backend
    def test_steps_that_a_loss_scale_skips_do_not_count(self):
        """A loss of about 30 times 2**127 overflows float32; times 2**122 it does not."""
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

    @pytest.mark.backend
    def test_units_of_a_stack_are_those_of_single_units(self):
        x = vectors()
        single = dense_network(stacked=False)
        found = []
        for model in (single, kp.models.stack(single)):
            model.compile(kp.optimizers.CoupledSGD(0.1), CROSS_ENTROPY, **EAGERLY)
            health = watch(2, sample=x)
            fit(model, x, np.arange(16) % 3, health)
            [record] = health.history
            named = {"ratio": record.layer_gradient_ratio}
            for name in ("gradient_norms", "update_norms", "activation_means", "activation_stds"):
                names = health.inputs if name.startswith("activation") else health.weights
                values = zip(names, getattr(record, name), strict=True)
                named |= {f"{name} {place}": value for place, value in values}
            found.append(named)
        assert found[1] == pytest.approx(found[0], rel=1e-3, abs=1e-6)
        first, last = (
            sum(v**2 for k, v in found[0].items() if k.startswith(f"gradient_norms {unit.name}/"))
            for unit in (single.units[0], single.units[-1])
        )
        np.testing.assert_allclose(found[0]["ratio"], np.sqrt(first / last), rtol=1e-4)


def test_names_of_units_inside_other_layers():
    """Weights of a stack are named like weights of single units. Names of weights in other
    layers and nested models begin with those names.
    """

    def part(name):
        inputs = keras.Input((4,))
        unit = kp.ResidualUnit(4, block="dense", name="part")
        stack = kp.LayerStack(kp.ResidualUnit(4, block="dense", name="part_unit2"), 2, name="stack")
        dense = keras.layers.Dense(4, name="dense")
        return keras.Model(inputs, dense(stack(unit(inputs))), name=name)

    class Holder(keras.layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.part = kp.ResidualUnit(4, block="dense", name="part")

        def build(self, shape):
            self.part.build(shape)

        def call(self, x):
            return self.part(x)

    inputs = keras.Input((4,))
    nested = keras.Model(inputs, part("a")(inputs), name="b")
    x = keras.layers.Dense(4, name="dense")(Holder(name="holder")(part("a")(nested(inputs))))
    find = Places(keras.Model(inputs, x))
    places = [place for weight in keras.Model(inputs, x).weights for place in find.of(weight)]
    names = [place.name for place in places]
    assert len(set(names)) == len(names)
    groups = [f"{model}/{name}" for model in ("b/a", "a") for name in ("part", "part_unit2")]
    assert {place.group for place in places if place.in_unit} == {
        *groups,
        *("b/a/part_unit3", "a/part_unit3", "holder/part"),
    }
    outside = {place.group for place in places if not place.in_unit}
    assert outside == {"b/a/dense", "a/dense", "dense"}


def inputs_of(model, sample) -> dict[str, tuple[float, float]]:
    """Mean and deviation of the inputs of a model's weight layers, by name."""
    measure = Activations(model, sample)
    names = [place.name.rsplit("/", 1)[0] for place in measure.places]
    return dict(zip(names, zip(*measure(), strict=True), strict=True))


class TestActivations:
    @pytest.mark.backend
    def test_by_hand_with_the_weights_of_each_record(self):
        x, y = data(2)
        model = network(SGD(0.5))
        health = watch(sample=x)
        weights = [ByHand(0.5).train(model.get_weights(), x[:n], y[:n])[1] for n in (BATCH, None)]
        fit(model, x, y, health)
        assert health.inputs == ["first/kernel", "second/kernel"]
        for record, (a, b, _, _) in zip(health.history, weights, strict=True):
            hidden = np.maximum(x @ a + b, 0)
            close(record.activation_means, [x.mean(), hidden.mean()])
            close(record.activation_stds, [x.std(), hidden.std()])

    def test_moving_statistics_and_dropout_seeds_stay(self):
        model = dense_network(dropout=0.5)
        before = [np.array(variable) for variable in model.variables]
        assert np.isfinite(list(inputs_of(model, vectors()).values())).all()
        for variable, value in zip(model.variables, before, strict=True):
            np.testing.assert_array_equal(np.array(variable), value)

    def test_several_inputs_and_a_layer_that_is_called_twice(self):
        """Only the first call of the layer counts."""
        b, a = (keras.Input((2,), name=name) for name in "ba")
        once, twice = (keras.layers.Dense(2, name=name) for name in ("once", "twice"))
        model = keras.Model({"b": b, "a": a}, [once(b), twice(keras.ops.relu(twice(a)) + 9)])
        found = inputs_of(model, {"a": np.full((4, 2), 1.0), "b": np.full((4, 2), 2.0)})
        assert {name: float(mean) for name, (mean, _) in found.items()} == {"once": 2, "twice": 1}


class TestNothingElseChanges:
    @pytest.mark.backend
    @pytest.mark.parametrize("name", ["averaged", "dynamically scaled"])
    def test_the_optimizer(self, name):
        """During `fit`, callbacks set and read the user's optimizer; after it, the model has
        this optimizer again.
        """
        x, y = data(4)
        model, plain = (network(OPTIMIZERS[name][0]()) for _ in range(2))
        optimizer = model.optimizer
        optimizer.build(model.trainable_variables)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        before = list(map(id, optimizer.variables)), set(vars(optimizer)), set(vars(inner))
        seen = []

        class Look(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                found = self.model.optimizer
                assert found is not optimizer
                assert isinstance(found, keras.optimizers.Optimizer)
                assert unwrapped(found) is inner
                assert list(map(id, own_variables(self.model))) == before[0]
                assert found.get_config() == optimizer.get_config()
                seen.append((float(inner.learning_rate), int(found.iterations)))

        def schedule():
            return keras.callbacks.LearningRateScheduler(lambda epoch: 0.2 * 0.5**epoch)

        fit(plain, x, y, schedule(), epochs=2)
        fit(model, x, y, watch(2), Look(), schedule(), epochs=2)
        assert seen == [(pytest.approx(0.2), 4), (pytest.approx(0.1), 8)]
        assert model.optimizer is optimizer
        after = list(map(id, optimizer.variables)), set(vars(optimizer)), set(vars(inner))
        assert after == before
        for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)

    @pytest.mark.backend
    def test_what_is_saved_and_loaded_in_the_middle(self, tmp_path):
        """A checkpoint of the first epoch resumes as if nothing had been interrupted."""
        x, y = data()
        model, plain, resumed = (network(OPTIMIZERS["dynamically scaled"][0]()) for _ in range(3))
        save = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: model.save(tmp_path / f"{epoch}.keras")
        )
        load = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: resumed.load_weights(tmp_path / "0.keras")
        )
        fit(model, x, y, watch(2), save, epochs=2)
        fit(plain, x, y)
        loaded = keras.saving.load_model(tmp_path / "0.keras")
        for ours, theirs in zip(loaded.optimizer.variables, plain.optimizer.variables, strict=True):
            np.testing.assert_array_equal(np.array(ours), np.array(theirs))
        health = watch(6)
        fit(resumed, x, y, health, load)
        assert [record.step for record in health.history] == [12]
        fit(loaded, x, y)
        for each in (loaded, resumed):
            for ours, theirs in zip(each.get_weights(), model.get_weights(), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-6)

    @pytest.mark.backend
    def test_several_fits_of_which_one_ends_in_an_exception(self):
        x, y = data(4)

        class Fail(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
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
        fit(model, x[BATCH:], y[BATCH:], again)
        compare(again.history[0], wanted[13], rtol=5e-4)
        with pytest.raises(KeyboardInterrupt):
            fit(model, x, y, health, Fail())
        health.remove()
        assert model.optimizer is optimizer


class TestOutputs:
    def test_csv(self, tmp_path):
        x, y = data(4)
        model = network(SGD(0.1), metrics=["mae"], **EAGERLY)
        health = watch(2, sample=x, csv=tmp_path / "health.csv")
        for _ in range(2):
            fit(model, x, y, health, validation_data=(x, y))
        with (tmp_path / "health.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["step"] for row in rows] == ["2", "4", "6", "8"]
        for row, record in zip(rows, health.history, strict=True):
            assert row.pop("train_validation_gap") == ""
            expected = {"step": record.step, "epoch": record.epoch} | record.scalars()
            for names, figures in (
                (health.weights, ("gradient_norm", "weight_norm", "update_norm")),
                (health.inputs, ("activation_mean", "activation_std")),
            ):
                for figure in figures:
                    values = zip(names, getattr(record, f"{figure}s"), strict=True)
                    expected |= {f"{figure}/{name}": value for name, value in values}
            found = {name: float(cell) for name, cell in row.items()}
            assert found == pytest.approx(expected, rel=1e-6)

    def test_full_disk_leaves_whole_lines(self, tmp_path, monkeypatch):
        file = CsvFile(tmp_path / "health.csv", ["a", "b"])
        file.append([1, 2])

        class Full(io.FileIO):
            def write(self, line):
                return super().write(line[:2])

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", lambda path, *_, **__: Full(path, "ab"))
            with pytest.raises(OSError, match="No space left"):
                file.append([3, 4])
        assert (tmp_path / "health.csv").read_bytes() == b"a,b\n1,2\n"

    @pytest.mark.parametrize(
        ("content", "left"),
        [
            (b"step,a\n1,x\n5,y\n6,z\n", b"step,a\n1,x\n5,y\n"),
            (b"step,a\n1,x\n2,", b"step,a\n1,x\n"),  # the last line was not finished
            (b"", b""),
        ],
    )
    def test_rows_after_a_step_are_dropped(self, tmp_path, content, left):
        path = tmp_path / "table.csv"
        path.write_bytes(content)
        path.chmod(0o640)
        CsvFile(path, ["step", "a"]).drop_after(5)
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (left, 0o640)
        CsvFile(tmp_path / "none.csv", ["step", "a"]).drop_after(5)
        assert list(tmp_path.iterdir()) == [path]

    def test_tensorboard(self, tmp_path):
        import tensorflow as tf

        x, y = data(4)
        model = network(SGD(0.1), metrics=["accuracy"], **EAGERLY)
        health = watch(2, tensorboard=tmp_path)
        fit(model, x, y, health, validation_data=(x[::-1], y))
        [path] = tmp_path.iterdir()
        written: dict = {}
        for record in tf.data.TFRecordDataset([str(path)]).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            for value in event.summary.value:
                number = float(tf.make_ndarray(value.tensor))
                written[value.tag, event.step] = pytest.approx(number, rel=1e-5)
        assert written["health/train_validation_gap", 4] == health.gaps[0]
        for record in health.history:
            updates = record.update_ratios[[0, 2]]
            assert written["health/gradient_norm", record.step] == record.gradient_norm
            assert written["health_update_ratio/median", record.step] == np.median(updates)
            first = np.linalg.norm(record.gradient_norms[:2])
            assert written["health_gradient_norm/first", record.step] == first


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


@pytest.mark.parametrize("scaled", [False, True])
def test_muon_takes_larger_steps(scaled):
    optimizer = kp.optimizers.Muon(0.1, weight_decay=None, adam_weight_decay=None)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    assert replaced(None, optimizer)["update_ratio"].high == 0.1
    given = {"update_ratio": HEALTHY_RANGES["update_ratio"]}
    assert replaced(given, optimizer)["update_ratio"].high == 0.01


def causes(*, stuck: bool, now=0.1, highest=0.1, **values: float) -> list[tuple[str, str]]:
    """Return the causes that are found in chosen figures."""
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
    found_causes = findings.causes(figures, HEALTHY_RANGES, Rates(now, highest), stuck)
    return [(cause.figure, cause.side) for cause in found_causes]


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
        ids=str,
    )
    def test_no_alarm_in_a_network_that_learns(self, values):
        assert causes(stuck=False, **values) == []
        assert len(causes(stuck=True, **values)) == len(values)

    def test_small_updates_are_judged_at_the_highest_rate(self):
        """In a warm-up and at the end of a cosine, updates are small."""
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

    @pytest.mark.parametrize("warmup", [0, 1, 333, 990])
    @pytest.mark.parametrize("steps", [1, 3, 1000])
    def test_highest_rate(self, warmup, steps):
        def rate(step):
            return (step + 1) / (warmup + 1) if step < warmup else math.cos((step - warmup) / 1000)

        assert findings.highest_rate(rate, steps) == max(map(rate, range(steps)))

    def test_a_higher_rate_is_proposed(self):
        cause = findings.Cause("update_ratio", "below", if_stuck=True)
        figures = {"update_ratio": FigureValues(np.array([2e-4]))}
        row = HEALTHY_RANGES["update_ratio"]
        text = findings.message(cause, figures, row, Rates(0.1, 0.1))
        for words in ("rate 0.1 is too low", "0.02 %", "loss does not fall", "Try 0.5"):
            assert words in text

    def test_places_of_units_and_layers(self):
        kernels = [("a/k", "a", True), ("a/l", "a", True), ("b/k", "b", True), ("c/k", "c", False)]
        figure = FigureValues(np.array([2, 0.5, 1, 5]), [WeightPlace(*each) for each in kernels])
        cause = findings.Cause("gradient_weight_ratio", "below")
        row = Range("figure", 1.5, 9, below="Dead", if_below="Check")
        text = findings.message(cause, {cause.figure: figure}, row, Rates(0.1, 0.1))
        assert "figure 0.5 at a/l, outside in 2 of 3 units and layers" in text


class TestMessages:
    @pytest.mark.parametrize("schedule", [False, True])
    def test_learning_rate_that_is_too_high(self, schedule):
        """The first message names the highest rate of the run; a later message is about an
        effect of it.
        """
        rate = 50.0
        if schedule:
            rate = kp.schedules.step_schedule(50.0, [9], warmup_steps=4, warmup_learning_rate=2.0)
        messages: list[str] = []
        x, y = data(12)
        health = watch(1, messages.append, sample=x)
        fit(network(SGD(rate), **EAGERLY), x, y, health)
        assert messages[0].startswith("Learning rate 50 is too high: weights change by ")
        better = float(re.fullmatch(r".*\(healthy: below 1 %\)\. Try ([\d.e-]+)\.", messages[0])[1])
        ratio = 100 * np.median(health.history[0].update_ratios[[0, 2]])
        wanted = (2.0 if schedule else 50.0) / ratio  # changes weights by 1 %
        assert wanted / 2.51 <= better <= wanted
        assert all(message.startswith("Training diverged in update ") for message in messages[1:])
        assert len(messages) <= 2

    def test_what_two_records_show_is_reported_with_its_place(self):
        """It is reported only once."""
        x, y = data(4)
        row = Range("mean of an input", -10.0, 0.0, above="shifted", if_above="Shift it back")
        messages: list[str] = []
        count: list[int] = []
        record = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: count.append(len(messages))
        )
        health = watch(4, messages.append, sample=np.abs(x), ranges=NONE | {"activation_mean": row})
        fit(network(SGD(0.0), **EAGERLY), x, y, health, record, epochs=3)
        assert count == [0, 1, 1]
        assert re.match(r"shifted: mean of an input [\d.]+ at (first|second)/kernel", messages[0])

    @pytest.mark.parametrize("stacked", [False, True])
    def test_kernels_that_start_at_zero_are_not_judged(self, stacked):
        """They are the sum of their updates, so that each update is a large part."""
        model = dense_network(stacked=stacked, **kp.models.FIXUP)
        start, (x, y) = model.get_weights(), (np.tile(vectors(), (4, 1)), np.arange(64) % 3)
        messages: list[str] = []
        health = watch(4, messages.append)
        fit(model, x, y, health)
        assert not messages
        assert np.median(health.history[0].update_ratios[health._watched.kernels]) > 0.01
        other = watch(4, messages.append)
        other.restore(health.state())
        fit(model, x, y, other)  # now they are not 0
        assert not messages
        model.set_weights([weight + 1e-3 for weight in start])
        fit(model, x, y, watch(4, messages.append))
        assert [message[:16] for message in messages[:1]] == ["Learning rate 0."]

    def test_gap_of_the_accuracy(self):
        """It is reported after it was large for five epochs."""
        messages: list[str] = []
        health = watch(1, messages.append, ranges={})

        class Gaps(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                validation = 0.95 if epoch == 3 else 0.5
                health.on_epoch_end(epoch, {"accuracy": 1.0, "val_accuracy": validation})
                assert len(messages) == (epoch >= 8)

        fit(network(SGD(1e-6), **EAGERLY), *data(1), health, Gaps(), epochs=10)
        assert health.gaps[0] == 0.5
        gaps = [record.gap for record in health.history[:2]]  # the gap of the epoch before
        np.testing.assert_array_equal(gaps, [math.nan, 0.5])

    @pytest.mark.parametrize(
        ("build", "steps", "share"),
        [
            (lambda: pretrained(with_norm(0.999)), 115, None),
            (lambda: with_norm(0.999), 115, "89 %"),
            (lambda: with_norm(0.99), 100, "37 %"),
            (lambda: with_norm(0.9), 28, "5.2 %"),
            (lambda: with_norm(0.9), 29, None),
            (lambda: with_norm(0.999, trainable=False), 115, None),  # it trains as it infers
            (lambda: network("sgd"), 0, None),
            (lambda: dense_network(stacked=True), 10, "35 %"),
        ],
    )
    def test_moving_statistics_that_are_out_of_date(self, build, steps, share):
        momentum = findings.largest_momentum(build(), only_new=True)
        message = findings.stale_statistics(momentum, steps)
        assert (message and re.search(r": ([\d.]+ %) of them", message)[1]) == share

    @pytest.mark.parametrize(
        ("momentum", "batches", "causes"),
        [
            (0.5, 4, ["activation", "gap"]),
            (0.999, 4, ["old"]),
            # from update 100 on, without a gap
            pytest.param(0.999, 20, ["old"], marks=pytest.mark.soak),
            (0.999, 10, []),
            (None, 4, ["activation", "gap"]),  # a pretrained network
            pytest.param(None, 20, ["activation"], marks=pytest.mark.soak),
        ],
    )
    def test_old_moving_statistics_are_no_overfitting(self, momentum, batches, causes):
        """Nor are activations judged, which are measured at inference."""
        starts = {
            "activation": "shifted",
            "gap": "The network overfits",
            "old": "The moving statistics of the batch normalisation are out of date",
        }
        messages: list[str] = []
        never = Range("mean of an input", 1e6, 2e6, below="shifted", if_below="Shift it back")
        ranges = NONE | {
            "activation_mean": never,
            "train_validation_gap": HEALTHY_RANGES["train_validation_gap"],
        }
        x, y = data(batches)
        health = watch(1, messages.append, sample=x, ranges=ranges)
        gap = 0.5 if batches == 4 else 0.0
        gaps = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: health.on_epoch_end(
                epoch, {"accuracy": 1.0, "val_accuracy": 1.0 - gap}
            )
        )
        model = pretrained(with_norm(0.999)) if momentum is None else with_norm(momentum)
        fit(model, x, y, health, gaps, epochs=6)
        assert [message.split(":")[0] for message in messages] == [starts[each] for each in causes]

    def test_gap_of_another_metric_is_relative(self):
        assert _gap({"loss": 1.0, "val_loss": 9.0, "mae": 2.0, "val_mae": 3.0}) == 0.5
        assert _gap({"loss": 1.0, "val_loss": 9.0}) is None


class TestInput:
    """The range of the sample, after the model's own preprocessing."""

    PIXELS = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 3)).astype("float32")

    def messages(self, sample, *preprocessing) -> list[str]:
        layers = keras.layers
        inputs = x = keras.Input((8, 8, 3))
        for layer in preprocessing:
            x = layer(x)
        x = layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3, name="stem")(x))
        model = keras.Model(inputs, layers.Dense(10)(x))
        model.compile("sgd", CROSS_ENTROPY, **EAGERLY)
        messages: list[str] = []
        fit(model, np.zeros((8, 8, 8, 3)), np.zeros(8), watch(1000, messages.append, sample=sample))
        return messages

    @pytest.mark.parametrize(
        ("preprocessing", "right"),
        [
            ([], 1 / 255),
            ([keras.layers.Rescaling(1 / 127.5, -1.0), keras.layers.ReLU()], 1.0),
        ],
        ids=["none", "rescaling"],
    )
    def test_a_wrong_range_is_reported_first(self, preprocessing, right):
        assert self.messages(self.PIXELS * right, *preprocessing) == []
        assert self.messages(self.PIXELS * 0, *preprocessing) == []  # black images cause no message
        z = wrong = self.PIXELS / 255 / right
        [message] = self.messages(wrong, *preprocessing)
        for layer in preprocessing:
            z = keras.ops.convert_to_numpy(layer(z))
        std = np.sqrt(z.var((0, 1, 2)).mean())
        assert message.startswith("The input has the wrong range")
        assert f"a mean of {z.mean():.3g} and a standard deviation of {std:.3g}" in message


class TestDivergence:
    @pytest.mark.backend
    def test_of_one_layer(self):
        """From the second of 8 steps on, one of two inputs is not finite, so that the gradient
        of the layer after it is not finite either.
        """
        inputs = [keras.Input((3,), name=name) for name in ("x", "z")]
        layers = [keras.layers.Dense(2, name=name) for name in ("a", "b")]
        model = keras.Model(inputs, [layer(x) for layer, x in zip(layers, inputs, strict=True)])
        model.compile(SGD(0.01), ["mse", "mse"], jit_compile=JIT)
        x, z = np.ones((2, 8, 3), "float32")
        z[1:] = np.nan
        messages: list[str] = []
        health = watch(4, messages.append, ranges=NONE, stop_on_divergence=True)
        fit(model, [x, z], [np.zeros((8, 2))] * 2, health, batch_size=1, epochs=3)
        assert int(model.optimizer.iterations) == 4
        assert [record.step for record in health.history] == [2]
        assert np.isfinite(health.history[0].gradient_norms).tolist() == [True, True, False, False]
        assert messages == [health.divergence]
        for words in ("rate 0.01", "in update 2", "2 of 4 weights", "b/kernel", "loss is nan"):
            assert words in health.divergence

    def test_is_reported_and_stops_only_if_asked(self):
        x, y = data(4)
        messages: list[str] = []
        health = watch(1, messages.append, ranges=NONE)
        fit(network(SGD(0.1), **EAGERLY), x, np.full_like(y, np.nan), health)
        assert health.divergence is None
        assert [record.step for record in health.history] == [1, 2, 3, 4]
        [text] = messages
        assert text.startswith("The data or the initial weights are wrong, with a loss of nan")

    @pytest.mark.backend
    def test_gradient_norm_above_a_limit(self):
        """There are seven updates of two batches each. The third has very large targets."""
        x, y = data(14)
        y[4 * BATCH : 6 * BATCH] = 1e4
        model = network(SGD(1e-3, gradient_accumulation_steps=2))
        health = watch(5, ranges=NONE, stop_on_divergence=500.0)
        wanted, _ = ByHand(1e-3, accumulate=2).train(model.get_weights(), x, y)
        fit(model, x, y, health)
        assert [record.step for record in health.history] == [3]
        compare(health.history[0], wanted[2], rtol=5e-4)
        assert "training diverged in update 3: the gradient norm is" in health.divergence
        assert "(limit: 500), most of it in second/" in health.divergence
        assert int(model.optimizer.iterations) == 5


@pytest.mark.backend
@pytest.mark.parametrize("first", [False, True])
def test_a_callback_that_restores_the_model(first, tmp_path):
    """The records are at multiples of the interval, in whatever order the callbacks are."""
    x, y = data(3)

    def steps(epochs):
        health = watch(2)
        backup = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
        callbacks = [health, backup] if first else [backup, health]
        model = network(SGD(0.1))
        model.fit(
            x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks
        )
        return [record.step for record in health.history]

    assert steps(1) == [2]
    assert steps(3) == [4, 6, 8]


def fit_with(*callbacks):
    model = network(SGD(0.1), **EAGERLY)
    try:
        fit(model, *data(1), *callbacks)
    finally:
        for callback in callbacks:
            callback.remove()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda path: watch(0), "interval=0"),
        (lambda path: watch(stop_on_divergence=-1.0), "stop_on_divergence=-1.0"),
        (lambda path: watch(ranges={"gradient_nrm": None}), "Did you mean 'gradient_norm'"),
        (lambda path: watch(ranges={"gradient_norm": (0, 1)}), "ranges['gradient_norm']=(0, 1)"),
        (lambda path: watch(csv=""), "`csv` must be a path. Received: csv=''"),
        (lambda path: watch(tensorboard=True), "`tensorboard` must be a path"),
        (lambda path: Range("figure", 1.0, 0.5), "low=1.0, high=0.5"),
        (lambda path: Range("figure", 0.0, 1.0, margin=0.5), "margin=0.5"),
        (lambda path: fit_with(watch(csv=path / "no/health.csv")), "in an existing folder"),
        (lambda path: fit_with(watch(csv=path / "other.csv")), "other columns than this model"),
        (lambda path: fit_with(watch(), watch()), "Use one TrainingHealth"),
        (lambda path: fit_with(watch(tensorboard=path)), "keras-preact[training]"),
    ],
)
def test_wrong_arguments(call, words, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    (tmp_path / "other.csv").write_text("step,epoch\n1,2\n")
    with pytest.raises((ValueError, ImportError), match=re.escape(words)):
        call(tmp_path)
    assert (tmp_path / "other.csv").read_text() == "step,epoch\n1,2\n"
