"""TrainingHealth: the callback that measures gradients, updates and activations in
`model.fit` and reports problems.
"""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_preact import _checks, compiled
from keras_preact.backend import keras_private
from keras_preact.health import findings, outputs
from keras_preact.health.activations import Activations
from keras_preact.health.probe import Probe
from keras_preact.health.ranges import Range, replaced
from keras_preact.health.records import HealthRecord
from keras_preact.health.weights import Watched


class TrainingHealth(keras.callbacks.Callback):
    """Watches the health of training in `model.fit`.

    Every `interval` updates it records the norms of each weight's gradient, of the
    weight and of its update. With a `sample` it also records mean and standard
    deviation of each weight layer's input. After an epoch with validation it records
    the gap. A cause of unhealthy training is reported once, with the remedy and the
    evidence; its effects are not reported. A loss or metric that takes logits where the
    model returns probabilities, or the other way round, is reported before the first
    update.

    The norms are computed inside the compiled train step, only when they are due, and
    without a copy to the host. During `fit`, `model.optimizer` is a wrapper of the
    optimizer that computes them; it is never saved. The end of `fit` restores the
    optimizer. After a `fit` that raised an exception, the next `fit` with such a
    callback or `remove()` restores it.

    Args:
        interval: Updates between two records. With a larger `steps_per_execution`, the
            last such update of an execution is recorded.
        sample: A batch of inputs of the model. The activations are measured on it, at
            inference. If its range is not the range that the network expects, this is
            reported before the first update. None: no activations.
        ranges: Maps a figure to a `kp.health.Range` that replaces its row of
            `kp.health.HEALTHY_RANGES`, or to None if it is not judged. With
            `keras.optimizers.Muon`, updates of up to 10 % of a weight are healthy.
        csv: File for the records, one line each: step, epoch, loss, gradient_norm,
            layer_gradient_ratio, train_validation_gap, then gradient_norm/PATH,
            weight_norm/PATH, update_norm/PATH of every weight and activation_mean/PATH,
            activation_std/PATH of every weight layer's input. Records are appended to a
            file that has these columns.
        tensorboard: Folder for an event file.
        stop_on_divergence: Whether training stops when the gradient or the loss is not
            finite. A number is the gradient norm above which it stops as well. This
            looks at the gradient of every update, which costs one pass over it per
            step. Training stops at the end of the interval; the record is of the update
            that diverged.
        report: Function that gets each message.

    Attributes:
        history: The `kp.health.HealthRecord`s.
        weights: Names of the weights in a record's arrays, in order. A name is the path
            of the weight; in a stack, the path in the unit,
            `stage1_unit3/branch/conv_1/kernel`.
        inputs: Names of the layers in a record's activations: the paths of their
            kernels.
        gaps: Gap of each epoch: training accuracy minus validation accuracy. Without an
            accuracy, the difference of the first metric, divided by its training value.
        divergence: The message about the divergence that stopped training, or None.

    Gradients are measured before clipping and without a loss scale. An update is the
    change of a train step, including decay. With gradient accumulation, accumulated
    gradients make one update. Steps that a `LossScaleOptimizer` skips are not counted.

    Raises:
        ValueError: for arguments that do not fit, a model that is not built, a second
            such callback in a `fit`.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import keras_preact as kp
    >>> images = np.random.default_rng(0).normal(size=(8, 8, 8, 1)).astype("float32")
    >>> labels = np.arange(8)
    >>> model = kp.models.resnet_cifar(8, input_shape=(8, 8, 1))
    >>> loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    >>> model.compile(kp.optimizers.CoupledSGD(0.01), loss)
    >>> health = kp.TrainingHealth(interval=2, sample=images, report=lambda message: None)
    >>> history = model.fit(images, labels, batch_size=2, verbose=0, callbacks=[health])
    >>> [record.step for record in health.history]
    [2, 4]
    >>> norms = dict(zip(health.weights, health.history[-1].gradient_norms))
    >>> norms["stage1_unit1/branch/conv_1/kernel"] > 0
    np.True_
    """

    def __init__(
        self,
        interval: int = 100,
        *,
        sample=None,
        ranges: Mapping[str, Range | None] | None = None,
        csv: str | os.PathLike | None = None,
        tensorboard: str | os.PathLike | None = None,
        stop_on_divergence: bool | float = False,
        report: Callable[[str], None] = print,
    ):
        super().__init__()
        _checks.positive_int(interval, "interval")
        if not isinstance(stop_on_divergence, bool) and not 0 < stop_on_divergence < math.inf:
            raise ValueError(
                "`stop_on_divergence` must be True, False or a positive gradient norm. "
                f"Received: stop_on_divergence={stop_on_divergence!r}"
            )
        for argument, value in {"csv": csv, "tensorboard": tensorboard}.items():
            if value is not None:
                _checks.path(value, argument)
        self.interval = interval
        self.sample = sample
        self.ranges = replaced(ranges)
        self._own_ranges = ranges
        self.csv = csv
        self.tensorboard = tensorboard
        self.stop_on_divergence = stop_on_divergence
        self.report = report
        self.history: list[HealthRecord] = []
        self.gaps: dict[int, float] = {}
        self.weights: list[str] = []
        self.inputs: list[str] = []
        # the gradient norm that stops training: the largest float32 for True
        limit = np.finfo("float32").max if stop_on_divergence is True else stop_on_divergence
        self._limit = float(limit) or None
        self._reported: set[str] = set()
        self._from_zero: set[str] = set()  # names of the kernels that were 0 before training
        self._probe: Any = None  # the `Probe` of the fit that runs
        self._restored: dict[str, Any] | None = None
        self._start()

    def _start(self) -> None:
        """Forget the previous `fit`."""
        self.divergence: str | None = None
        self._suspected: set[str] = set()  # causes that the previous record showed
        self._first_loss = math.nan
        self._accuracies: list[float] = []
        self._highest_rate: float | None = None
        self._epoch = 0
        self._gap = math.nan
        self._seen = 0
        self._momentum: float | None = None

    def on_train_begin(self, logs=None):
        model = self.model
        if not model.built:
            raise ValueError(
                "TrainingHealth needs a built model: give the model an input shape, or call it "
                "once on data."
            )
        before = Probe.of(model.optimizer)
        if before is not None:
            if before.fit is model.history:
                raise ValueError(
                    "Use one TrainingHealth in a fit. Received: two of them in `callbacks`"
                )
            before.remove()
        self.ranges = replaced(self._own_ranges, model.optimizer)
        self._watched = Watched(model)
        self._from_zero |= self._watched.zero_kernels()
        self._activations = None if self.sample is None else Activations(model, self.sample)
        self._read = [] if self._activations is None else self._activations.places
        self.weights = [place.name for place in self._watched.places]
        self.inputs = [place.name for place in self._read]
        columns = outputs.columns(self._watched, self._read)
        self._csv = None if self.csv is None else outputs.CsvFile(self.csv, columns)
        state, self._restored = self._restored, None
        if state is not None and self._csv is not None:
            self._csv.drop_after(state["seen"])
        self._board = None if self.tensorboard is None else outputs.TensorBoard(self.tensorboard)
        self._start()
        self._probe = Probe(model, self._watched, self.interval, self._limit)
        self._momentum = findings.largest_momentum(model, only_new=self._probe.steps == 0)
        if state is not None:
            self._take_over(state)
        self._left = 0  # unknown before all callbacks have begun: one may restore the step
        if self._activations is not None and (wrong := self._activations.wrong_input()):
            self._report("input", wrong)
        for problem in compiled.problems(model, self.sample) or ():
            self._report(problem.text, problem.text)  # an output may have several
        if keras.backend.backend() != "torch":  # torch compiles nothing for an optimizer
            model.make_train_function(force=True)

    def state(self) -> dict[str, Any]:
        """Return the state that another callback needs to continue like this one, in
        JSON's types; see `restore`.
        """
        # on JAX, the access to `self.model` updates its variables
        probe = None if self._probe is None else Probe.of(self.model.optimizer)
        measured = self._seen if probe is None else int(ops.convert_to_numpy(probe.step.value))
        state = {
            "seen": self._seen,
            "gap": self._gap,
            "gaps": list(self.gaps.items()),
            "reported": sorted(self._reported),
            "suspected": sorted(self._suspected),
            "first_loss": self._first_loss,
            "momentum": self._momentum,
            "from_zero": sorted(self._from_zero),
        }
        if probe is None or measured == self._seen:
            return state
        # measured and not recorded yet: training diverged in an interval that has not ended
        return state | {
            "measured": measured,
            "figures": ops.convert_to_numpy(probe.figures.value).tolist(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Make the next `fit` continue from the `state()` of another `fit`, with the
        model and optimizer of that `fit`.

        It records, reports and writes what the other `fit` would have. Rows of the CSV
        file that are later than the state are dropped, since they are written again.
        `history` has only the records of the new `fit`.
        """
        self._restored = state

    def _take_over(self, state: dict[str, Any]) -> None:
        self._seen = state["seen"]
        self._gap = state["gap"]
        self.gaps = dict(state["gaps"])
        self._reported = set(state["reported"])
        self._suspected = set(state["suspected"])
        self._first_loss = state["first_loss"]
        self._momentum = state.get("momentum", self._momentum)  # absent before version 0.3
        self._from_zero = set(state.get("from_zero", ()))  # absent before version 0.4
        self._probe.step.assign(state.get("measured", self._seen))
        if "figures" in state:
            self._probe.figures.assign(np.array(state["figures"], "float32"))

    def _until_due(self) -> int:
        """Return the number of batches until the next record."""
        period = self.interval * self._probe.accumulated
        return period - self._probe.steps % period

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        if not self._left:
            self._left = self._until_due()

    def on_train_batch_begin(self, batch, logs=None):
        self._first = batch
        self._probe.due = self._left <= 1 or self._limit is not None

    def on_train_batch_end(self, batch, logs=None):
        if math.isnan(self._first_loss):
            self._first_loss = _number(logs, "loss")
        self._left -= batch - self._first + 1
        if self._left > 0:
            return
        model = self.model  # on JAX, this access updates the variables
        self._left = self._until_due()
        step = int(ops.convert_to_numpy(self._probe.step.value))
        if step != self._seen:  # else an optimizer with a loss scale skipped the step
            self._seen = step
            self._accuracies = [_number(logs, name) for name in logs or () if "acc" in name]
            self._record(step, _number(logs, "loss"))
            if self.divergence is not None:
                model.stop_training = True

    def _record(self, step: int, loss: float) -> None:
        gradients, weights, updates = np.array(ops.convert_to_numpy(self._probe.figures.value))
        means, stds = np.zeros((2, 0)) if self._activations is None else self._activations()
        groups = list(self._watched.group_norms(gradients).values())
        ratio = groups[0] / groups[-1] if len(groups) > 1 and groups[-1] else math.nan
        record = HealthRecord(
            step=step,
            epoch=self._epoch,
            loss=loss,
            gradient_norms=gradients,
            weight_norms=weights,
            update_norms=updates,
            layer_gradient_ratio=ratio,
            activation_means=means,
            activation_stds=stds,
            gap=self._gap,
        )
        self.history.append(record)
        if self._csv is not None:
            self._csv.append(outputs.row(record))
        if self._board is not None:
            self._board.write(step, outputs.summary(record, self._watched))
        self._judge(record)

    def _judge(self, record: HealthRecord) -> None:
        """Report why training diverged, or else the first cause of unhealthy training."""
        rates = self._rates()
        diverged = findings.divergence(record, self.weights, self._limit)
        if diverged is not None:
            if findings.TOO_HIGH in self._reported:  # the cause is known
                text = f"{diverged[0].upper()}{diverged[1:]}."
            else:
                text = findings.divergence_message(diverged, rates, self._first_loss)
            if self._limit is not None:
                self.divergence = text
            self._report(findings.DIVERGENCE, text)
            return
        stuck = findings.is_stuck(record, self._first_loss, self._accuracies)
        figures = findings.measured(record, self._watched, self._read, self._from_zero)
        causes = findings.causes(figures, self.ranges, rates, stuck)
        if any(cause.is_of_inference for cause in causes):
            stale = self._stale_statistics()
            if stale is not None:  # they are its effects
                causes = [cause for cause in causes if not cause.is_of_inference]
                if record.step >= findings.STUCK_UPDATES:  # out of date in every network before
                    self._report(findings.STALE, stale)
        before, self._suspected = self._suspected, {cause.name for cause in causes}
        if causes and (causes[0].at_once or causes[0].name in before):
            row = self.ranges[causes[0].figure]
            self._report(causes[0].name, findings.message(causes[0], figures, row, rates))

    def _rates(self) -> findings.Rates:
        optimizer = self._probe.inner
        now = float(ops.convert_to_numpy(optimizer.learning_rate))
        rate = keras_private.rate(optimizer)
        if self._highest_rate is None and isinstance(
            rate, keras.optimizers.schedules.LearningRateSchedule
        ):
            steps = (self.params.get("epochs") or 1) * (self.params.get("steps") or 1)
            self._highest_rate = findings.highest_rate(
                lambda step: float(ops.convert_to_numpy(rate(step))), steps
            )
        return findings.Rates(now, max(now, self._highest_rate or 0.0))

    def _report(self, cause: str, text: str) -> None:
        """Report a cause once."""
        if cause not in self._reported and (
            cause == findings.DIVERGENCE or not findings.FINAL & self._reported
        ):
            self._reported.add(cause)
            self.report(text)

    def on_epoch_end(self, epoch, logs=None):
        gap = _gap(logs or {})
        if gap is None:
            return
        self._gap = self.gaps[epoch] = gap
        step = self._probe.steps // self._probe.accumulated
        if self._board is not None:
            self._board.write(step, {"health/train_validation_gap": gap})
        row = self.ranges.get("train_validation_gap")
        recent = np.array(list(self.gaps.values())[-findings.GAP_EPOCHS :])
        is_lasting = len(recent) == findings.GAP_EPOCHS
        if row is not None and is_lasting and row.outside(recent, "above").all():
            stale = self._stale_statistics()
            if stale is None:
                self._report("train_validation_gap", findings.gap_message(gap, row))
            else:
                self._report(findings.STALE, stale)

    def _stale_statistics(self) -> str | None:
        return findings.stale_statistics(self._momentum, self._probe.steps)

    def on_train_end(self, logs=None):
        self.remove()

    def remove(self) -> None:
        """Put the model's optimizer back, after a `fit` that raised an exception."""
        if self._probe is None:
            return
        model = self.model
        installed = Probe.of(model.optimizer)
        if installed is not None and installed is self._probe:  # else it is another callback's
            installed.remove()
            if keras.backend.backend() != "torch":
                model.train_function = None  # it computes the figures; the next fit makes another
        self._probe = None
        if self._board is not None:
            self._board.close()


def _number(logs: Mapping[str, Any] | None, name: str) -> float:
    return float(ops.convert_to_numpy((logs or {}).get(name, math.nan)))


def _gap(logs: Mapping[str, float]) -> float | None:
    """Return the gap between training and validation in the logs of an epoch, or None
    without a metric.
    """
    names = [name for name in logs if name != "loss" and f"val_{name}" in logs]
    accuracies = [name for name in names if "acc" in name]
    if accuracies:
        return float(logs[accuracies[0]]) - float(logs[f"val_{accuracies[0]}"])
    if not names or not logs[names[0]]:
        return None
    return abs(float(logs[f"val_{names[0]}"]) - float(logs[names[0]])) / abs(float(logs[names[0]]))
