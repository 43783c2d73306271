"""The runs of a trial: network and images are put together and compiled once, and
trained for each seed.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import keras
import numpy as np

import keras_preact as kp

from .. import backends, networks, plans
from ..checkpoints import Checkpoints, Saved
from ..cli import UserError
from ..config import Config, Schedule
from ..data import crops
from ..data.resident import Cut, encode
from . import fingerprints, legs, results
from .images import Images
from .on_device import OnDevice
from .trials import Trial

#: Measurements of the test set in a run.
LEGS = 64
#: Steps that are computed at a time on an accelerator, at most.
TOGETHER = 100
#: Test images at a time, at most.
TEST_BATCH = 1000

_SMOKE = Schedule("steps", drops=(4, 6), warmup=1, length=8, unit="iterations")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How runs are made; none of it changes what a run computes, save the dtype.

    Args:
        results: Where finished runs are written.
        work: Where the state of others is.
        dtype: Keras' policy; None: mixed_bfloat16 on an accelerator, float32 on a CPU.
        together: Steps that are computed at a time; None: up to `TOGETHER` on an
            accelerator, 1 on a CPU.
        minutes: Between two checkpoints.
        smoke: A few steps of small batches, to see that everything works.
        shared: Runs at a time on the device.
    """

    results: Path
    work: Path
    dtype: str | None = None
    together: int | None = None
    minutes: float = 2.0
    smoke: bool = False
    shared: int = 1


