"""Writes small versions of models by hand, with what a server needs of an exported one."""

import hashlib
import json
from pathlib import Path

import numpy as np
import tensorflow as tf

from keras_preact.export import _warmup

SHAPE = (8, 8, 3)
CLASSES = ["ant", "bee", "cat", "dog", "eel"]
TOP_K = 3
MAX_BATCH_SIZE = 4


def signatures() -> dict:
    def spec(dtype, *shape):
        return {"dtype": dtype, "shape": [None, *shape]}

    images = {"images": spec("float32", *SHAPE) | {"mean": [0], "std": [255], "range": [0, 255]}}
    n = len(CLASSES)
    best = {
        "classes": spec("string", TOP_K),
        "scores": spec("float32", TOP_K),
        "indices": spec("int32", TOP_K),
    }
    return {
        "serving_default": {
            "inputs": images,
            "outputs": {"logits": spec("float32", n), "probabilities": spec("float32", n)},
        },
        "features": {"inputs": images, "outputs": {"features": spec("float32", 6)}},
        "predict_bytes": {"inputs": {"image_bytes": spec("string")}, "outputs": best},
    }


def module(seed: int = 0) -> tf.Module:
    """Return a network of pixels in which two classes, "bee" and "dog", always have one
    and the same score, the highest.
    """
    rng = np.random.default_rng(seed)
    model = tf.Module()
    model.kernel = tf.Variable(rng.normal(size=(3, 3, 3, 6)).astype("float32"))
    dense = rng.normal(size=(6, len(CLASSES))).astype("float32")
    dense[:, 1] = dense[:, 3] = np.abs(dense).max(axis=1)
    model.dense = tf.Variable(dense)

    @tf.function(
        input_signature=[tf.TensorSpec((None, *SHAPE), tf.float32, name="images")], autograph=False
    )
    def core(images):
        features = tf.reduce_mean(
            tf.nn.relu(tf.nn.conv2d(images / 255, model.kernel, 1, "SAME")), (1, 2)
        )
        logits = features @ model.dense
        return {"logits": logits, "probabilities": tf.nn.softmax(logits), "features": features}

    def decode_one(file):
        image = tf.io.decode_png(file, channels=3)
        size = tf.shape(image)
        message = tf.strings.format("<<image 0 is {} x {} pixels>>", (size[1], size[0]))
        with tf.control_dependencies(
            [tf.raw_ops.Assert(condition=tf.reduce_all(size == SHAPE), data=[message])]
        ):
            pixels = tf.cast(tf.identity(image), tf.float32)
        pixels.set_shape(SHAPE)
        return pixels

    @tf.function(
        input_signature=[tf.TensorSpec((None,), tf.string, name="image_bytes")], autograph=False
    )
    def decode(image_bytes):
        return tf.map_fn(decode_one, image_bytes, fn_output_signature=tf.float32)

    @tf.function(
        input_signature=[tf.TensorSpec((None,), tf.string, name="image_bytes")], autograph=False
    )
    def predict_bytes(image_bytes):
        scores, indices = tf.math.top_k(core(decode(image_bytes))["probabilities"], TOP_K)
        return {
            "scores": scores,
            "indices": indices,
            "classes": tf.gather(tf.constant(CLASSES), indices),
        }

    model.core, model.decode, model.predict_bytes = core, decode, predict_bytes
    return model


def write(
    version: Path, *, warmup: bool = True, precision: str = "float32", seed: int = 0, **card
) -> Path:
    """Write a version; `card` replaces entries of its model card."""
    model = module(seed)
    tf.saved_model.save(model, str(version), signatures={"predict_bytes": model.predict_bytes})
    if warmup:
        requests = [
            ("serving_default", {"images": np.zeros((n, *SHAPE), "float32")})
            for n in (1, 2, MAX_BATCH_SIZE)
        ]
        _warmup.write(
            version,
            [
                *requests,
                ("predict_bytes", {"image_bytes": np.array([png(np.zeros(SHAPE))], object)}),
            ],
        )
    written = {
        "name": version.parent.name,
        "version": int(version.name),
        "classes": CLASSES,
        "signatures": signatures(),
        "pixels": True,
        "top_k": TOP_K,
        "batch_sizes": [1, 2, MAX_BATCH_SIZE],
        "precision": precision,
        "files": hashes(version),
    }
    (version / "assets.extra").mkdir(exist_ok=True)
    (version / "assets.extra" / "model_card.json").write_text(json.dumps(written | card))
    return version


def hashes(version: Path) -> dict[str, str]:
    files = [path for path in version.rglob("*") if path.is_file()]
    return {
        path.relative_to(version).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def pixels(number: int, seed: int = 0) -> np.ndarray:
    """Return noise, each image of another brightness."""
    rng = np.random.default_rng(seed)
    return np.floor(
        rng.uniform(0, 256, (number, *SHAPE)) * rng.uniform(size=(number, 1, 1, 1))
    ).astype("float32")


def png(image: np.ndarray) -> bytes:
    return tf.io.encode_png(image.astype("uint8")).numpy()
