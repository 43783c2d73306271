"""What a run shows while it trains: exact lines from a clock of our own, the cells of a
terminal, TensorBoard's files.
"""

import contextlib
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


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Training:
    """Calls a `Progress` as `fit` does."""

    def __init__(self, stream=None, tensorboard=None, together=1, **options):
        self.clock = Clock()
        self.stream = io.StringIO() if stream is None else stream
        settings = {
            "iterations": 12,
            "steps_per_epoch": 4,
            "batch_size": 50,
            "learning_rate": lambda done: 0.1 / (1 + done),
        }
        self.progress = Progress(
            **settings | options, tensorboard=tensorboard, stream=self.stream, clock=self.clock
        )
        self.together = together

    def steps(self, first: int, count: int, seconds: float, **logs: float) -> None:
        """Run `count` executions from step `first` on, of `seconds` each."""
        for step in range(first, first + count * self.together, self.together):
            self.progress.on_train_batch_begin(step)
            self.clock.now += seconds
            self.progress.on_train_batch_end(step + self.together - 1, logs)

    def validation(self, seconds: float) -> None:
        self.progress.on_test_begin()
        self.clock.now += seconds

    def epoch(
        self,
        epoch: int,
        first: int,
        count: int,
        seconds: float,
        validation: float = 0.0,
        pause=0.0,
        **logs,
    ) -> None:
        self.progress.on_epoch_begin(epoch)
        self.steps(
            first,
            count,
            seconds,
            **{name: value for name, value in logs.items() if "val_" not in name},
        )
        self.validation(validation)
        self.progress.on_epoch_end(epoch, logs)
        self.clock.now += pause  # other callbacks: checkpoints

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
        training.validation(3.0)
        progress.on_epoch_end(
            0, {"accuracy": 0.25, "loss": 2.0, "val_accuracy": 0.5, "val_loss": 1.23456}
        )
        # images/s: 150 in 6 s; left: 8 updates of 2 s and two validations of 3 s
        assert training.lines == [
            "Epoch 1/3: loss 2.0000, accuracy 0.2500; held-out loss 1.2346, accuracy 0.5000; 25 "
            "images/s; 22 s left"
        ]
        assert progress.figures == {
            "learning_rate": 0.025,
            "images_per_second": 25.0,
            "seconds": 19.0,
        }
        training.clock.now += 1.0
        training.epoch(1, 0, 4, 1.0, 5.0, loss=1e-5, accuracy=1.0)
        # 200 images in 4 s; left: 4 updates of (6 s + 4 s) / 7 updates and one pause of (3 s + 5 s)
        # / 2
        assert training.lines[1] == "Epoch 2/3: loss 1e-05, accuracy 1.0000; 50 images/s; 10 s left"
        assert progress.figures["seconds"] == 29.0
        training.epoch(2, 0, 4, 0.02, loss=math.nan, accuracy=0.0, val_top_5=0.5)
        assert (
            training.lines[2]
            == "Epoch 3/3: loss nan, accuracy 0.0000; held-out top 5 0.5000; 2,500 images/s"
        )
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
    @pytest.mark.parametrize(
        ("together", "parts"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]
    )
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

    @pytest.mark.parametrize(("first", "parts"), [(3, 1), (6, 2)])
    def test_resumption_in_the_middle_of_an_epoch(self, first, parts):
        training = Training(done=7, parts=parts)
        training.progress.restore({"seconds": 100.0})
        training.progress.on_train_begin()
        training.epoch(1, first, parts, 2.0, loss=1.0)
        assert training.progress.updates == 8
        training.epoch(2, 0, 4 * parts, 1.0, loss=0.5)
        assert training.progress.updates == 12
        assert training.progress.state() == {"seconds": 100.0 + 6 * parts}

    def test_time_goes_on_in_another_process(self):
        first = Training()
        first.progress.on_train_begin()
        first.epoch(0, 0, 4, 2.5, loss=1.0)
        state = first.progress.state()
        second = Training(done=4)
        second.progress.on_train_begin()
        second.clock.now += 3.0  # what was done again counts by the state
        second.progress.restore(state)
        second.epoch(1, 0, 4, 1.0, loss=1.0)
        assert second.progress.figures["seconds"] == 14.0
        second.progress.close()
        second.clock.now += 50.0
        assert second.progress.state() == {"seconds": 14.0}


