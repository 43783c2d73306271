"""What a run shows while it trains: exact lines from a clock of our own, a bar on a
terminal, TensorBoard's files.
"""

import io
import math
import re
import sys

import keras
import numpy as np
import pytest

from tests.training import commands
from training.progress import Progress
from training.terminal import duration


class Training:
    """Calls a `Progress` as `fit` does, by a clock of its own."""

    def __init__(self, stream=None, tensorboard=None, together=1, **options):
        self.now, self.together = 1000.0, together
        self.stream = stream or io.StringIO()
        settings = {"iterations": 12, "steps_per_epoch": 4, "batch_size": 50}
        settings |= {"learning_rate": lambda done: 0.1 / (1 + done), "tensorboard": tensorboard}
        self.progress = Progress(**settings | options, stream=self.stream, clock=lambda: self.now)

    def steps(self, first: int, count: int, seconds: float, **logs: float) -> None:
        """Run `count` executions from step `first` on, of `seconds` each."""
        for step in range(first, first + count * self.together, self.together):
            self.progress.on_train_batch_begin(step)
            self.now += seconds
            self.progress.on_train_batch_end(step + self.together - 1, logs)

    def epoch(self, epoch: int, first: int, count: int, seconds: float, *validation, **logs):
        """Run an epoch of so many executions, with a validation of so many seconds."""
        self.progress.on_epoch_begin(epoch)
        trained = {name: value for name, value in logs.items() if "val_" not in name}
        self.steps(first, count, seconds, **trained)
        self.progress.on_test_begin()
        self.now += sum(validation)
        self.progress.on_epoch_end(epoch, logs)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


class TestLineOfAnEpoch:
    def test_by_hand(self):
        """A compiling step of 10 s and three of 2 s, 3 s of validation, 1 s of a
        checkpoint; the next epochs alike.
        """
        training = Training()
        progress = training.progress
        progress.on_train_begin()
        progress.on_epoch_begin(0)
        training.steps(0, 1, 10.0, loss=2.5, accuracy=0.1)
        training.steps(1, 3, 2.0, loss=2.0, accuracy=0.25)
        progress.on_test_begin()
        training.now += 3.0
        logs = {"accuracy": 0.25, "loss": 2.0, "val_accuracy": 0.5, "val_loss": 1.23456}
        progress.on_epoch_end(0, logs)
        # images/s: 150 in 6 s; left: 8 updates of 2 s and two validations of 3 s
        said = "loss 2.0000, accuracy 0.2500; held-out loss 1.2346, accuracy 0.5000"
        assert training.lines == [f"Epoch 1/3: {said}; 25 images/s; 22 s left"]
        figures = {"learning_rate": 0.025, "images_per_second": 25.0, "seconds": 19.0}
        assert progress.figures == figures
        training.now += 1.0
        training.epoch(1, 0, 4, 1.0, 5.0, loss=1e-5, accuracy=1.0)
        # 200 images in 4 s; left: 4 updates of (6 s + 4 s) / 7 updates and one pause of (3 s + 5 s)
        # / 2
        assert training.lines[1] == "Epoch 2/3: loss 1e-05, accuracy 1.0000; 50 images/s; 10 s left"
        assert progress.figures["seconds"] == 29.0
        training.epoch(2, 0, 4, 0.02, loss=math.nan, accuracy=0.0, val_top_5=0.5)
        last = "Epoch 3/3: loss nan, accuracy 0.0000; held-out top 5 0.5000; 2,500 images/s"
        assert training.lines[2] == last
        progress.on_train_end()
        assert len(training.lines) == 3
        assert progress.updates == 12

    def test_nothing_is_measured_if_the_only_execution_compiles(self):
        training = Training(together=4)
        training.progress.on_train_begin()
        training.epoch(0, 0, 1, 60.0, loss=1.0)
        assert training.lines == ["Epoch 1/3: loss 1.0000"]
        assert math.isnan(training.progress.figures["images_per_second"])

    def test_last_epoch_that_is_cut_short(self):
        training = Training(iterations=5, held_out="test")
        training.progress.on_train_begin()
        training.epoch(0, 0, 4, 1.0, loss=1.0)
        training.epoch(1, 0, 1, 1.0, loss=0.5, val_loss=0.75)
        assert training.lines[1] == "Epoch 2/2: loss 0.5000; test loss 0.7500; 50 images/s"


