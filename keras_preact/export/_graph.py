"""Writes the serving graph: TensorFlow operations and the weights, nothing of Keras.

The process that runs this has Keras on TensorFlow. A process on JAX or PyTorch starts one (`python -m
keras_preact.export._graph`) and hands the model over in a file: whatever the training ran on, one and the same graph of plain
TensorFlow operations comes out, with a free batch size and free image sizes, that any TensorFlow runtime can run.
"""

import importlib
import sys
from pathlib import Path

import keras

from keras_preact import stacks

SIGNATURE = "serving_default"


def write(model: keras.Model, activation: str, path: Path) -> None:
    """Write a SavedModel.

    Args:
        model: Images to logits; Keras runs on TensorFlow.
        activation: `"softmax"` or `"sigmoid"`: logits to probabilities.
        path: A new directory.
    """
    import tensorflow as tf

    shape = model.input_shape
    to_probabilities = {"softmax": tf.nn.softmax, "sigmoid": tf.nn.sigmoid}[activation]

    @tf.function(input_signature=[tf.TensorSpec(shape, tf.float32, name="images")], autograph=False)
    def serve(images):
        # A loaded signature takes images of any size and number and any value without a word: what is wrong ends here.
        some = tf.raw_ops.Assert(condition=tf.shape(images)[0] > 0, data=["images holds no image"])
        with tf.control_dependencies([some]):
            images = tf.ensure_shape(images, shape)
        images = tf.debugging.check_numerics(images, "images holds a value that is not a finite number")
        logits = model(tf.cast(images, model.input_dtype), training=False)
        logits = tf.cast(logits, tf.float32)
        return {"logits": logits, "probabilities": to_probabilities(logits)}

    # The model itself must stay out of the module: TensorFlow would find its weights a second time through it, and
    # everything else that Keras keeps.
    module = tf.Module()
    module.weights = [weight.value for weight in model.weights]
    # R-164 as plain operations and as loops: equally fast in TensorFlow, but other engines run loops ten times slower.
    with stacks.written_out():
        graph = _trace(serve)
    tf.saved_model.save(module, str(path), signatures={SIGNATURE: graph})


def _trace(function):
    """Return the graph of a tf.function, with those it calls written out.

    Keras has XLA compile grouped convolutions on its TensorFlow backend, and that demand would stand in the graph: a server
    would need XLA, and the first request would wait for it. TensorFlow's own convolution has groups too.
    """
    import tensorflow as tf

    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)  # means: the functions inside; tracing one makes its graph all the same
    try:
        return function.get_concrete_function()
    finally:
        tf.config.run_functions_eagerly(before)


def main(model: str, activation: str, path: str, *modules: str) -> None:
    """Write the SavedModel of a .keras file, whose layers `modules` register."""
    for module in modules:
        importlib.import_module(module)
    write(keras.saving.load_model(model, compile=False), activation, Path(path))


if __name__ == "__main__":
    main(*sys.argv[1:])
