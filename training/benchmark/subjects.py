"""Networks with optimiser, loss and batch, and the steps that are timed. A step ends when
its results are available.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import keras_preact as kp

from .. import backends
from ..errors import UserError
from . import candidates

Step = Callable[[], Any]


def timed(action: Step) -> tuple[float, Any]:
    """Return the seconds that an action takes, and its result."""
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def seconds_of(step: Step, warmup: int, steps: int) -> list[float]:
    """Return the seconds of each of `steps` steps, after `warmup` steps without timing."""
    for _ in range(warmup):
        step()
    return [timed(step)[0] for _ in range(steps)]


def make(candidate: candidates.Candidate, options: Any) -> "Subject":
    """Build a candidate with the options of a `questions.Question`."""
    network = candidates.build(candidate.name, candidate.options, options.image_size)
    if isinstance(network, keras.Model):
        return KerasSubject(network, options)
    peer = candidates.PEERS[candidate.name]
    size = options.image_size or peer.image_size
    return TorchSubject(network, dict(candidate.options), options, size, peer.classes)


def wait(*arrays: Any) -> None:
    """Wait for the device: on JAX for these arrays, on torch for all of its work. On
    TensorFlow, the steps wait because they read their results.
    """
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        jax.block_until_ready(arrays)
    if backend == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _batch(
    shape: tuple[int | None, ...], batch: int, classes: int
) -> tuple[np.ndarray, np.ndarray]:
    if None in shape:
        raise UserError(
            f"The network takes images of any size. Choose one with --image-size. Received: {shape}"
        )
    random = np.random.default_rng(0)
    images = random.standard_normal((batch, *map(int, filter(None, shape))), "float32")
    return images, random.integers(0, classes, batch, "int32")


class KerasSubject:
    """A Keras model, compiled as a user of the library does it, with a batch that is
    already on the device.

    Attributes:
        jit_compile: Whether its steps are compiled, after `auto` is decided.
        parameters: Number of trainable parameters.
    """

    def __init__(self, model: keras.Model, options: Any):
        self.model = model
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            kp.optimizers.CoupledSGD(0.1),
            self.loss,
            jit_compile=backends.jit_compile(options.jit_compile, model),
        )
        self.jit_compile = bool(model.jit_compile) or keras.backend.backend() == "jax"
        weights = model.trainable_variables
        self.last = weights[-1]
        self.parameters = sum(math.prod(variable.shape) for variable in weights)
        images, labels = _batch(model.input_shape[1:], options.batch, model.output_shape[-1])
        self.images = keras.ops.convert_to_tensor(images)
        self.labels = keras.ops.convert_to_tensor(labels)

    def train_step(self) -> float:
        """Forward pass, gradient, update and new batch statistics; return the loss."""
        loss = float(np.ravel(self.model.train_on_batch(self.images, self.labels))[0])
        wait(self.last.value)
        return loss

    def inference_step(self) -> np.ndarray:
        """Return the logits of the batch."""
        return self.model.predict_on_batch(self.images)


class TorchSubject:
    """A torch module with torch's own SGD and cross-entropy.

    Option of its candidate: `channels_last` stores images and weights in this memory format.
    torch.compile compiles the module if it is turned on; `auto` is off.
    """

    def __init__(self, module, candidate_options: dict, options: Any, size: int, classes: int):
        import torch

        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        # as timm's scripts do: time a convolution's algorithms and use the fastest, like XLA
        torch.backends.cudnn.benchmark = True
        channels_last = candidate_options.get("channels_last", False)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.module = module.to(self.device, memory_format=layout)
        self.jit_compile = options.jit_compile == "on"
        self.run = torch.compile(self.module) if self.jit_compile else self.module
        weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.parameters = sum(weight.numel() for weight in weights)
        self.optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=1e-4)
        images, labels = _batch((3, size, size), options.batch, classes)
        self.images = torch.from_numpy(images).to(self.device, memory_format=layout)
        self.labels = torch.from_numpy(labels.astype("int64")).to(self.device)
        self.mixed = options.dtype == "mixed_bfloat16"

    def _logits(self):
        with self.torch.autocast(self.device, self.torch.bfloat16, enabled=self.mixed):
            return self.run(self.images)

    def train_step(self) -> float:
        self.module.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.torch.nn.functional.cross_entropy(self._logits().float(), self.labels)
        loss.backward()
        self.optimizer.step()
        wait()
        return float(loss.detach())

    def inference_step(self) -> np.ndarray:
        self.module.eval()
        with self.torch.inference_mode():
            return self._logits().float().cpu().numpy()


Subject = KerasSubject | TorchSubject