class TestCounting:
    @pytest.mark.parametrize(("together", "parts"), [(1, 1), (4, 1), (2, 2)])
    def test_executions_of_several_steps_and_updates_of_several_parts(self, together, parts):
        training = Training(together=together, parts=parts)
        training.progress.on_train_begin()
        executions = 4 * parts // together
        training.epoch(0, 0, executions, 1.0, loss=1.0)
        assert training.progress.updates == 4
        rate = together * 50 / parts  # an execution takes a second
        if executions > 1:
            assert training.progress.figures["images_per_second"] == pytest.approx(rate)
        training.epoch(1, 0, executions, 1.0, loss=1.0)
        assert training.progress.updates == 8
        assert training.progress.figures["images_per_second"] == pytest.approx(rate)
        assert training.progress.seconds == 2 * executions
        assert training.lines[1].endswith(f"; {executions} s left")

    def test_resumption_in_the_middle_of_an_epoch(self):
        training = Training(done=7, parts=2)
        training.progress.restore({"seconds": 100.0})
        training.progress.on_train_begin()
        training.epoch(1, 6, 2, 2.0, loss=1.0)
        assert training.progress.updates == 8
        training.epoch(2, 0, 8, 1.0, loss=0.5)
        assert training.progress.updates == 12
        assert training.progress.state() == {"seconds": 112.0}

    def test_time_goes_on_in_another_process(self):
        first = Training()
        first.progress.on_train_begin()
        first.epoch(0, 0, 4, 2.5, loss=1.0)
        state = first.progress.state()
        second = Training(done=4)
        second.progress.on_train_begin()
        second.now += 3.0  # what was done again counts by the state
        second.progress.restore(state)
        second.epoch(1, 0, 4, 1.0, loss=1.0)
        assert second.progress.figures["seconds"] == 14.0
        second.progress.close()
        second.now += 50.0
        assert second.progress.state() == {"seconds": 14.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestTerminal:
    """A bar on a terminal, drawn by a clock of our own."""

    @pytest.fixture
    def training(self, monkeypatch):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "80")
        training = Training(Terminal(), iterations=400, steps_per_epoch=100)
        yield training
        training.progress.close()

    @staticmethod
    def written(training, since=0) -> str:
        """Return what was written, without the controls of the terminal."""
        return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", training.stream.getvalue()[since:])

    def test_shows_what_is_done_and_how_far(self, training):
        progress = training.progress
        progress.on_train_begin()
        progress.on_epoch_begin(0)
        assert re.search(r"Epoch 1/4 ━+ 0\.0 %\s+compiling the first step", self.written(training))
        since = len(training.stream.getvalue())
        training.steps(0, 100, 1.0, loss=1.0, accuracy=0.5)
        shown = self.written(training, since)
        assert re.search(r"Epoch 1/4 ━+[╸╺]?━+ 25\.0 %, 5 min 0 s left", shown)
        assert "loss 1.0000, accuracy 0.5000; 50 images/s" in shown
        progress.on_test_begin()
        assert "measuring the held-out images" in self.written(training)
        progress.on_epoch_end(0, {"loss": 1.0, "val_loss": 2.0})
        since = len(training.stream.getvalue())
        progress.on_epoch_begin(1)
        training.steps(0, 50, 0.5, loss=0.5)
        # the last validation stays; the rate is that of the last seconds
        shown = self.written(training, since)
        assert "loss 0.5000; held-out loss 2.0000; 100 images/s" in shown

    def test_redraws_at_most_five_times_a_second(self, training):
        training.progress.on_train_begin()
        training.progress.on_epoch_begin(0)
        since = len(training.stream.getvalue())
        training.steps(0, 320, 1 / 64, loss=1.0)
        assert self.written(training, since).count("Epoch 1/4 ") == 24  # in 5 s, every 13 steps

    def test_messages_appear_and_nothing_of_the_bar_stays(self, training):
        """As after Ctrl-C in the middle of an epoch."""
        output = sys.stdout
        training.progress.on_train_begin()
        training.progress.on_epoch_begin(0)
        training.progress.report("Health: [bold]hm[/bold]")
        print("printed")
        assert "Health: [bold]hm[/bold]\n" in self.written(training)
        assert "printed\n" in self.written(training)
        training.progress.close()
        assert training.stream.getvalue().endswith("\x1b[2K")  # the bar's last line is erased
        assert "\x1b[?25h" in training.stream.getvalue()  # the cursor is back
        assert sys.stdout is output


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_elsewhere_there_are_lines_of_epochs_alone(stream, monkeypatch):
    """In a file, and on a terminal without controls."""
    monkeypatch.setenv("TERM", "dumb")
    training = Training(stream())
    training.progress.on_train_begin()
    training.epoch(0, 0, 4, 1.0, loss=1.0)
    training.progress.report("Health: hm")
    training.progress.on_train_end()
    expected = "Epoch 1/3: loss 1.0000; 50 images/s; 8 s left\nHealth: hm\n"
    assert training.stream.getvalue() == expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (3599.6, "1 h 0 min"),
        (86399, "23 h 59 min"),
        (273600, "3 d 4 h"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def scalars(folder) -> dict[str, dict[int, float]]:
    return {
        tag: {step: round(value, 6) for step, value in found}
        for tag, found in commands.scalars(folder).items()
    }


class TestTensorBoard:
    def test_scalars(self, tmp_path):
        rate = {"learning_rate": lambda done: 0.5 - 0.01 * done}
        training = Training(tensorboard=tmp_path, interval=3, **rate)
        training.progress.on_train_begin()
        for epoch, loss in enumerate((2.0, 1.0)):
            training.epoch(epoch, 0, 4, loss, 9.0, loss=loss, accuracy=0.5, val_loss=1 + loss)
        training.progress.on_train_end()
        assert scalars(tmp_path / "train") == {
            "batch_loss": {3: 2.0, 6: 1.0},
            "batch_accuracy": {3: 0.5, 6: 0.5},
            "batch_learning_rate": {3: 0.48, 6: 0.45},  # those of the third and of the sixth update
            # of the two after the first; of one of 2 s and two of 1 s
            "batch_images_per_second": {3: 25.0, 6: 37.5},
            "epoch_loss": {0: 2.0, 1: 1.0},
            "epoch_accuracy": {0: 0.5, 1: 0.5},
            "epoch_learning_rate": {0: 0.47, 1: 0.43},
            "epoch_images_per_second": {0: 25.0, 1: 50.0},
        }
        assert scalars(tmp_path / "validation") == {"epoch_loss": {0: 3.0, 1: 2.0}}

    def test_interval_that_an_execution_goes_over(self, tmp_path):
        training = Training(tensorboard=tmp_path, together=2, interval=5)
        training.progress.on_train_begin()
        for epoch in range(3):
            training.epoch(epoch, 0, 2, 1.0, loss=1.0)
        training.progress.on_train_end()
        assert list(scalars(tmp_path / "train")["batch_loss"]) == [6, 10]

    def test_names_are_those_of_keras(self, tmp_path):
        """Keras' own callback beside ours, in one fit: the same tags, steps and values."""
        x, y = np.random.default_rng(0).normal(size=(32, 4)).astype("float32"), np.arange(32) % 3
        options = {"tensorboard": tmp_path / "ours", "learning_rate": lambda _: 0.5}
        ours = Progress(8, 4, 8, **options, interval=1, stream=io.StringIO())
        theirs = keras.callbacks.TensorBoard(tmp_path / "theirs", write_graph=False, update_freq=1)
        fit = {"batch_size": 8, "epochs": 2, "validation_data": (x, y), "verbose": 0}
        small_model().fit(x, y, **fit, callbacks=[ours, theirs])
        common = {"epoch_loss", "epoch_accuracy"}
        for folder, tags in (("validation", common), ("train", common | {"epoch_learning_rate"})):
            mine, own = (scalars(tmp_path / name / folder) for name in ("ours", "theirs"))
            assert {tag: mine[tag] for tag in tags} == {tag: own[tag] for tag in tags}
        assert set(mine["batch_loss"]) == set(range(1, 9))


def small_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5), loss, metrics=["accuracy"], steps_per_execution=1)
    return model


def test_model_and_logs_are_left_alone():
    """On JAX, to take the model would bring its state to where it is read, step by step."""

    class Untouched(Progress):
        @property
        def model(self):
            raise AssertionError("the model was touched")

        def on_train_batch_end(self, batch, logs=None):
            before = dict(logs)
            super().on_train_batch_end(batch, logs)
            assert dict(logs) == before

    x, y = np.random.default_rng(0).normal(size=(32, 4)).astype("float32"), np.arange(32) % 3
    options = {"tensorboard": None, "learning_rate": lambda _: 0.5, "stream": io.StringIO()}
    progress = Untouched(4, 4, 8, **options)
    history = small_model().fit(x, y, batch_size=8, verbose=0, callbacks=[progress])
    assert progress.updates == 4
    assert list(history.history) == ["accuracy", "loss"]
