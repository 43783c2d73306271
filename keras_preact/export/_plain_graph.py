"""Writes a network as a SavedModel for converters: plain operations from images to
scores, no checks, nothing of Keras.

Keras' own exporters (`model.export(format="onnx")` and `"litert"`, 3.15) are not used.
Both convert a traced model as this package does, but the first makes inputs of the
constants of a Normalization layer, and leaves calls of functions in the graph where a
convolution has groups; the second lets operations through that LiteRT's interpreter
does not have; and the names of inputs and outputs are theirs.

The process that runs this has Keras on TensorFlow; one on another backend starts it
(`python -m keras_preact.export._plain_graph`) and hands the model over in a file.
"""

import sys
from pathlib import Path

import keras

from keras_preact import stacks
from keras_preact.export import _graph


def write(model: keras.Model, activation: str, path: Path) -> None:
    """Write a SavedModel with one signature, `serving_default`: `images` to `logits`
    and `probabilities`, all float32.

    Args:
        model: Images to logits; Keras runs on TensorFlow.
        activation: `"softmax"` or `"sigmoid"`: logits to probabilities.
        path: A new directory.
    """
    import tensorflow as tf

    @tf.function(
        input_signature=[tf.TensorSpec(model.input_shape, tf.float32, name="images")],
        autograph=False,
    )
    def serve(images):
        logits = model(images, training=False)
        return {"logits": logits, "probabilities": _graph.to_probabilities(logits, activation)}

    # The model itself must stay out of the module: TensorFlow would find its weights a second time
    # through it.
    module = tf.Module()
    module.weights = [weight.value for weight in model.weights]
    with stacks.written_out():
        graph = _graph.trace(serve)
    tf.saved_model.save(module, str(path), signatures={"serving_default": graph})


def main(model: str, activation: str, path: str, *modules: str) -> None:
    """Write the SavedModel of a .keras file, whose layers `modules` register."""
    write(_graph.load(model, modules), activation, Path(path))


if __name__ == "__main__":
    main(*sys.argv[1:])