class Run:
    """The runs of a trial in this process: they share what was compiled.

    Args:
        trial: What is trained.
        images: Its data.
        settings: How.
        out_of_time: Says when to stop.
        say: Is told how it goes.
        options: Further arguments of the network's builder, which do not change what it
            computes.
    """

    def __init__(
        self,
        trial: Trial,
        images: Images,
        settings: Settings,
        out_of_time: Callable[[], bool] = lambda: False,
        say: Callable[[str], object] = print,
        options: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.trial, self.images, self.settings, self.out_of_time, self.say = (
            trial,
            images,
            settings,
            out_of_time,
            say,
        )
        self.options = options
        on_cpu = backends.device() == "CPU"
        config = trial.config(dtype=settings.dtype or ("float32" if on_cpu else "mixed_bfloat16"))
        self.config = (
            dataclasses.replace(config, schedule=_SMOKE, batch_size=8) if settings.smoke else config
        )
        self.plan = plans.plan(self.config, len(images.train_x))
        limit = settings.together or (1 if on_cpu else TOGETHER)
        self.together = max(
            number for number in range(1, limit + 1) if not self.plan.iterations % number
        )
        self.leg_length = max(1, round(self.plan.iterations / LEGS / self.together)) * self.together
        self.model: OnDevice | None = None
        #: Seconds of the first execution, until there is a second to compare with; then 0.
        self.first_execution: float | None = None
        self._first: list[np.ndarray] = []

    def __call__(self, seed: int) -> results.Record | None:
        """Train one run from its beginning, or from where it was stopped.

        Returns:
            What was measured, which is written by then; None if the time ran out: the
            state is saved.

        Raises:
            UserError: where this code, recipe or data are not those of the row's other
                runs, or of the state that is there.
        """
        identity = self.identity()
        self._check(identity, seed)
        folder = self.settings.work / self.trial.name / f"seed-{seed}"
        checkpoints = Checkpoints(folder, 1, variables=legs.VARIABLES)
        saved = checkpoints.newest(lambda message: self.say(f"warning: {message}"))
        self._start(seed)
        state = legs.State(identity) if saved is None else self._restored(saved, identity, folder)
        folder.mkdir(parents=True, exist_ok=True)
        if not legs.Legs(self, seed, state, checkpoints).train():
            return None
        record = self._record(seed, state)
        written = results.write(self.settings.results, record)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        error = "diverged" if record.error is None else f"test error {record.error:.2f} %"
        self.say(f"{self.trial.name}, seed {seed}: {error}. Written: {written}")
        return record

    def identity(self) -> dict[str, Any]:
        """Return what all runs of a row have in common."""
        return {
            "config": described(self.trial, self.config, self.plan.iterations),
            "code": fingerprints.code(),
            "data": {
                "name": self.images.name,
                "fingerprint": self.images.fingerprint,
                "train": len(self.images.train_x),
                "test": len(self.images.test_x),
            },
        }

    def _check(self, identity: dict[str, Any], seed: int) -> None:
        ours = self._record(seed, legs.State(identity))
        for file in sorted((self.settings.results / self.trial.name).glob("seed-*.json")):
            results.check_same(results.read_one(file), ours)

    def _start(self, seed: int) -> None:
        """Make the network, or give the one that is compiled the weights of a new one."""
        keras.utils.set_random_seed(seed)
        network = build(self.trial, self.images, self.config.model.dtype, **self.options)
        if self.model is None:
            self.model = self._compiled(network)
            self._first = [
                np.array(keras.ops.convert_to_numpy(each))
                for each in self.model.optimizer.variables
            ]
            return
        for variable, new in zip(self.model.network.variables, network.variables, strict=True):
            variable.assign(new)
        for variable, first in zip(self.model.optimizer.variables, self._first, strict=True):
            variable.assign(first)

    def _compiled(self, network: keras.Model) -> OnDevice:
        images = self.images
        padded = crops.PADDINGS[self.config.data.padding](
            np.concatenate([images.train_x, images.test_x]), images.mean
        )
        model = OnDevice(network, Cut(padded), self.together)
        rate = plans.learning_rate(self.config, self.plan)
        model.compile(
            networks.optimizer(self.config, rate, network),
            networks.loss(self.config),
            metrics=["accuracy"],
            jit_compile=backends.jit_compile("auto"),
            steps_per_execution=model.together,
        )
        self.model = model
        self.measure(self._test_batch)  # builds the metrics, outside of the loop over steps
        model.optimizer.build(model.trainable_variables)
        return model

    @property
    def _test_batch(self) -> int:
        count = len(self.images.test_x)
        return max(number for number in range(1, min(count, TEST_BATCH) + 1) if not count % number)

    def measure(self, count: int | None = None) -> tuple[float, float]:
        """Return loss and error in percent on the test images, the first `count` of
        them.
        """
        assert self.model is not None
        labels = self.images.test_y[:count].astype("int32")
        codes = encode(len(self.images.train_x) + np.arange(len(labels)))
        logs = self.model.evaluate(
            codes, labels, batch_size=self._test_batch, verbose=0, return_dict=True
        )
        return float(logs["loss"]), 100 * (1 - float(logs["accuracy"]))

    def time(self, executions: int) -> list[float]:
        """Train for so many executions of `together` steps and return the seconds of
        each; the first one compiles.
        """
        if self.model is None:
            self._start(0)
        seconds = []
        for _ in range(executions):
            start = time.perf_counter()
            legs.Legs(self, 0, legs.State({}), None).fit(self.together)
            seconds.append(time.perf_counter() - start)
        return seconds

    @staticmethod
    def machine() -> dict[str, Any]:
        """Return device and software that runs are made with."""
        backend = keras.backend.backend()
        versions = backends.versions("keras", backend, "numpy")
        return {
            "name": backends.device(),
            "cpu": backends.cpu(),
            "backend": backend,
            "versions": versions,
        }

    def _restored(self, saved: Saved, identity: dict[str, Any], folder: Path) -> legs.State:
        assert self.model is not None
        state = legs.State(**saved.progress)
        # in another commit the same sources may compute
        for what, key in (("recipe", "config"), ("code", "code"), ("data", "data")):
            ours, theirs = (
                value.get("fingerprint", value) for value in (identity[key], state.identity[key])
            )
            if json.loads(json.dumps(ours)) != theirs:
                raise UserError(
                    f"{folder} holds a run of other {what}: go on with what it was begun with, or "
                    "remove the folder."
                )
        if state.step % self.together:
            raise UserError(
                f"{folder} holds a run of {state.step:,} iterations, from where {self.together} "
                "at a time do not reach the end: go on with --together "
                f"{math.gcd(state.step, self.together)}."
            )
        saved.restore(self.model)
        self.say(
            f"{self.trial.name}, seed {folder.name[5:]}: going on behind iteration {state.step:,}"
        )
        state.visits += 1
        return state

    def _record(self, seed: int, state: legs.State) -> results.Record:
        finished = bool(state.curves["iteration"]) and state.diverged_at is None
        return results.Record(
            trial=self.trial.name,
            seed=seed,
            **state.identity,
            device=self.machine(),
            curves=state.curves,
            final={name: state.curves[name][-1] if finished else None for name in legs.MEASURED},
            cost={**state.cost, "together": self.settings.shared},
            parameters=sum(math.prod(weight.shape) for weight in self.model.trainable_weights)
            if self.model
            else 0,
            diverged_at=state.diverged_at,
        )


def build(trial: Trial, images: Images, dtype: str | None = None, **options: Any) -> keras.Model:
    """Make the network of a trial for these images."""
    arguments = {
        **trial.arguments,
        "classes": len(images.classes),
        "input_shape": images.train_x.shape[1:],
        "mean": images.mean,
        "std": images.std,
        "data_format": "channels_last",
        "dtype": dtype,
    }
    return getattr(kp.models, trial.builder)(**arguments | options)


def described(trial: Trial, config: Config, iterations: int) -> dict[str, Any]:
    """Return network and recipe as data."""
    return {
        "dataset": trial.dataset,
        "builder": trial.builder,
        "arguments": dict(trial.arguments),
        "recipe": trial.recipe,
        "iterations": iterations,
        "batch_size": config.batch_size,
        "augmentation": config.data.augmentation,
        "padding": config.data.padding,
        "optimizer": dataclasses.asdict(config.optimizer),
        "schedule": dataclasses.asdict(config.schedule),
        "dtype": config.model.dtype,
    }


def unfinished(work: Path) -> dict[tuple[str, int], tuple[int, int]]:
    """Return trial and seed of the runs whose state is below the folder, with the
    iterations that are done, and all.
    """
    found = {}
    for folder in sorted(work.glob("*/*/seed-*")):
        saved = Checkpoints(folder).newest(lambda message: None)
        if saved is not None:
            name = folder.parent.relative_to(work).as_posix()
            total = saved.progress["identity"]["config"]["iterations"]
            found[name, int(folder.name[5:])] = (saved.step, total)
    return found
