"""The kinds of distribution on each backend, and the function that starts one."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType

import keras

from keras_preact.distribution import environment
from keras_preact.distribution.base import Distribution

#: Module and class by kind and backend. A module is imported when it is needed.
KINDS: Mapping[tuple[str, str], tuple[str, str]] = MappingProxyType(
    {
        ("none", "tensorflow"): ("base", "Distribution"),
        ("none", "jax"): ("base", "Distribution"),
        ("none", "torch"): ("base", "Distribution"),
        ("data_parallel", "jax"): ("on_jax", "DataParallel"),
        ("model_parallel", "jax"): ("on_jax", "ModelParallel"),
        ("multi_worker", "jax"): ("on_jax", "MultiWorker"),
        ("mirrored", "tensorflow"): ("on_tensorflow", "Mirrored"),
        ("multi_worker", "tensorflow"): ("on_tensorflow", "MultiWorker"),
        ("multi_worker", "torch"): ("on_torch", "MultiWorker"),
    }
)


def start(kind: str = "none", *, devices=None, batch_norm: str = "synchronized") -> Distribution:
    """Let several devices train a model together.

    | kind | backend | devices |
    |---|---|---|
    | `none` | all | one |
    | `data_parallel` | JAX | this machine's or `devices`: each has all weights |
    | `model_parallel` | JAX | the same: each has a part of the output channels |
    | `mirrored` | TensorFlow | this machine's or `devices`: each has all weights |
    | `multi_worker` | all | the devices of all processes; on torch one per process |

    Each device computes a part of the batch; `model_parallel` splits it over rows of
    devices. With the same batch, synchronised batch normalisation and no dropout, loss
    and weights are the same as on one device.

    Args:
        kind: A row of the table.
        devices: Names such as `"cpu:0"` or `"gpu:1"`. For `model_parallel` they may be in
            rows, `[["gpu:0", "gpu:1"], ["gpu:2", "gpu:3"]]`: the devices of a row share
            the kernels, and the rows share the batch. None: all devices, in one row.
        batch_norm: Statistics of a batch in training, for `kp` batch normalisation.
            `"synchronized"` computes them over all devices. `"per_replica"` computes
            them over each device's part, and averages the moving statistics. Models are
            saved without this setting.

    Returns:
        A `Distribution`, to be entered with `with`.

    Raises:
        ValueError: for a kind that the backend does not have, and if the processes that
            the environment announces did not find each other.

    Example:

    >>> import keras, numpy as np, tensorflow as tf
    >>> import keras_preact as kp
    >>> images = np.random.default_rng(0).normal(size=(12, 8, 8, 1)).astype("float32")
    >>> labels = np.arange(12) % 10
    >>> with kp.distribution.start("none") as distribution:
    ...     rows = distribution.rows(4)
    ...     model = kp.models.resnet_cifar(8, input_shape=(8, 8, 1))
    ...     loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    ...     distribution.compile(model, optimizer="sgd", loss=loss)
    ...     batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(4)
    ...     data = distribution.training_data(batches)
    ...     history = model.fit(data, shuffle=False, verbose=0)
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
    module, name = KINDS[kind, backend]
    cls = getattr(importlib.import_module(f"keras_preact.distribution.{module}"), name)
    distribution = cls(kind, devices, batch_norm)
    environment.check_processes(distribution.processes)
    return distribution
