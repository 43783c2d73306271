"""TrainingHealth: the callback that measures gradients, updates and activations in `model.fit` and says what is unhealthy."""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_preact import _checks
from keras_preact.health import _tables, outputs
from keras_preact.health.activations import Activations
from keras_preact.health.probe import Probe
from keras_preact.health.ranges import Range, replaced
from keras_preact.health.records import Finding, Record, of_network, of_places
from keras_preact.health.weights import Place, Watched


class TrainingHealth(keras.callbacks.Callback):
    """Watches the health of training in `model.fit`.

    Every `interval` updates it records the norms of each weight's gradient, of the weight and of its update, and, where it has
    a sample, mean and standard deviation of what each weight layer reads; after an epoch with validation, the gap. What is
    outside its healthy range is reported with the action to take, once for each kind of figure and stage of the network.

    The norms are computed inside the compiled train step, which does not copy anything to the host and computes them only when
    they are due. The optimizer carries two more variables meanwhile; what is saved does not have them, and they are gone
    at the end of `fit`. Where `fit` ends in an exception they stay until the next `fit` with such a callback, or `remove()`.

    Args:
        interval: Updates between two records. With `steps_per_execution` above it, the last one of an execution is recorded.
        sample: What the model takes, a batch of some images: the activations are measured on it, at inference. None: they
            are not.
        ranges: Figures to the `kp.health.Range` to judge by, in place of the rows of `kp.health.HEALTHY_RANGES`; None for a
            figure that is not judged.
        csv: A file for the records, a line each: step, epoch, loss, gradient_norm, layer_gradient_ratio,
            train_validation_gap, then gradient_norm/PATH, weight_norm/PATH, update_norm/PATH of every weight and
            activation_mean/PATH, activation_std/PATH of every weight layer's input. A file with these columns is continued.
        tensorboard: A folder for an event file.
        stop_on_divergence: Whether training stops when the gradient or the loss is not finite; a number is the gradient norm
            above which it stops as well. The gradient of every update is then looked at, which costs a pass over it a step.
            Training stops at the end of the interval in which it happened; the record is of the update in which it did.
        report: Called with each message.

    Attributes:
        history: The `kp.health.Record`s.
        weights: Names of the weights in a record's arrays, in order: the path, and in a stack that of the unit's own,
            `stage1_unit3/branch/conv_1/kernel`.
        inputs: The same for its activations: the kernels whose layers read them.
        gaps: Epoch to gap: that of the accuracy, training minus validation; without an accuracy, the difference of the first
            metric, divided by its training value.
        divergence: Why training was stopped; None where it was not.

    Gradients are those before clipping, of the loss without its scale. An update is what a train step changed, decay included.
    With gradient accumulation an update is one of the accumulated gradients; steps that a `LossScaleOptimizer` skips are none.

    Raises:
        ValueError: for arguments that do not fit, a model that is not built, a second such callback in a `fit`.

    Example:

    >>> import keras, numpy as np
    >>> import keras_preact as kp
    >>> images, labels = np.random.default_rng(0).normal(size=(8, 8, 8, 1)).astype("float32"), np.arange(8)
    >>> model = kp.models.resnet_cifar(8, input_shape=(8, 8, 1))
    >>> model.compile(kp.optimizers.CoupledSGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> health = kp.health.TrainingHealth(interval=2, sample=images, report=lambda message: None)
    >>> history = model.fit(images, labels, batch_size=2, verbose=0, callbacks=[health])
    >>> [record.step for record in health.history]
    [2, 4]
    >>> dict(zip(health.weights, health.history[-1].gradient_norms))["stage1_unit1/branch/conv_1/kernel"] > 0
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
        self.interval = interval
        self.sample = sample
        self.ranges = replaced(ranges)
        self.csv = csv
        self.tensorboard = tensorboard
        self.stop_on_divergence = stop_on_divergence
        self.report = report
        self.history: list[Record] = []
        self.gaps: dict[int, float] = {}
        self.weights: list[str] = []
        self.inputs: list[str] = []
        self.divergence: str | None = None
        self._reported: set[tuple] = set()
        self._gap = math.nan
        self._seen = 0
        self._probe: Any = None  # the `Probe` of the fit that runs
        self._restored: dict[str, Any] | None = None

    def on_train_begin(self, logs=None):
        model = self.model
        if not model.built:
            raise ValueError("TrainingHealth watches a model that is built: give it an input shape, or call it once.")
        before = Probe.of(model.optimizer)
        if before is not None:
            if before.fit is model.history:
                raise ValueError("A fit takes one TrainingHealth. Received: two of them among its callbacks")
            before.remove()
        self._watched = Watched(model)
        self._activations = None if self.sample is None else Activations(model, self.sample)
        self.weights = [place.name for place in self._watched.places]
        self.inputs = [place.name for place in self._read]
        state, self._restored = self._restored, None
        if state is not None and self.csv is not None:
            _tables.drop_rows(self.csv, "step", beyond=state["seen"])
        self._csv = None if self.csv is None else outputs.CsvFile(self.csv, outputs.columns(self._watched, self._read))
        self._board = None if self.tensorboard is None else outputs.TensorBoard(self.tensorboard)
        self.divergence = None
        self._epoch = 0
        self._gap = math.nan
        self._seen = 0
        self._probe = Probe(model, self._watched, self.interval, self._limit)
        if state is not None:
            self._take_over(state)
        self._left = self._until_due()
        model.make_train_function(force=True)

    def state(self) -> dict[str, Any]:
        """Return what another callback needs to go on as this one would, as JSON has it: see `restore`."""
        # on JAX, what the model holds is up to date once it was asked for
        probe = None if self._probe is None else Probe.of(self.model.optimizer)
        measured = self._seen if probe is None else int(ops.convert_to_numpy(probe.step.value))
        state = {
            "seen": self._seen,
            "gap": self._gap,
            "gaps": list(self.gaps.items()),
            "reported": sorted(map(list, self._reported)),
        }
        if probe is None or measured == self._seen:
            return state
        # measured and not recorded yet: on the way to the end of the interval in which training diverged
        return state | {"measured": measured, "figures": ops.convert_to_numpy(probe.figures.value).tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """Have the next `fit` go on with the `state()` of another one, whose model and optimizer it goes on with.

        What it records, reports and writes is what that one would have. Rows of the CSV file that stand behind the state are
        dropped, since they come again; `history` has the records of the new `fit` alone.
        """
        self._restored = state

    def _take_over(self, state: dict[str, Any]) -> None:
        self._seen = state["seen"]
        self._gap = state["gap"]
        self.gaps = dict(state["gaps"])
        self._reported = {tuple(keys) for keys in state["reported"]}
        self._probe.step.assign(state.get("measured", self._seen))
        if "figures" in state:
            self._probe.figures.assign(np.array(state["figures"], "float32"))

    @property
    def _limit(self) -> float | None:
        """The gradient norm that ends training: any that float32 holds, with `stop_on_divergence=True`."""
        if self.stop_on_divergence is False:
            return None
        return float(np.finfo("float32").max) if self.stop_on_divergence is True else self.stop_on_divergence

    @property
    def _read(self) -> list[Place]:
        return [] if self._activations is None else self._activations.places

    def _until_due(self) -> int:
        return self._probe.period - self._probe.steps % self._probe.period

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self._first = batch
        self._probe.due = self._left <= 1 or self._limit is not None

    def on_train_batch_end(self, batch, logs=None):
        self._left -= batch - self._first + 1
        if self._left > 0:
            return
        model = self.model  # on JAX, what the model holds is up to date from here on
        self._left = self._until_due()
        step = int(ops.convert_to_numpy(self._probe.step.value))
        if step != self._seen:  # else an optimizer with a loss scale has skipped the step
            self._seen = step
            self._record(step, float(ops.convert_to_numpy((logs or {}).get("loss", math.nan))))
            if self.divergence is not None:
                model.stop_training = True

    def _record(self, step: int, loss: float) -> None:
        figures = np.array(ops.convert_to_numpy(self._probe.figures.value))
        means, stds = (np.zeros(0), np.zeros(0)) if self._activations is None else self._activations()
        record = Record.of(
            figures,
            self._watched,
            step=step,
            epoch=self._epoch,
            loss=loss,
            activation_means=means,
            activation_stds=stds,
            gap=self._gap,
        )
        self.history.append(record)
        if self._csv is not None:
            self._csv.append(outputs.row(record))
        if self._board is not None:
            self._board.write(step, outputs.summary(record, self._watched))
        self._check_divergence(record)
        self._report(of_network(step, record.scalars(), self.ranges))
        self._report(of_places(record, self.ranges, self._watched, self._read))

    def _check_divergence(self, record: Record) -> None:
        what = []
        bad = np.flatnonzero(~np.isfinite(record.gradient_norms))
        if bad.size:
            what.append(
                f"the gradient is not finite in {bad.size} of {len(self.weights)} weights, first in {self.weights[bad[0]]}"
            )
        elif self._limit is not None and record.gradient_norm > self._limit:
            most = self.weights[int(np.argmax(record.gradient_norms))]
            what.append(f"the gradient norm {record.gradient_norm:.3g} is above {self._limit:g}, most in {most}")
        if not math.isfinite(record.loss):
            what.append(f"the loss is {record.loss}")
        if not what:
            return
        text = f"step {record.step}: training diverged: {'; '.join(what)}. Lower the learning rate, warm up or clip gradients."
        if self.stop_on_divergence is not False:
            self.divergence = text
        self._report([Finding("divergence", "above", (), text)])

    def _report(self, findings) -> None:
        """Report the findings of which a part of the network was not told of yet."""
        for finding in findings:
            keys = {(finding.name, finding.side, place.section) for place in finding.places}
            keys = keys or {(finding.name, finding.side, "")}
            if not keys <= self._reported:
                self._reported |= keys
                self.report(finding.text)

    def on_epoch_end(self, epoch, logs=None):
        gap = _gap(logs or {})
        if gap is None:
            return
        self._gap = self.gaps[epoch] = gap
        step = self._probe.steps // self._probe.accumulated
        if self._board is not None:
            self._board.write(step, {"health/train_validation_gap": gap})
        self._report(of_network(step, {"train_validation_gap": gap}, self.ranges))

    def on_train_end(self, logs=None):
        self.remove()

    def remove(self) -> None:
        """Take everything out of the model's optimizer that this callback has put in, after a `fit` that did not end well."""
        if self._probe is None:
            return
        model = self.model
        installed = Probe.of(model.optimizer)
        if installed is not None and installed is self._probe:  # else another callback has put in its own
            installed.remove()
            model.train_function = None  # it has the figures in it; the next fit makes another
        self._probe = None
        if self._board is not None:
            self._board.close()


def _gap(logs: Mapping[str, float]) -> float | None:
    """Return the gap between training and validation in the logs of an epoch, None where there is no metric for it."""
    names = [name for name in logs if name != "loss" and f"val_{name}" in logs]
    accuracies = [name for name in names if "acc" in name]
    if accuracies:
        return float(logs[accuracies[0]]) - float(logs[f"val_{accuracies[0]}"])
    if not names or not logs[names[0]]:
        return None
    return abs(float(logs[f"val_{names[0]}"]) - float(logs[names[0]])) / abs(float(logs[names[0]]))
