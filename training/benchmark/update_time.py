"""How long does the optimiser's update take?"""

import dataclasses
import statistics
from typing import ClassVar

import numpy as np

from .question import Benchmark, Variant
from .report import Column
from .subjects import KerasSubject, Step, Subject, TorchSubject, seconds_of, timed, wait


@dataclasses.dataclass(frozen=True)
class Optimizer(Benchmark):
    """Time of the optimiser's update alone, for stacks and for single units."""

    variants: tuple[Variant, ...] = ("stacked", "unrolled")
    """Registered models as stacks, single units, stacks in a Python loop, or default."""

    command: ClassVar = "optimizer"
    about: ClassVar = "update = median of the optimiser's updates, with constant gradients."
    columns: ClassVar = (
        Column("update_seconds", "update ms", 1e3, 2),
        Column("first_update_seconds", "first s"),
        Column("variables", "variables", digits=0),
    )

    def measure(self, subject: Subject) -> dict:
        update = _of_module(subject) if isinstance(subject, TorchSubject) else _of_model(subject)
        first, _ = timed(update)
        steps = seconds_of(update, self.warmup - 1, self.steps)
        return {
            "variables": subject.variables,
            "first_update_seconds": first,
            "update_seconds": statistics.median(steps),
            "all_steps": steps,
        }


def _of_module(subject: TorchSubject) -> Step:
    for group in subject.optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = 1e-3 * subject.torch.randn_like(weight)

    def step() -> None:
        subject.optimizer.step()
        wait()

    return step


def _of_model(subject: KerasSubject) -> Step:
    import keras

    optimizer, variables = subject.model.optimizer, subject.model.trainable_variables
    optimizer.build(variables)
    random = np.random.default_rng(0)
    gradients = [
        keras.ops.convert_to_tensor(1e-3 * random.standard_normal(variable.shape, "float32"))
        for variable in variables
    ]
    return _UPDATES[keras.backend.backend()](optimizer, gradients, variables, subject.jit_compile)


def _on_tensorflow(optimizer, gradients, variables, jit_compile: bool) -> Step:
    import tensorflow as tf

    @tf.function(jit_compile=jit_compile)
    def update():
        optimizer.apply(gradients, variables)
        # read after the update: once it is here, all is done
        return tf.reshape(variables[-1].value, [-1])[0]

    return lambda: update().numpy()


def _on_jax(optimizer, gradients, variables, jit_compile: bool) -> Step:
    import jax

    def apply(state, weights, gradients):
        weights, state = optimizer.stateless_apply(state, gradients, weights)
        return state, weights

    update = jax.jit(apply, donate_argnums=(0, 1))
    # copies: the variables must not hold what is donated
    held = [
        jax.tree.map(lambda v: v.value.copy(), list(part))
        for part in (optimizer.variables, variables)
    ]

    def step() -> None:
        held[:] = jax.block_until_ready(update(*held, gradients))

    return step


def _on_torch(optimizer, gradients, variables, jit_compile: bool) -> Step:
    import torch

    def step() -> None:
        with torch.no_grad():
            optimizer.apply(gradients, variables)
        wait()

    return step


_UPDATES = {"tensorflow": _on_tensorflow, "jax": _on_jax, "torch": _on_torch}
