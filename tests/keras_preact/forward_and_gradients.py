"""A script: run a small network with the weights of a file on the backend of
KERAS_BACKEND, save output and gradients.

python -m tests.keras_preact.forward_and_gradients WEIGHTS.npz RESULT.npz
"""

import sys

import keras
import numpy as np

import keras_preact as kp
from tests.keras_preact import harness


def network():
    return kp.models.resnet_cifar(8, width_factor=0.5, input_shape=(8, 8, 3))


def results(model) -> dict[str, np.ndarray]:
    """The output at inference, then the loss and the gradients of a training step, by
    weight path.
    """
    x = harness.images(4, 8, 8, 3)
    cotangent = harness.images(4, 10, seed=2)
    outputs = {"output": keras.ops.convert_to_numpy(model(x, training=False))}
    value, on_x, on_weights = harness.value_and_grad(model, x, cotangent)
    return outputs | {"loss": np.array(value), "x": on_x} | on_weights


def main(weights_file: str, result_file: str) -> None:
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_default_matmul_precision", "highest")
    model = network()
    weights = np.load(weights_file)
    model.set_weights([weights[path] for path in harness.paths(model)])
    np.savez(result_file, **results(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
