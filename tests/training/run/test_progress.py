"""Output of a run while it trains: exact lines with a simulated clock, a bar on a
terminal, TensorBoard's files.
"""

import io
import math
import re
import sys

import pytest

from tests.training import calls
from training.cli.terminal import duration
from training.run.progress import Progress


class Training:
    """Calls a `Progress` as `fit` does, with a simulated clock."""

    def __init__(self, stream=None, tensorboard=None, together=1, **options):
        self.now, self.together = 1000.0, together
        self.stream = stream or io.StringIO()
        settings = {"iterations": 12, "epochs": 3, "batch_size": 50, "tensorboard": tensorboard}
        settings |= {"learning_rate": lambda done: 0.1 / (1 + done)} | options
        self.progress = Progress(**settings, stream=self.stream, clock=lambda: self.now)
        self.progress.on_train_begin()

    def epoch(self, epoch, first, count, seconds, *validation, **logs):
        """Run an epoch from step `first` on, with `count` executions of `seconds` each and, if
        it is given, a validation of `validation` seconds.
        """
        self.progress.on_epoch_begin(epoch)
        for step in range(first, first + count * self.together, self.together):
            self.progress.on_train_batch_begin(step)
            self.now += seconds
            trained = {name: value for name, value in logs.items() if "val_" not in name}
            self.progress.on_train_batch_end(step + self.together - 1, trained)
        self.progress.on_test_begin()
        self.now += sum(validation)
        self.progress.on_epoch_end(epoch, logs)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


#: First line elsewhere than on a terminal, because nothing else comes for a while.
COMPILING = "Compiling the first step."


class TestLineOfAnEpoch:
    def test_by_hand(self):
        """The first epoch has a compiling step of 10 s, three steps of 10 s, and 6 s of
        validation. The later epochs are shorter.
        """
        training = Training()
        logs = {"accuracy": 0.25, "loss": 2.0, "val_accuracy": 0.5, "val_loss": 1.23456}
        training.epoch(0, 0, 4, 10.0, 6.0, **logs)
        # images/s: 150 in 30 s. Left: 8 updates, at the rate of the 3 in 36 s since the first one
        metrics = "loss 2.0000, accuracy 25.00 %; held-out loss 1.2346, accuracy 50.00 %"
        line = f"Epoch 1/3: {metrics}; 5 images/s; 1 min 36 s left"
        assert training.lines == [COMPILING, line]
        figures = {"learning_rate": 0.025, "images_per_second": 5.0, "seconds": 46.0}
        assert training.progress.figures == figures
        training.now += 1.0
        training.epoch(1, 0, 4, 1.0, 8.0, loss=1e-5, accuracy=1.0)
        # 4 updates, at the rate of the 7 in 49 s
        last = "Epoch 2/3: loss 1e-05, accuracy 100.00 %; 50 images/s; 28 s left"
        assert training.lines[2:] == [last]
        training.epoch(2, 0, 4, 0.02, loss=math.nan, accuracy=0.0, val_top_5=0.5)
        last = "Epoch 3/3: loss nan, accuracy 0.00 %; held-out top 5 50.00 %; 2,500 images/s"
        assert training.lines[3:] == [last]

    def test_nothing_is_measured_if_the_only_execution_compiles(self):
        training = Training(together=4)
        training.epoch(0, 0, 1, 60.0, loss=1.0)
        assert training.lines == [COMPILING, "Epoch 1/3: loss 1.0000"]
        assert math.isnan(training.progress.figures["images_per_second"])