class Screen:
    """The cells of a terminal, from what was written to it: the few controls that a bar
    uses.
    """

    def __init__(self, text: str, width: int):
        self.rows, self.row, self.column, self.width = [""], 0, 0, width
        self.hidden = False
        for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]", text):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self._down()
                self.column = 0
            elif part in ("\x1b[?25l", "\x1b[?25h"):
                self.hidden = part.endswith("l")
            elif part.endswith("A"):
                self.row -= int(part[2:-1])
            elif part == "\x1b[2K":
                self.rows[self.row] = ""
            else:
                assert part[-1] == "m" or len(part) == 1, part  # colours, and text
                if len(part) == 1:
                    self._write(part)

    def _down(self) -> None:
        self.row += 1
        self.rows += [""] * (self.row + 1 - len(self.rows))

    def _write(self, character: str) -> None:
        if self.column == self.width:
            self._down()
            self.column = 0
        line = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = line[: self.column] + character + line[self.column + 1 :]
        self.column += 1

    @property
    def lines(self) -> list[str]:
        return [row.rstrip() for row in self.rows if row.strip()]


class TestTerminal:
    """A terminal, by a clock of our own."""

    @contextlib.contextmanager
    def training(self, width=80, kind="xterm", **options):
        """Give a `Training` on a terminal, and a function that returns the screen at
        any time.
        """
        with terminal(width, kind) as stream:
            training = Training(stream, **options)
            try:
                yield training, lambda: Screen(stream.getvalue(), width)
            finally:
                training.progress.close()

    def test_what_is_shown_from_the_first_step_to_the_next_epoch(self):
        with self.training() as (training, screen):
            progress = training.progress
            progress.on_train_begin()
            progress.on_epoch_begin(0)
            assert screen().lines == [f"Epoch 1/3 {'━' * 64} 0.0 %", "compiling the first step"]
            assert screen().hidden
            training.steps(0, 2, 1.0, loss=1.0, accuracy=0.5)
            first, second = screen().lines
            assert re.fullmatch(r"Epoch 1/3 ━+[╸╺]━+ 16\.7 %, 10 s left", first)
            assert len(first) == 80
            assert second == "loss 1.0000, accuracy 0.5000; 50 images/s"
            training.steps(2, 2, 1.0, loss=1.0, accuracy=0.5)
            progress.on_test_begin()
            assert screen().lines[1:] == ["measuring the held-out images"]
            progress.on_epoch_end(
                0, {"loss": 1.0, "accuracy": 0.5, "val_loss": 2.0, "val_accuracy": 0.25}
            )
            progress.on_epoch_begin(1)
            training.steps(0, 1, 1.0, loss=0.5, accuracy=0.75)
            line, _, figures = screen().lines
            assert (
                line
                == "Epoch 1/3: loss 1.0000, accuracy 0.5000; held-out loss 2.0000, accuracy 0.2500"
            )
            # those of the last validation stay
            held_out = "held-out loss 2.0000, accuracy 0.2500"
            assert figures == f"loss 0.5000, accuracy 0.7500; {held_out}; 50 images/s"

    def test_redraws_at_most_five_times_a_second(self):
        with self.training(iterations=4000, steps_per_epoch=1000) as (training, screen):
            training.progress.on_train_begin()
            training.progress.on_epoch_begin(0)
            before = training.stream.getvalue().count("Epoch 1/4 ")
            training.steps(0, 320, 1 / 64, loss=1.0, accuracy=0.5)
            drawn = training.stream.getvalue().count("Epoch 1/4 ") - before
            assert drawn == 24  # in 5 s, every 13 steps
            assert screen().lines[1] == "loss 1.0000, accuracy 0.5000; 3,200 images/s"

    def test_images_per_second_are_those_of_the_last_seconds(self):
        with self.training(iterations=4000, steps_per_epoch=1000) as (training, screen):
            training.progress.on_train_begin()
            training.progress.on_epoch_begin(0)
            training.steps(0, 100, 1.0, loss=1.0)
            training.steps(100, 100, 0.5, loss=1.0)
            assert screen().lines[1] == "loss 1.0000; 100 images/s"

    def test_messages_and_what_others_print_appear_above_the_bar(self):
        with self.training() as (training, screen):
            training.progress.on_train_begin()
            training.progress.on_epoch_begin(0)
            training.steps(0, 2, 1.0, loss=1.0)
            training.progress.report("Health: [bold]hm[/bold]")
            print("printed")
            print("to stderr", file=sys.stderr)
            assert screen().lines[:3] == ["Health: [bold]hm[/bold]", "printed", "to stderr"]
            assert screen().lines[3].startswith("Epoch 1/3 ━")
            assert screen().lines[4:] == ["loss 1.0000; 50 images/s"]

    def test_nothing_of_the_bar_stays(self):
        """As after Ctrl-C in the middle of an epoch."""
        output = sys.stdout
        with self.training() as (training, screen):
            training.progress.on_train_begin()
            training.epoch(0, 0, 4, 1.0, loss=1.0)
            training.progress.on_epoch_begin(1)
            training.steps(0, 2, 1.0, loss=1.0)
            training.progress.close()
            training.stream.write("Interrupted.\n")
            assert screen().lines == ["Epoch 1/3: loss 1.0000", "Interrupted."]
            assert not screen().hidden
            assert sys.stdout is output

    @pytest.mark.parametrize("width", [60, 40])
    def test_narrow(self, width):
        with self.training(width=width) as (training, screen):
            training.progress.on_train_begin()
            training.epoch(0, 0, 4, 1.0, loss=1.0, accuracy=0.5, val_loss=2.0, val_accuracy=0.25)
            training.progress.on_epoch_begin(1)
            for first in (0, 1, 2):
                training.steps(first, 1, 1.0, loss=0.5, accuracy=0.75)
                lines = screen().lines
                assert max(map(len, lines)) <= width
                text = " ".join(line for line in lines if "━" not in line)
                held_out = "held-out loss 2.0000, accuracy 0.2500"
                figures = f"loss 0.5000, accuracy 0.7500; {held_out}; 50 images/s"
                before = f"Epoch 1/3: loss 1.0000, accuracy 0.5000; {held_out}"
                assert text == f"{before} {figures}"
                [bar] = (line for line in lines if "━" in line)
                assert re.fullmatch(
                    rf"Epoch 2/3 [━╸╺]+ {100 * (5 + first) / 12:.1f} %, \d s left", bar
                )

    def test_a_terminal_without_controls_gets_lines(self):
        with self.training(kind="dumb") as (training, screen):
            training.progress.on_train_begin()
            training.epoch(0, 0, 4, 1.0, loss=1.0)
            assert screen().lines == ["Epoch 1/3: loss 1.0000; 50 images/s; 8 s left"]


