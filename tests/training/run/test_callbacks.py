"""Callbacks of a fit: its steps are counted, stopped, recorded and skipped."""

import keras
import numpy as np
import pytest

from tests.own_modules import working_in
from tests.training.calls import error_of, run_train
from training.directory import histories
from training.run.callbacks import (
    Continued,
    Count,
    Diverged,
    FirstLosses,
    Profile,
    StopOnNaN,
    TorchSeeds,
)


class Trained:
    stop_training = False
    steps_per_execution = 1


def steps(callbacks, epochs, per_epoch, losses=None):
    """Call callbacks as a fit does, until they stop it. Yield epoch and batch of each step."""
    for epoch in range(epochs):
        for callback in callbacks:
            callback.on_epoch_begin(epoch)
        for batch in range(per_epoch):
            for callback in callbacks:
                callback.on_train_batch_begin(batch)
            logs = {"loss": 1.0 if losses is None else losses[epoch * per_epoch + batch]}
            for callback in callbacks:
                callback.on_train_batch_end(batch, logs)
            yield epoch, batch


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_stop_on_nan_names_the_step(loss):
    count = Count(2)
    with pytest.raises(Diverged) as raised:
        list(steps([count, StopOnNaN(count)], 3, 2, [1e30, 0, -1e30, loss, loss, loss]))
    assert raised.value.step == 3
    assert raised.value.fault == f"the loss is {loss}"


def test_stop_on_nan_looks_at_the_weights_after_an_epoch():
    """The loss stays finite if an activation turns NaN into 0."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    callback = StopOnNaN(Count(2))
    callback.count.step = 4
    callback.set_model(model)
    callback.on_epoch_end(1, {"loss": 2.3})
    model.layers[0].bias.assign([0.0, np.nan])
    with pytest.raises(Diverged) as raised:
        callback.on_epoch_end(1, {"loss": 2.3})
    assert (raised.value.step, raised.value.fault) == (
        3,
        f"{model.layers[0].bias.path} is not finite",
    )


class TestFirstLosses:
    #: Loss of each step. Keras reports the mean of the epoch so far.
    LOSSES = np.random.default_rng(0).uniform(1, 3, 30)

    def fit(self, path, per_epoch, begin, end):
        """Call the callback as a fit from step `begin` to step `end` does."""
        count = Count(per_epoch, begin)
        callback = FirstLosses(path, count)
        callback.set_model(Trained())
        for step in range(begin, end):
            epoch, batch = divmod(step, per_epoch)
            count.on_epoch_begin(epoch)
            count.on_train_batch_begin(batch)
            count.on_train_batch_end(batch)
            mean = np.mean(self.LOSSES[epoch * per_epoch : step + 1])
            callback.on_train_batch_end(batch, {"loss": np.float32(mean)})

    @pytest.mark.parametrize("stops", [[30], [4, 6, 30], [1, 25, 30]])
    @pytest.mark.parametrize("per_epoch", [3, 7, 30])
    def test_losses_of_single_steps(self, tmp_path, per_epoch, stops):
        """The losses are right if the run is resumed often, also within an epoch, and if it has
        written losses of steps after its last checkpoint.
        """
        path = tmp_path / "first_losses.csv"
        begin = 0
        for end in stops:
            self.fit(path, per_epoch, begin, min(end + 2, 30))
            begin = end
        found = histories.read_table(path)
        assert found["step"].tolist() == list(range(1, 21))
        np.testing.assert_allclose(found["loss"], self.LOSSES[:20], rtol=1e-5)


class Recorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.begun = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.begun.append((self.epoch, batch))


@pytest.mark.backend
@pytest.mark.parametrize(("done", "together"), [(0, 1), (3, 1), (4, 2)])
def test_steps_that_were_done_are_passed_over(done, together):
    """A skipped step reads a batch and does nothing else. Only the first epoch has such
    steps.
    """
    import tensorflow as tf

    if together > 1 and keras.backend.backend() == "torch":
        pytest.skip("Keras runs one step at a time on torch")
    layer = keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(keras.optimizers.SGD(0.5), "mse", steps_per_execution=together, jit_compile=False)
    numbers = np.arange(12, dtype="float32")[:, None, None]
    inputs, targets = np.ones((12, 4, 1), "float32"), np.tile(numbers, (1, 4, 1))
    recorder, restored = Recorder(), []
    fit = {"epochs": 5, "steps": 6, "model": model}
    model.fit(
        tf.data.Dataset.from_tensor_slices((inputs, targets)).repeat(),
        steps_per_epoch=6,
        initial_epoch=3,
        epochs=5,
        shuffle=False,
        verbose=0,
        callbacks=Continued([recorder], done=done, restore=lambda: restored.append(1), **fit),
    )
    batches = [(epoch, batch) for epoch in (3, 4) for batch in range(0, 6, together)]
    assert recorder.begun == [each for each in batches if each >= (3, done)]
    assert len(restored) == (done > 0)
    # a step of gradient descent on (w - target)^2 at rate 0.5 moves w to the target, which is the
    # batch's number
    assert float(model.get_weights()[0][0, 0]) == 11
    assert model.optimizer.iterations == 12 - done


@pytest.mark.backend
@pytest.mark.skipif(keras.backend.backend() != "torch", reason="PyTorch's generator")
def test_torch_random_numbers_follow_from_the_step():
    import torch

    def drawn(seed, process, step):
        TorchSeeds(seed, process, Count(5)).before_step(step)
        return torch.rand(3).tolist()

    assert drawn(1, 0, 7) == drawn(1, 0, 7)
    different = [drawn(1, 0, 7), drawn(2, 0, 7), drawn(1, 1, 7), drawn(1, 0, 8)]
    assert len({tuple(values) for values in different}) == 4


#: `seen` keeps its arguments.
CODE = """
import keras

