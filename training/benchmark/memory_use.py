"""How much memory does a train step need?"""

import contextlib
from pathlib import Path

import keras

from .. import backends
from .subjects import KerasSubject, Step, Subject


def measure(subject: Subject, steps: int) -> dict:
    """Return the memory that the first `steps` train steps of a network need, in bytes:
    each kind of memory that this backend and device can report.
    """
    step, temporary = _analysed_step(subject)
    before = backends.resident()
    with contextlib.suppress(OSError):  # only Linux can reset the peak
        Path("/proc/self/clear_refs").write_text("5")
    for _ in range(steps):
        step()
    peak = backends.peak_resident()
    figures = {
        "xla_temporary_bytes": temporary,
        "resident_increase_bytes": max(peak - before, 0),
        "peak_resident_bytes": peak,
        "device_peak_bytes": backends.peak_on_device(),
    }
    return {key: value for key, value in figures.items() if value is not None}


def _analysed_step(subject: Subject) -> tuple[Step, int | None]:
    """Return a train step and, on JAX, the bytes that XLA needs for it besides inputs and
    outputs.
    """
    if keras.backend.backend() != "jax" or not isinstance(subject, KerasSubject):
        return subject.train_step, None
    import jax

    def train_step(trainable, state, images, labels):
        def loss_of(trainable):
            logits, new = subject.model.stateless_call(trainable, state, images, training=True)
            return subject.loss(labels, logits), new

        (loss, new), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        return loss, gradients, new

    trainable = [variable.value for variable in subject.model.trainable_variables]
    state = [variable.value for variable in subject.model.non_trainable_variables]
    arguments = (trainable, state, subject.images, subject.labels)
    compiled = jax.jit(train_step).lower(*arguments).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return lambda: jax.block_until_ready(compiled(*arguments)), temporary
