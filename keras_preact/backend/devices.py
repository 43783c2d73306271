"""Whether the backend has a GPU, whether XLA and scans are slow on its device, and layouts of
variables on several devices.
"""

import contextlib
from collections.abc import Iterator

import keras


def tensorflow_has_gpu() -> bool:
    """Whether TensorFlow sees a GPU."""
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def xla_is_slower() -> bool:
    """Whether the backend computes faster without XLA. This is true of TensorFlow on a
    CPU, since its own convolutions are faster. ResNet-20, batch 64, two cores: 650
    images/s with XLA, 1,070 without.
    """
    return keras.backend.backend() == "tensorflow" and not tensorflow_has_gpu()


def scan_is_slow() -> bool:
    """Whether convolutions in a scan are slow, as they are if XLA compiles for a CPU."""
    if keras.backend.backend() != "jax":
        return False
    import jax

    return jax.default_backend() == "cpu"


@contextlib.contextmanager
def undistributed() -> Iterator[None]:
    """Make variables without the layouts of `keras.distribution`."""
    distribution = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(distribution)