SEEN = []


def seen(folder):
    return keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: SEEN.append((folder, epoch, sorted(logs)))
    )


def nothing(folder):
    return None


number = 3
"""


@pytest.fixture
def working_directory(tmp_path):
    with working_in(tmp_path, my_callbacks=CODE):
        yield tmp_path


def test_callbacks_of_the_user(working_directory):
    output = run_train(working_directory / "run", "--callbacks my_callbacks:seen --data.holdout 99")
    import my_callbacks

    [(folder, epoch, names)] = my_callbacks.SEEN
    assert (folder, epoch) == (output, 0)
    assert {"loss", "accuracy", "val_accuracy"} <= set(names)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my_callbacks", "must be MODULE:NAME"),
        ("nowhere:seen", "No module named 'nowhere'"),
        ("my_callbacks:unseen", "no attribute 'unseen'"),
        ("my_callbacks:number", "must name a function"),
        ("my_callbacks:nothing", "must return a Keras callback. Received: None"),
    ],
)
def test_names_that_are_not_callbacks(working_directory, capsys, name, words):
    option = f"--callbacks {name}"
    assert words in error_of(capsys, run_train, working_directory / "run", option)


def test_profile_covers_its_steps(tmp_path, monkeypatch):
    events = []

    def start(folder):
        events.append("start")
        return lambda: events.append("stop")

    monkeypatch.setattr("training.run.callbacks._start_profiler", start)
    count = Count(4)
    for epoch, batch in steps([count, Profile(tmp_path, 3, 6, count)], 2, 4):
        events.append(4 * epoch + batch)
    # it stops in step 5, counted from 0
    assert events == [0, 1, "start", 2, 3, 4, "stop", 5, 6, 7]


@pytest.mark.backend
def test_profile(tmp_path):
    run = run_train(tmp_path / "run", "--profile 2 3")
    kinds = {"tensorflow": "*.xplane.pb", "jax": "*.xplane.pb", "torch": "*.pt.trace.json"}
    [record] = (run / "tensorboard").rglob(kinds[keras.backend.backend()])
    assert record.stat().st_size > 1000


@pytest.mark.backend
def test_a_rate_that_a_callback_changes(tmp_path, monkeypatch):
    """history.csv has the rate at the end of each epoch."""

    def halve(folder):
        return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)

    monkeypatch.setattr("training.run.callbacks.find", lambda name: halve)
    constant = "--schedule.kind steps --schedule.drops --schedule.length 66 --lr 0.4 --health 5"
    run = run_train(tmp_path / "run", constant, "--callbacks a:b")
    rates = histories.read_table(run / "history.csv")["learning_rate"]
    np.testing.assert_allclose(rates, [0.2, 0.1, 0.05], rtol=1e-6)
