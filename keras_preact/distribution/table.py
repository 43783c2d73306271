"""The kinds of distribution by backend, and how one is started."""

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

import keras

from keras_preact.distribution import environment
from keras_preact.distribution.base import Distribution


def _later(module: str, name: str) -> Callable[..., Distribution]:
    """Return a class whose module is imported when it is made: it needs a backend."""

    def make(*args) -> Distribution:
        return getattr(importlib.import_module(f"keras_preact.distribution.{module}"), name)(*args)

    return make


#: Kind and backend to what is made for it.
KINDS: Mapping[tuple[str, str], Callable[..., Distribution]] = MappingProxyType(
    {
        ("none", "tensorflow"): Distribution,
        ("none", "jax"): Distribution,
        ("none", "torch"): Distribution,
        ("data_parallel", "jax"): _later("on_jax", "DataParallel"),
        ("model_parallel", "jax"): _later("on_jax", "ModelParallel"),
        ("multi_worker", "jax"): _later("on_jax", "MultiWorker"),
        ("mirrored", "tensorflow"): _later("on_tensorflow", "Mirrored"),
        ("multi_worker", "tensorflow"): _later("on_tensorflow", "MultiWorker"),
        ("multi_worker", "torch"): _later("on_torch", "MultiWorker"),
    }
)


def start(kind: str = "none", *, devices=None, batch_norm: str = "synchronized") -> Distribution:
    """Let several devices train a model together.

    | kind | backend | devices |
    |---|---|---|
    | `none` | all | one |
    | `data_parallel` | JAX | those of this machine, or `devices`; each has all weights and a part of the batch |
    | `model_parallel` | JAX | the same; each has a part of the kernels' output channels |
    | `mirrored` | TensorFlow | those of this machine, or `devices` |
    | `multi_worker` | all | those of several processes, which `environment` finds; on torch each process has one |

    The same batch, synchronised batch normalisation and no dropout give the loss and
    weights of one device.

    Args:
        kind: As in the table.
        devices: Names such as `"cpu:0"` or `"gpu:1"`; of `model_parallel` perhaps in
            rows, `[["gpu:0", "gpu:1"], ["gpu:2", "gpu:3"]]`: those of a row share the
            kernels, and the rows share the batch. None: all, in one row.
        batch_norm: Whether `kp` batch normalisation in training takes the statistics of
            the batch of all devices, `"synchronized"`, or those of each device's part,
            `"per_replica"`; the moving ones are then the means over devices. It is a
            property of the distribution alone: models are saved without it.

    Returns:
        A `Distribution`, to be entered: `with distribution:`.

    Raises:
        ValueError: for a kind that the backend does not have, and where the processes
            that the environment announces did not come together.

    Example:

    >>> import keras, numpy as np, tensorflow as tf
    >>> import keras_preact as kp
    >>> images, labels = np.random.default_rng(0).normal(size=(12, 8, 8, 1)).astype("float32"), np.arange(12) % 10
    >>> with kp.distribution.start("none") as distribution:
    ...     rows = distribution.rows(4)
    ...     model = kp.models.resnet_cifar(8, input_shape=(8, 8, 1))
    ...     loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    ...     distribution.compile(model, optimizer="sgd", loss=loss, weighted_metrics=["accuracy"])
    ...     batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(4, drop_remainder=True)
    ...     history = model.fit(distribution.training_data(batches), shuffle=False, verbose=0)
    ...     probabilities = distribution.predict(model, images[:6], batch_size=4)
    >>> rows, probabilities.shape
    (slice(0, 4, None), (6, 10))
    """
    backend = keras.backend.backend()
    if (kind, backend) not in KINDS:
        available = [name for name, on in KINDS if on == backend]
        elsewhere = [on for name, on in KINDS if name == kind]
        reason = f"kind={kind!r} is for {' and '.join(elsewhere)}" if elsewhere else "Unknown kind"
        raise ValueError(
            f"{reason}. Available on {backend}: {', '.join(available)}. Received: kind={kind!r}"
        )
    distribution = KINDS[kind, backend](kind, devices, batch_norm)
    environment.check_processes(distribution.processes)
    return distribution
