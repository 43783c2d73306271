"""What does it cost to share a batch between two devices?

A process has two virtual devices of one CPU. It trains the same network with the same
batches on one of them and on both, in turn, so that a machine that becomes slower slows
both. The devices share the machine's cores: the best ratio is 1.
"""

import dataclasses
import json
import os
import time

from . import report

DEVICES = 2
#: Backend to the kind of distribution that has several devices in a process.
KINDS = {"jax": "data_parallel", "tensorflow": "mirrored"}


@dataclasses.dataclass(frozen=True)
class TwoDevices:
    """Time of a train step on two virtual devices of one CPU, over that on one. On JAX
    and TensorFlow.
    """

    model: str = "cifar_resnet20_preact"
    """A registered model."""
    batch: int = 128
    """Images per step, over both devices."""
    steps: int = 20
    """Timed steps per round."""
    rounds: int = 5
    """Number of rounds."""


def split_cpu() -> None:
    """Make two devices of the CPU, before a backend is used.

    Raises:
        ValueError: for a backend that does not have several devices in a process.
    """
    import keras
    import tensorflow as tf

    backend = keras.backend.backend()
    if backend not in KINDS:
        raise ValueError(
            f"Several devices in a process are for {' and '.join(KINDS)}. Received: {backend}"
        )
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    )
    if backend == "tensorflow":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES
        )


def measure(name: str, batch: int, steps: int, rounds: int) -> dict:
    """Return seconds of a train step in `fit`, on one device and on two, medians over
    `rounds`, and their ratio.
    """
    import keras

    import keras_preact as kp

    kinds = ("none", KINDS[keras.backend.backend()])
    trainers = [_trainer(kp.distribution.start(kind), name, batch, steps) for kind in kinds]
    pairs = [[train() for train in trainers] for _ in range(rounds)]
    names = ("step_seconds", "distributed_step_seconds", "distributed_over_one")
    return report.of_pairs(pairs, *names)


def _trainer(distribution, name: str, batch: int, steps: int):
    """Return a function that trains for some steps and returns the seconds of one."""
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_preact as kp

    with distribution:
        model = kp.create_model(name)
    rng = np.random.default_rng(0)
    images = rng.normal(size=(batch, *model.input_shape[1:])).astype("float32")
    labels = rng.integers(0, model.output_shape[-1], batch)
    ends: list[float] = []
    clock = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter())
    )

    def train() -> float:
        with distribution:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            distribution.compile(model, optimizer=kp.optimizers.CoupledSGD(0.1), loss=loss)
            batches = distribution.training_data(
                tf.data.Dataset.from_tensors((images, labels)).repeat()
            )
            # the first epoch compiles
            model.fit(
                batches,
                epochs=2,
                steps_per_epoch=steps,
                verbose=0,
                shuffle=False,
                callbacks=[clock],
            )
        return (ends[-1] - ends[-2]) / steps

    return train


def run(options: TwoDevices) -> dict:
    """Measure, print the figures as JSON and return them."""
    split_cpu()
    figures = measure(options.model, options.batch, options.steps, options.rounds)
    print(json.dumps(figures))
    return figures
