"""What is faster on the device of the backend."""

import keras


def tensorflow_has_gpu() -> bool:
    """Whether TensorFlow sees a GPU."""
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def xla_is_slower() -> bool:
    """Whether the backend computes faster without XLA: TensorFlow on a CPU, whose own
    convolutions are faster. ResNet-20, batch 64, two cores: 650 images/s with XLA, 1,070
    without.
    """
    return keras.backend.backend() == "tensorflow" and not tensorflow_has_gpu()


def scan_is_slow() -> bool:
    """Whether convolutions in a scan are slow: where XLA compiles it for a CPU."""
    if keras.backend.backend() != "jax":
        return False
    import jax

    return jax.default_backend() == "cpu"
