"""A network with its optimiser, its loss and a batch: the steps that are timed. Every
step ends when its results are there.
"""

import itertools
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import keras
import numpy as np

import keras_preact as kp
from keras_preact.health import TrainingHealth

from .. import backends
from ..checkpoints import Checkpoints
from ..cli import UserError
from . import candidates

if TYPE_CHECKING:
    from .child import Job

Step = Callable[[], Any]


class Subject(Protocol):
    """What the measurements need of a network.

    Attributes:
        jit_compile: Whether its steps are compiled, once `auto` is decided.
        parameters: Trainable ones.
        variables: Trainable ones, as the optimiser sees them: a stack's weights are
            one.
    """

    jit_compile: bool
    parameters: int
    variables: int

    def train_step(self) -> float:
        """Forward, gradient, update and new batch statistics; returns the loss."""

    def inference_step(self) -> Any:
        """The logits of the batch."""

    def updates(self) -> Step:
        """Return the optimiser's update alone, with gradients that stay."""

    def fits(self, steps: int, warmup: int, interval: int) -> tuple[float, float]:
        """Return the seconds of a step in `model.fit`, without and with the health
        callback.
        """

    def saves(self, count: int) -> tuple[list[float], list[float], int]:
        """Return the seconds of so many checkpoints, those that it takes to restore the
        last, and its bytes.
        """

    def analysed_step(self) -> tuple[Step, int | None]:
        """Return a train step and, where XLA compiled it by itself, the bytes that it
        needs besides inputs and outputs.
        """


def make(job: "Job") -> Subject:
    network = candidates.build(job.name, job.options, job.image_size)
    return (KerasSubject if isinstance(network, keras.Model) else TorchSubject)(network, job)


def peak_on_device() -> int | None:
    """Return the most bytes of a GPU's memory that the backend's arrays have taken so
    far, None without a GPU.
    """
    backend = keras.backend.backend()
    if backends.device() == "CPU":
        return None
    if backend == "jax":
        import jax

        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if backend == "torch":
        import torch

        return torch.cuda.max_memory_allocated()
    import tensorflow as tf

    return tf.config.experimental.get_memory_info("GPU:0")["peak"]


def _batch(
    shape: tuple[int | None, ...], batch: int, classes: int
) -> tuple[np.ndarray, np.ndarray]:
    if None in shape:
        raise UserError(
            f"The network takes images of any size: give --image-size. Received: {shape}"
        )
    random = np.random.default_rng(0)
    images = random.standard_normal((batch, *map(int, filter(None, shape))), "float32")
    return images, random.integers(0, classes, batch, "int32")


class KerasSubject:
    """A Keras model, compiled as a user of the library does, whose batch is on the
    device already.
    """

    def __init__(self, model: keras.Model, job: "Job"):
        self.model = model
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            kp.optimizers.CoupledSGD(0.1),
            self.loss,
            jit_compile=backends.jit_compile(job.jit_compile),
        )
        self.jit_compile = bool(model.jit_compile) or keras.backend.backend() == "jax"
        self.variables = len(model.trainable_variables)
        self.last = model.trainable_variables[-1]
        self.parameters = sum(math.prod(variable.shape) for variable in model.trainable_variables)
        images, labels = _batch(model.input_shape[1:], job.batch, model.output_shape[-1])
        self.images, self.labels = (
            keras.ops.convert_to_tensor(images),
            keras.ops.convert_to_tensor(labels),
        )

    def train_step(self) -> float:
        loss = float(np.ravel(self.model.train_on_batch(self.images, self.labels))[0])
        _wait(self.last.value)
        return loss

    def inference_step(self):
        return self.model.predict_on_batch(self.images)

    def updates(self) -> Step:
        optimizer, variables = self.model.optimizer, self.model.trainable_variables
        optimizer.build(variables)
        random = np.random.default_rng(0)
        gradients = [
            keras.ops.convert_to_tensor(1e-3 * random.standard_normal(variable.shape, "float32"))
            for variable in variables
        ]
        return _UPDATES[keras.backend.backend()](optimizer, gradients, variables, self.jit_compile)

    def fits(self, steps: int, warmup: int, interval: int) -> tuple[float, float]:
        # what it reports is of random numbers
        health = TrainingHealth(interval, sample=self.images, report=lambda message: None)
        return self._fit(steps, warmup), self._fit(steps, warmup, health)

    def _fit(self, steps: int, warmup: int, *callbacks: keras.callbacks.Callback) -> float:
        """Return the seconds of a step, the mean of `steps` behind `warmup` others."""
        clock = _Clock(warmup)
        batches = ((self.images, self.labels) for _ in itertools.count())
        self.model.fit(
            batches, steps_per_epoch=warmup + steps, verbose=0, callbacks=[*callbacks, clock]
        )
        return clock.seconds / steps

    def saves(self, count: int) -> tuple[list[float], list[float], int]:
        self.train_step()
        saving, restoring = [], []
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = Checkpoints(Path(folder))
            for step in range(count):
                start = time.perf_counter()
                path = checkpoints.save(self.model, {"step": step})
                saving.append(time.perf_counter() - start)
            for _ in range(count):
                start = time.perf_counter()
                saved = Checkpoints(Path(folder)).newest(print)
                assert saved is not None
                saved.restore(self.model)
                restoring.append(time.perf_counter() - start)
            return saving, restoring, path.stat().st_size if path else 0

    def analysed_step(self) -> tuple[Step, int | None]:
        if keras.backend.backend() != "jax":
            return self.train_step, None
        import jax

        def train_step(trainable, state, images, labels):
            def loss_of(trainable):
                logits, new_state = self.model.stateless_call(
                    trainable, state, images, training=True
                )
                return self.loss(labels, logits), new_state

            (loss, new_state), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
            return loss, gradients, new_state

        trainable = [variable.value for variable in self.model.trainable_variables]
        state = [variable.value for variable in self.model.non_trainable_variables]
        arguments = (trainable, state, self.images, self.labels)
        compiled = jax.jit(train_step).lower(*arguments).compile()
        return lambda: jax.block_until_ready(
            compiled(*arguments)
        ), compiled.memory_analysis().temp_size_in_bytes