class TestCounting:
    @pytest.mark.parametrize(("together", "parts"), [(1, 1), (4, 1), (2, 2)])
    def test_executions_of_several_steps_and_updates_of_several_parts(self, together, parts):
        training = Training(together=together, micro_batches=parts)
        for epoch in range(2):
            training.epoch(epoch, 0, 4 * parts // together, 1.0, loss=1.0)
            assert training.progress.updates == 4 * (epoch + 1)
        rate = together * 50 / parts  # an execution takes a second
        assert training.progress.figures["images_per_second"] == pytest.approx(rate)

    def test_resumption_in_the_middle_of_an_epoch(self):
        training = Training(done=14, micro_batches=2)
        training.now += 3.0  # steps that the resumed process repeats
        training.progress.restore({"seconds": 100.0})
        training.epoch(1, 6, 2, 2.0, loss=1.0)
        training.epoch(2, 0, 8, 1.0, loss=0.5)
        assert training.progress.updates == 12
        training.progress.close()
        training.now += 50.0
        assert training.progress.state() == {"seconds": 112.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestTerminal:
    @pytest.fixture
    def training(self, monkeypatch):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "80")
        training = Training(Terminal())
        yield training
        training.progress.close()

    @staticmethod
    def drawn(training) -> str:
        """Return what the bar shows now, without the controls of the terminal."""
        since = len(training.stream.getvalue())
        training.progress._bar.refresh()
        shown = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", training.stream.getvalue()[since:])
        return re.sub("[━╸╺]+", "━", shown).replace("\r", "")

    def test_a_bar_shows_the_run_and_the_figures_of_the_epoch(self, training):
        progress = training.progress
        progress.on_epoch_begin(0)
        assert "Epoch 1/3 ━  0/12 \ncompiling the first step" in self.drawn(training)
        for step in range(3):
            progress.on_train_batch_begin(step)
            training.now += 30.0
            progress.on_train_batch_end(step, {"loss": 1.0})
        shown = self.drawn(training)
        assert "Epoch 1/3 ━  3/12 4 min 30 s left\nloss 1.0000; 1.7 images/s" in shown
        progress.on_test_begin()
        assert "measuring the held-out images" in self.drawn(training)

    def test_messages_appear_and_nothing_of_the_bar_stays(self, training):
        """This is the order of calls after Ctrl-C in the middle of an epoch."""
        output = sys.stdout
        training.progress.on_epoch_begin(0)
        training.progress.report("Health: [bold]hm[/bold]")
        training.progress.close()
        assert "Health: [bold]hm[/bold]\n" in training.stream.getvalue()
        assert training.stream.getvalue().endswith("\x1b[2K")  # the bar's last line is erased
        assert "\x1b[?25h" in training.stream.getvalue()  # the cursor is back
        assert sys.stdout is output


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_elsewhere_only_lines_of_epochs_are_printed(stream, monkeypatch):
    """Elsewhere is a file, or a terminal without control sequences."""
    monkeypatch.setenv("TERM", "dumb")
    training = Training(stream())
    training.epoch(0, 0, 4, 1.0, loss=1.0)
    training.progress.report("Health: " + 99 * "hm ")
    training.progress.on_train_end()
    expected = ["Epoch 1/3: loss 1.0000; 50 images/s; 8 s left", "Health: " + 99 * "hm "]
    assert training.lines == [COMPILING, *expected]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
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
        for tag, found in calls.scalars(folder).items()
    }


def test_tensorboard(tmp_path):
    """An execution has two updates. A record is written after at least three updates."""
    rate = {"learning_rate": lambda done: 0.5 - 0.01 * done}
    training = Training(tensorboard=tmp_path, together=2, interval=3, **rate)
    for epoch, loss in enumerate((2.0, 1.0)):
        training.epoch(epoch, 0, 2, loss, 9.0, loss=loss, accuracy=0.5, val_loss=1 + loss)
    training.progress.on_train_end()
    assert scalars(tmp_path / "train") == {
        "batch_loss": {4: 2.0, 6: 1.0},
        "batch_accuracy": {4: 0.5, 6: 0.5},
        "batch_learning_rate": {4: 0.47, 6: 0.45},  # rates of the fourth and the sixth update
        "batch_images_per_second": {4: 50.0, 6: 100.0},
        "epoch_loss": {0: 2.0, 1: 1.0},
        "epoch_accuracy": {0: 0.5, 1: 0.5},
        "epoch_learning_rate": {0: 0.47, 1: 0.43},
        "epoch_images_per_second": {0: 50.0, 1: 100.0},
    }
    assert scalars(tmp_path / "validation") == {"epoch_loss": {0: 3.0, 1: 2.0}}