def test_elsewhere_there_are_lines_of_epochs_alone():
    training = Training()
    training.progress.on_train_begin()
    training.epoch(0, 0, 4, 1.0, loss=1.0)
    training.progress.report("Health: hm")
    training.progress.on_train_end()
    assert (
        training.stream.getvalue() == "Epoch 1/3: loss 1.0000; 50 images/s; 8 s left\nHealth: hm\n"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *(
            (0, "0 s"),
            (0.4, "0 s"),
            (59.4, "59 s"),
            (59.6, "1 min 0 s"),
            (100, "1 min 40 s"),
            (3599.6, "1 h 0 min"),
        ),
        *((7500, "2 h 5 min"), (86399, "23 h 59 min"), (273600, "3 d 4 h")),
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
        training = Training(
            tensorboard=tmp_path, interval=3, learning_rate=lambda done: 0.5 - 0.01 * done
        )
        progress = training.progress
        progress.on_train_begin()
        for epoch in range(2):
            training.epoch(
                epoch, 0, 4, 2.0 - epoch, 9.0, loss=2.0 - epoch, accuracy=0.5, val_loss=3.0 - epoch
            )
        progress.on_train_end()
        assert scalars(tmp_path / "train") == {
            "batch_loss": {3: 2.0, 6: 1.0},
            "batch_accuracy": {3: 0.5, 6: 0.5},
            "batch_learning_rate": {3: 0.48, 6: 0.45},  # those of the third and of the sixth update
            "batch_images_per_second": {
                3: 25.0,
                6: 37.5,
            },  # of the two after the first; of one of 2 s and two of 1 s
            "epoch_loss": {0: 2.0, 1: 1.0},
            "epoch_accuracy": {0: 0.5, 1: 0.5},
            "epoch_learning_rate": {0: 0.47, 1: 0.43},
            "epoch_images_per_second": {0: 25.0, 1: 50.0},
        }
        assert scalars(tmp_path / "validation") == {"epoch_loss": {0: 3.0, 1: 2.0}}

    @pytest.mark.parametrize(
        ("together", "interval", "steps"), [(4, 3, [4, 8, 12]), (2, 5, [6, 10]), (1, 100, [])]
    )
    def test_interval_that_an_execution_goes_over(self, tmp_path, together, interval, steps):
        training = Training(tensorboard=tmp_path, together=together, interval=interval)
        training.progress.on_train_begin()
        for epoch in range(3):
            training.epoch(epoch, 0, 4 // together, 1.0, loss=1.0)
        training.progress.on_train_end()
        assert list(scalars(tmp_path / "train").get("batch_loss", {})) == steps

    def test_no_folder_for_what_was_not_measured(self, tmp_path):
        training = Training(tensorboard=tmp_path)
        training.progress.on_train_begin()
        training.epoch(0, 0, 4, 1.0, loss=1.0)
        training.progress.on_train_end()
        assert [path.name for path in tmp_path.iterdir()] == ["train"]

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
    """The callback takes nothing from the model: on JAX that would bring its state to
    where it is read, step by step.
    """
    x, y = np.random.default_rng(0).normal(size=(32, 4)).astype("float32"), np.arange(32) % 3
    seen = []

    class Untouched(Progress):
        @property
        def model(self):
            raise AssertionError("the model was touched")

        def on_train_batch_end(self, batch, logs=None):
            seen.append(dict(logs))
            super().on_train_batch_end(batch, logs)
            assert dict(logs) == seen[-1]

    progress = Untouched(
        4, 4, 8, tensorboard=None, learning_rate=lambda _: 0.5, stream=io.StringIO()
    )
    history = small_model().fit(x, y, batch_size=8, verbose=0, callbacks=[progress])
    assert len(seen) == 4
    assert list(history.history) == ["accuracy", "loss"]


@pytest.mark.parametrize("width", [100, 46])
def test_a_fit_on_a_terminal(width):
    """Its steps take a twentieth of a second by the clock."""
    x, y = np.zeros((160, 4), "float32"), np.zeros(160, "int32")
    clock = iter(range(10_000))
    with terminal(width) as stream:
        progress = Progress(
            *(40, 20, 8),
            tensorboard=None,
            learning_rate=lambda _: 0.01,
            stream=stream,
            clock=lambda: next(clock) / 20,
        )
        small_model().fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[progress])
        stream.write("after it\n")
    assert stream.getvalue().count("Epoch 2/2 \x1b[") > 3
    first, second, last = Screen(stream.getvalue(), width).lines
    assert re.fullmatch(r"Epoch 1/2: loss \d\.\d{4}, accuracy \d\.\d{4}", first)
    assert re.fullmatch(r"Epoch 2/2: loss \d\.\d{4}, accuracy \d\.\d{4}", second)
    assert last == "after it"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def terminal(width: int, kind: str = "xterm"):
    """Give a stream that is a terminal of so many columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", kind)
        patch.setenv("COLUMNS", str(width))
        yield Terminal()