class _Clock(keras.callbacks.Callback):
    """Measures from the end of step `warmup` to that of the last step of an epoch."""

    def __init__(self, warmup: int):
        super().__init__()
        self.warmup = warmup

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self.warmup:
            self.start = self._now()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = self._now() - self.start

    def _now(self) -> float:
        keras.ops.convert_to_numpy(
            self.model.trainable_variables[-1].value
        )  # who has it knows that the step is done
        _wait()
        return time.perf_counter()


def _update_on_tensorflow(optimizer, gradients, variables, jit_compile: bool) -> Step:
    import tensorflow as tf

    @tf.function(jit_compile=jit_compile)
    def update():
        optimizer.apply(gradients, variables)
        return tf.reshape(variables[-1].value, [-1])[
            0
        ]  # read behind the update: who has it knows that all is done

    return lambda: update().numpy()


def _update_on_jax(optimizer, gradients, variables, jit_compile: bool) -> Step:
    import jax

    def apply(state, weights, gradients):
        weights, state = optimizer.stateless_apply(state, gradients, weights)
        return state, weights

    update = jax.jit(apply, donate_argnums=(0, 1))
    # copies: what is given away must not be what the variables hold
    held = [
        jax.tree.map(lambda v: v.value.copy(), list(part))
        for part in (optimizer.variables, variables)
    ]

    def step() -> None:
        held[:] = jax.block_until_ready(update(*held, gradients))

    return step


def _update_on_torch(optimizer, gradients, variables, jit_compile: bool) -> Step:
    import torch

    def step() -> None:
        with torch.no_grad():
            optimizer.apply(gradients, variables)
        _wait()

    return step


_UPDATES = {"tensorflow": _update_on_tensorflow, "jax": _update_on_jax, "torch": _update_on_torch}


def _wait(*arrays: Any) -> None:
    """Wait for the device: on JAX for these arrays, on torch for all it was given.
    TensorFlow's steps are read instead.
    """
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        jax.block_until_ready(arrays)
    if backend == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


class TorchSubject:
    """A torch module with torch's own SGD and cross-entropy.

    Options of its candidate: `channels_last`, how its images and weights lie in memory,
    and `compile`, whether torch.compile compiles it (without it, `--jit-compile on`
    does).
    """

    def __init__(self, module, job: "Job"):
        import torch

        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.backends.cudnn.benchmark = (
            True  # as timm's own scripts set it; XLA tries convolutions out, too
        )
        layout = (
            torch.channels_last
            if job.options.get("channels_last", False)
            else torch.contiguous_format
        )
        self.module = module.to(self.device, memory_format=layout)
        self.jit_compile = job.options.get("compile", job.jit_compile == "on")
        self.run = torch.compile(self.module) if self.jit_compile else self.module
        weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.variables, self.parameters = len(weights), sum(weight.numel() for weight in weights)
        self.optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=1e-4)
        size = job.image_size or candidates.PEERS[job.name].image_size
        images, labels = _batch((3, size, size), job.batch, 1000)
        self.images = torch.from_numpy(images).to(self.device, memory_format=layout)
        self.labels = torch.from_numpy(labels.astype("int64")).to(self.device)
        self.mixed = job.dtype == "mixed_bfloat16"

    def _logits(self):
        with self.torch.autocast(self.device, self.torch.bfloat16, enabled=self.mixed):
            return self.run(self.images)

    def train_step(self) -> float:
        self.module.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.torch.nn.functional.cross_entropy(self._logits().float(), self.labels)
        loss.backward()
        self.optimizer.step()
        _wait()
        return float(loss.detach())

    def inference_step(self):
        self.module.eval()
        with self.torch.inference_mode():
            return self._logits().float().cpu().numpy()

    def updates(self) -> Step:
        for group in self.optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = 1e-3 * self.torch.randn_like(weight)

        def step() -> None:
            self.optimizer.step()
            _wait()

        return step

    def fits(self, steps: int, warmup: int, interval: int) -> tuple[float, float]:
        raise UserError("health measures a callback of Keras: give models of Keras.")

    def saves(self, count: int) -> tuple[list[float], list[float], int]:
        raise UserError("checkpoint measures checkpoints of Keras models: give models of Keras.")

    def analysed_step(self) -> tuple[Step, None]:
        return self.train_step, None
