"""Runs a SavedModel as a server would, in a process of its own: with TensorFlow, and with no Keras to be had.

`python -P _replay.py SAVED_MODEL INPUTS.npz OUTPUTS.npz` reads batches by name and writes `NAME/OUTPUT` for each output.
"""

import sys


def main(saved_model: str, inputs: str, outputs: str) -> None:
    sys.modules["keras"] = None  # type: ignore[assignment]  # an import of it fails from here on
    import numpy as np
    import tensorflow as tf

    loaded = tf.saved_model.load(saved_model)
    serve = loaded.signatures["serving_default"]
    results: dict = {}
    with np.load(inputs) as batches:
        for name, images in batches.items():
            results |= {f"{name}/{key}": value.numpy() for key, value in serve(images=tf.constant(images)).items()}
    np.savez(outputs, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
