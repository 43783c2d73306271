"""Writes the serving graph: TensorFlow operations and the weights, nothing of Keras.

The process that runs this has Keras on TensorFlow. A process on JAX or PyTorch starts
one (`python -m keras_preact.export._graph`) and hands the model over in a file:
whatever the training ran on, one and the same graph of plain TensorFlow operations
comes out, with a free batch size and free image sizes, that any TensorFlow runtime can
run.
"""

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras

from keras_preact import stacks
from keras_preact.export import _guards, _values
from keras_preact.export._images import Decoder
from keras_preact.preprocessing import Preprocessing

#: From images to scores, from images to embeddings, from image files to named classes.
SERVING_DEFAULT, FEATURES, PREDICT_BYTES = "serving_default", "features", "predict_bytes"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is written around a network.

    Args:
        activation: `"softmax"` or `"sigmoid"`: logits to probabilities.
        classes: Their names.
        size: Height and width that files of images are brought to; None: they are not
            taken.
        preprocessing: How they are brought there, and normalised where the network does
            not.
        takes_pixels: Whether the network takes pixels from 0 to 255 and normalises them
            itself.
        max_pixels: Of an image file that is decoded.
        top_k: Classes that a file is answered with.
        fold: Whether batch normalisations are folded into the weights in front of them.
    """

    activation: str
    classes: list[str]
    size: tuple[int, int] | None
    preprocessing: Preprocessing | None
    takes_pixels: bool
    max_pixels: int
    top_k: int
    fold: bool

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        fields = json.loads(text)
        own = fields["preprocessing"]
        size = fields["size"]
        return cls(
            **fields
            | {
                "size": size and tuple(size),
                "preprocessing": None if own is None else Preprocessing(**own),
            }
        )


def write(model: keras.Model, plan: Plan, path: Path) -> None:
    """Write a SavedModel.

    Args:
        model: Images to logits and features; Keras runs on TensorFlow.
        plan: What is written around it.
        path: A new directory.
    """
    import tensorflow as tf

    values = _values.of(model, fold=plan.fold)
    images = tf.TensorSpec(model.input_shape, tf.float32, name="images")
    files = tf.TensorSpec((None,), tf.string, name="image_bytes")

    def compute(images):
        with values.active():
            outputs = model(tf.cast(images, model.input_dtype), training=False)
        logits, features = (tf.cast(output, tf.float32) for output in outputs)
        return {
            "logits": logits,
            "probabilities": to_probabilities(logits, plan.activation),
            "features": features,
        }

    # The model itself must stay out of the module: TensorFlow would find its weights a second time
    # through it, and everything else that Keras keeps.
    module = tf.Module()
    module.weights = values.stored
    module.core = tf.function(compute, input_signature=[images], autograph=False)
    # R-164 as plain operations and as loops: equally fast in TensorFlow, but other engines run
    # loops ten times slower.
    with stacks.written_out():
        core = trace(module.core)

    def checked(images):
        return core(images=_check(images, model.input_shape))

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
            highest, indices = tf.math.top_k(probabilities, plan.top_k)
            return {
                "classes": tf.gather(tf.constant(plan.classes), indices),
                "scores": highest,
                "indices": indices,
            }

        signatures[PREDICT_BYTES] = (classify, files)
    functions = {
        name: tf.function(function, input_signature=[spec], autograph=False).get_concrete_function()
        for name, (function, spec) in signatures.items()
    }
    tf.saved_model.save(module, str(path), signatures=functions)


def to_probabilities(logits, activation: str):
    """Return probabilities; `activation` is `"softmax"` or `"sigmoid"`."""
    import tensorflow as tf

    return {"softmax": tf.nn.softmax, "sigmoid": tf.nn.sigmoid}[activation](logits)


def _check(images, shape: tuple):
    """Return the images; a loaded signature takes any size, number and value without a
    word: what is wrong ends here.
    """
    import tensorflow as tf

    images = _guards.ensure(tf.shape(images)[0] > 0, images, "images holds no image")
    images = tf.ensure_shape(images, shape)
    return tf.debugging.check_numerics(
        images, "<<images holds a value that is not a finite number>>"
    )


def _decoder(plan: Plan, channels: int):
    """Return the function from files of images to what the network takes."""
    import tensorflow as tf

    assert plan.size is not None
    decoder = Decoder(plan.size, channels, plan.preprocessing, plan.max_pixels)

    def decode(image_bytes):
        images = decoder(image_bytes)
        if plan.takes_pixels:
            return images
        assert plan.preprocessing is not None
        return (images - tf.constant(plan.preprocessing.mean)) / tf.constant(plan.preprocessing.std)

    return decode


def trace(function) -> Any:
    """Return the graph of a tf.function, with those it calls written out.

    Keras has XLA compile grouped convolutions on its TensorFlow backend, and that
    demand would stand in the graph: a server would need XLA, and the first request
    would wait for it. TensorFlow's own convolution has groups too.
    """
    import tensorflow as tf

    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(
        True
    )  # means: the functions inside; tracing one makes its graph all the same
    try:
        return function.get_concrete_function()
    finally:
        tf.config.run_functions_eagerly(before)


def load(file: str, modules: Iterable[str]) -> keras.Model:
    """Return the model of a .keras file, whose layers `modules` register."""
    for module in modules:
        importlib.import_module(module)
    return keras.saving.load_model(file, compile=False)


def main(model: str, plan: str, path: str, *modules: str) -> None:
    """Write the SavedModel of a .keras file, whose layers `modules` register."""
    write(load(model, modules), Plan.from_json(plan), Path(path))


if __name__ == "__main__":
    main(*sys.argv[1:])
