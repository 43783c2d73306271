"""Write a network as a SavedModel: TensorFlow operations, checks of the inputs, and
signatures, without Keras.

The process that builds it runs Keras on TensorFlow. A process on JAX or PyTorch starts
one (`python -m keras_preact.export._graph`) and passes the model to it in a file.
"""

import dataclasses
import errno
import importlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from keras_preact.backend import keras_private
from keras_preact.export import _children
from keras_preact.export._flat import flat
from keras_preact.export._images import MAX_PIXELS, decoder, ensure
from keras_preact.export.version import freeze
from keras_preact.preprocessing import Preprocessing

#: Signatures: images to scores, images to embeddings, image files to named classes.
SERVING_DEFAULT, FEATURES, PREDICT_BYTES = "serving_default", "features", "predict_bytes"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Options of the graph that is written for a network.

    Args:
        activation: `"softmax"` or `"sigmoid"`, from logits to probabilities.
        fold: Whether to fold batch normalisations into the weights before them.
        dtype: Dtype of the images.
        plain: Whether to write only what a converter reads: one signature from images
            to scores, without checks.
        classes: Names of the classes.
        size: Height and width that image files are resized to. None: no image files.
        preprocessing: How image files are resized, and normalised if the network does
            not do it.
        takes_pixels: Whether the network takes pixels from 0 to 255 and normalises them
            itself.
        max_pixels: Largest number of pixels of an image file.
        top_k: Number of classes in the answer for an image file.
    """

    activation: str
    fold: bool
    dtype: str = "float32"
    plain: bool = False
    classes: tuple[str, ...] = ()
    size: tuple[int, int] | None = None
    preprocessing: Preprocessing | None = None
    takes_pixels: bool = False
    max_pixels: int = MAX_PIXELS
    top_k: int = 1


def write(model: keras.Model, plan: Plan, path: Path) -> None:
    """Write a SavedModel.

    Args:
        model: A model from images to logits and features.
        plan: Options of the graph.
        path: A new directory. Temporary files are written beside it.

    Raises:
        OSError: if the disk is full.
        ExportError: if the SavedModel cannot be written.
    """
    if keras.backend.backend() != "tensorflow":
        _write_elsewhere(model, plan, path)
        return
    import tensorflow as tf

    try:
        build(model, plan, path)
    except tf.errors.OpError as error:
        words = _children.no_room(error)
        if words:
            raise OSError(errno.ENOSPC, words) from error
        raise _children.ExportError(
            f"TensorFlow could not write the SavedModel: {error.message}"
        ) from error


def _write_elsewhere(model: keras.Model, plan: Plan, path: Path) -> None:
    """Write a SavedModel in another process, with Keras on TensorFlow."""
    file, pickled = path.with_name("scores.keras"), path.with_name("plan.pickle")
    model.save(file)
    pickled.write_bytes(pickle.dumps(plan))
    modules = {type(layer).__module__ for layer in keras_private.layers(model)} - {"__main__"}
    outside_keras = sorted(module for module in modules if module.split(".")[0] != "keras")
    _children.run(
        ["-m", __name__, str(file), str(pickled), str(path), *outside_keras],
        "Writing the SavedModel with Keras on TensorFlow",
        " Layers of your own must be registered (keras.saving.register_keras_serializable) by a "
        "module that can be imported, and must run on TensorFlow.",
    )


def build(model: keras.Model, plan: Plan, path: Path) -> None:
    """Write a SavedModel, as `write` does, with Keras on TensorFlow."""
    import tensorflow as tf

    network = flat(model, fold=plan.fold)
    images = tf.TensorSpec(model.input_shape, plan.dtype, name="images")
    files = tf.TensorSpec((None,), tf.string, name="image_bytes")

    def compute(images):
        logits, features = (tf.cast(x, tf.float32) for x in network(images, training=False))
        scores = {"logits": logits, "probabilities": getattr(tf.nn, plan.activation)(logits)}
        return scores if plan.plain else scores | {"features": features}

    # The model must not be an attribute of the module: through it TensorFlow would save the weights
    # a second time, and everything else that Keras tracks.
    module = tf.Module()
    module.weights = [weight.value for weight in network.weights]
    module.core = tf.function(compute, input_signature=[images], autograph=False)
    core = trace(module.core)
    if plan.plain:
        tf.saved_model.save(module, str(path), signatures={SERVING_DEFAULT: core})
        return

    smallest = freeze(core).smallest(model.input_shape) if None in model.input_shape[1:] else ()

    def checked(images):
        return core(images=_check(images, model.input_shape, smallest))

    def scores(images):
        outputs = checked(images)
        return {name: outputs[name] for name in ("logits", "probabilities")}

    def embed(images):
        return {"features": checked(images)["features"]}

    signatures = {SERVING_DEFAULT: (scores, images), FEATURES: (embed, images)}
    if plan.size is not None:
        module.decode = tf.function(
            _decoder(plan, model.input_shape[-1]), input_signature=[files], autograph=False
        )
        decode = module.decode.get_concrete_function()

        def classify(image_bytes):
            probabilities = core(images=decode(image_bytes=image_bytes))["probabilities"]
            if probabilities.shape[-1] < len(plan.classes):  # both classes of a binary classifier
                probabilities = tf.concat([1 - probabilities, probabilities], axis=-1)
            highest, indices = tf.math.top_k(probabilities, plan.top_k)
            names = tf.gather(tf.constant(plan.classes), indices)
            return {"classes": names, "scores": highest, "indices": indices}

        signatures[PREDICT_BYTES] = (classify, files)
    functions = {
        name: tf.function(function, input_signature=[spec], autograph=False).get_concrete_function()
        for name, (function, spec) in signatures.items()
    }
    tf.saved_model.save(module, str(path), signatures=functions)


def _check(images, shape: tuple, smallest: tuple[int, ...]):
    """Return the images; wrong ones raise an error when the graph runs. Without this, a
    loaded signature accepts any size, number and value, and an image that is too small
    may end the process.

    Args:
        images: Tensor of images.
        shape: Its shape. None: any length.
        smallest: The smallest lengths if some are free, else empty.
    """
    import tensorflow as tf

    images = ensure(tf.shape(images)[0] > 0, images, "images holds no image")
    images = tf.ensure_shape(images, shape)
    if smallest:
        words = f"images must have at least the shape {smallest}"
        images = ensure(tf.reduce_all(tf.shape(images) >= smallest), images, words)
    if not images.dtype.is_floating:
        return images
    return tf.debugging.check_numerics(
        images, "<<images holds a value that is not a finite number>>"
    )


def _decoder(plan: Plan, channels: int) -> Callable:
    """Return the function from image files to the network's input."""
    import tensorflow as tf

    assert plan.size is not None
    decode = decoder(plan.size, channels, plan.preprocessing, plan.max_pixels)
    if plan.takes_pixels:
        return decode
    assert plan.preprocessing is not None
    mean, std = plan.preprocessing.mean, plan.preprocessing.std
    return lambda image_bytes: (decode(image_bytes) - tf.constant(mean)) / tf.constant(std)


def trace(function) -> Any:
    """Return the graph of a tf.function, with the functions that it calls inlined.

    On TensorFlow, Keras compiles grouped convolutions with XLA. With these calls in the
    graph, a server would need XLA, and the first request would wait for it. Inlined
    calls use TensorFlow's own convolution, which has groups too.
    """
    import tensorflow as tf

    before = tf.config.functions_run_eagerly()
    # Only inner functions run eagerly: get_concrete_function traces the outer one all the same.
    tf.config.run_functions_eagerly(True)
    try:
        return function.get_concrete_function()
    finally:
        tf.config.run_functions_eagerly(before)


def main(model: str, plan: str, path: str, *modules: str) -> None:
    """Write the SavedModel of a .keras file. `modules` register its layers."""
    for module in modules:
        importlib.import_module(module)
    network = keras.saving.load_model(model, compile=False)
    build(network, pickle.loads(Path(plan).read_bytes()), Path(path))


if __name__ == "__main__":
    main(*sys.argv[1:])
