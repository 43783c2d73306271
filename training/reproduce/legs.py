"""A run's way from its beginning, or from where it was stopped, to its end: leg by leg,
the test set measured behind each.
"""

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

import keras

from .. import callbacks, plans
from ..checkpoints import Checkpoints
from ..data.resident import Stream
from ..signals import Stop
from ..terminal import duration
from ..variables import GROUPS, Groups

if TYPE_CHECKING:
    from .run import Run

MEASURED = ("train_loss", "train_error", "test_loss", "test_error")
#: What is saved of a run: the images are not.
VARIABLES: Groups = {
    "model": lambda model: GROUPS["model"](model.network),
    "optimizer": GROUPS["optimizer"],
}


@dataclasses.dataclass
class Part:
    """What was seen of a leg so far: steps, and means over them."""

    steps: int = 0
    loss: float = 0.0
    accuracy: float = 0.0

    def and_then(self, steps: int, loss: float, accuracy: float) -> "Part":
        """Return this with the means over further steps."""
        share = steps / (self.steps + steps)
        means = (
            (1 - share) * self.loss + share * loss,
            (1 - share) * self.accuracy + share * accuracy,
        )
        return Part(self.steps + steps, *means)


@dataclasses.dataclass
class State:
    """All of a run that is saved beside the variables.

    Args:
        identity: `Run.identity`, of the first process that worked on it.
        step: Iterations that are done.
        part: Of the leg that is not at its end.
        curves: As in `results.Record`.
        seconds: Of training and of measuring, compilation included.
        compile_seconds: Of those, what the first execution of a process took more than
            the second.
        timed: Seconds and images behind the first execution of each process.
        visits: Processes that worked on it.
        diverged_at: The step by which the loss was no longer finite.
    """

    identity: dict[str, Any]
    step: int = 0
    part: Part = dataclasses.field(default_factory=Part)
    curves: dict[str, list] = dataclasses.field(
        default_factory=lambda: {
            name: [] for name in ("iteration", "seconds", "learning_rate", *MEASURED)
        }
    )
    seconds: float = 0.0
    compile_seconds: float = 0.0
    timed: tuple[float, int] = (0.0, 0)
    visits: int = 1
    diverged_at: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.part, Part):  # as JSON has it
            self.part = Part(**self.part)

    @property
    def cost(self) -> dict[str, Any]:
        """What a record holds of it."""
        seconds, images = self.timed
        return {
            "seconds": self.seconds,
            "compile_seconds": self.compile_seconds,
            "images_per_second": images / seconds if seconds else None,
            "visits": self.visits,
        }


class Legs(keras.callbacks.Callback):
    """Trains leg by leg, as the callback of each leg's `fit`.

    Args:
        run: Whose network is trained; it holds its weights.
        seed: Of order and augmentation.
        state: From where; it goes along.
        checkpoints: Where to; None where nothing is saved.
    """

    def __init__(self, run: "Run", seed: int, state: State, checkpoints: Checkpoints | None):
        super().__init__()
        assert run.model is not None
        self.run, self.seed, self.state, self.checkpoints, self.network = (
            run,
            seed,
            state,
            checkpoints,
            run.model,
        )
        self.stream = Stream(
            run.images.train_y, run.config.batch_size, seed, run.config.data.augmentation != "none"
        )
        self.rate = plans.rate_at(plans.learning_rate(run.config, run.plan))
        self.count = callbacks.Count(0, state.step)
        self.stop = Stop(self.save)
        self._saved = self._told = time.monotonic()

    def train(self) -> bool:
        """Train to the end; return False if the time ran out before, or the process was
        told to end: the state is saved.
        """
        total, length, state = self.run.plan.iterations, self.run.leg_length, self.state
        with self.stop:
            while True:
                # a run that was stopped at the very end of a leg goes on with what belongs behind
                # it
                ended = state.diverged_at is not None or state.step == total
                if state.part.steps and (ended or not state.step % length):
                    self._measure()
                    # by a signal in the measurement: behind the last one no step comes
                    self.stop.end_if_requested()
                if ended:
                    return True
                late = self.run.out_of_time()
                if late or time.monotonic() - self._saved > 60 * self.run.settings.minutes:
                    self.save()
                if late:
                    return False
                self.fit(min((state.step // length + 1) * length, total))

    def save(self) -> None:
        """Write a checkpoint of the network as it is."""
        if self.checkpoints is None:
            return
        self.set_model(self.network)
        self.checkpoints.save(
            self.model, dataclasses.asdict(self.state)
        )  # on JAX, `self.model` is up to date
        self._saved = time.monotonic()

    def fit(self, end: int) -> None:
        """Train up to this step, or less if the time runs out."""
        self._first, self._before = self.state.step, self.state.part
        self._clock = time.perf_counter()
        network = self.network
        seeds = (
            [callbacks.TorchSeeds(self.seed, 0, self.count)]
            if keras.backend.backend() == "torch"
            else []
        )
        network.fit(
            network.batches(self.stream, self._first, end),
            steps_per_epoch=(end - self._first) // network.steps_per_batch,
            shuffle=False,
            callbacks=[self, *seeds, self.stop],  # the seeds of a step need its count
            verbose=0,
        )

    def on_train_batch_begin(self, batch, logs=None):
        self.count.step = self._first + batch * self.network.steps_per_batch

    def on_train_batch_end(self, batch, logs=None):
        loss = float(logs["loss"])  # waits for the device
        state, done = self.state, (batch + 1) * self.network.steps_per_batch
        images = (self._first + done - state.step) * self.run.config.batch_size
        state.step = self._first + done
        state.part = self._before.and_then(done, loss, float(logs["accuracy"]))
        self._time(images)
        if not math.isfinite(loss):
            state.diverged_at = state.step
        self.network.stop_training = state.diverged_at is not None or self.run.out_of_time()

    def _time(self, images: int) -> None:
        now = time.perf_counter()
        spent, self._clock = now - self._clock, now
        self.state.seconds += spent
        first = self.run.first_execution
        if first is None:
            self.run.first_execution = spent
            return
        if first:
            self.state.compile_seconds += max(0.0, first - spent)
            self.run.first_execution = 0.0
        self.state.timed = (self.state.timed[0] + spent, self.state.timed[1] + images)

    def _measure(self) -> None:
        state = self.state
        start = time.perf_counter()
        test = self.run.measure()
        state.seconds += time.perf_counter() - start
        row = {
            "iteration": state.step,
            "seconds": state.seconds,
            "learning_rate": self.rate(state.step - 1),
            "train_loss": state.part.loss,
            "train_error": 100 * (1 - state.part.accuracy),
            "test_loss": test[0],
            "test_error": test[1],
        }
        for name, values in state.curves.items():
            values.append(row[name])
        state.part = Part()
        if time.monotonic() - self._told > 10 or state.step == self.run.plan.iterations:
            self._told = time.monotonic()
            self._tell(row)

    def _tell(self, row: dict[str, float]) -> None:
        total = self.run.plan.iterations
        seconds, images = self.state.timed
        left = (
            (total - self.state.step) * self.run.config.batch_size * seconds / images
            if images
            else 0.0
        )
        speed = images / seconds if seconds else 0.0
        self.run.say(
            f"{self.run.trial.name}, seed {self.seed}: {self.state.step:,} of {total:,} "
            f"iterations, training loss {row['train_loss']:.4f}, test error "
            f"{row['test_error']:.2f} %, {speed:,.0f} images/s"
            + (f", {duration(left)} left" if left else "")
        )
