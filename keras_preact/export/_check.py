"""Compare an exported model with the model that it was made from. A process without
Keras runs the export. Its outputs are compared, and in 16 and 8 bits its accuracy too.
"""

import contextlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_preact.backend import arrays, tf_data
from keras_preact.export import _children, _scores
from keras_preact.export._children import ExportError
from keras_preact.export.version import INT8

BATCH_SIZES = (1, 3)

#: Number of labelled images that a process runs at once.
LABELLED_BATCH = 32

#: Dtype that layers compute in, to the largest allowed difference of logits, as a share of
#: max(1, max |logit|). In float32 only the order of sums differs. In 16 bits every layer's output
#: is rounded to 11 (float16) or 8 bits (bfloat16), and each backend omits other roundings. On JAX
#: and PyTorch, networks of 8 and 56 layers differed by up to 1.3 roundings. The difference grows
#: with the depth, so 8 roundings are allowed.
TOLERANCES = {"float64": 1e-5, "float32": 1e-5, "float16": 8 * 2.0**-11, "bfloat16": 8 * 2.0**-8}

#: Allowed difference in changes of the logits for the rounding of the images alone. Most networks
#: change by less than `TOLERANCES`; a deep one with new weights may magnify a rounding 1000 times.
ROUNDINGS = 8

#: Key of `_replay.RUNTIMES` to what it runs, and the software that runs it.
RUNTIMES = {
    "saved_model": ("SavedModel", "TensorFlow alone"),
    "onnx": ("ONNX file", "ONNX Runtime"),
    "litert": ("LiteRT file", "LiteRT"),
    "int8": ("network in 8 bits", "OpenVINO"),
}


def samples(scores: _scores.Scores) -> np.ndarray:
    """Return random images of the kind `kind_of_samples`, channels last."""
    shape = (max(BATCH_SIZES), *scores.sample_shape)
    rng = np.random.default_rng(0)
    if scores.input_dtype == "int32":
        return rng.integers(0, 2, shape, dtype="int32")  # every vocabulary has them
    return (rng.uniform(0, 255, shape) if scores.takes_pixels else rng.normal(size=shape)).astype(
        "float32"
    )


def kind_of_samples(scores: _scores.Scores) -> str:
    """Return what images are compared, in words."""
    if scores.input_dtype == "int32":
        return "0 and 1"
    return "pixels, uniform in [0, 255)" if scores.takes_pixels else "standard normal"


def expected(scores: _scores.Scores, images: np.ndarray) -> dict[str, np.ndarray]:
    """Return the logits and probabilities that the model gives for `images`, in
    float64.

    Raises:
        ValueError: if they are not finite numbers.
    """
    if scores.channels_first:
        images = np.ascontiguousarray(np.moveaxis(images, -1, 1))
    with _full_precision():
        logits, output = (_numpy(tensor) for tensor in scores.probe(images, training=False))
    if not np.isfinite(logits).all():
        raise ValueError(
            "The model's outputs are not finite numbers: it diverged in training, or its weights "
            "are damaged. Export an earlier checkpoint."
        )
    if not scores.gives_probabilities:
        output = scores.outputs.probabilities(logits)
    return {"logits": logits, "probabilities": output}


def _own_rounding(scores: _scores.Scores, images: np.ndarray, logits: np.ndarray) -> float:
    """Return how much the logits change if each number of the images is the next larger."""
    if images.dtype.kind != "f":
        return 0.0
    changed = expected(scores, np.nextafter(images, np.float32(np.inf)))["logits"]
    return float(np.abs(changed - logits).max())


def compare(scores: _scores.Scores, path: Path, folder: Path, runtime: str = "saved_model") -> dict:
    """Run an exported model in a process without Keras and compare the outputs.

    Args:
        scores: The model.
        path: The exported model.
        folder: Folder for temporary files.
        runtime: Key of `_replay.RUNTIMES`.

    Returns:
        An entry for the model card, with samples, batch sizes, the largest differences
        and the allowed ones.

    Raises:
        ExportError: if the export cannot be loaded, or a difference is larger than
            allowed.
    """
    what, _ = RUNTIMES[runtime]
    images = samples(scores)
    wanted = expected(scores, images)
    got = replay(path, {str(n): images[:n] for n in BATCH_SIZES}, folder, runtime)

    tolerance = max(TOLERANCES.get(dtype, 1e-5) for dtype in scores.dtypes) * max(
        1, np.abs(wanted["logits"]).max()
    )
    tolerance = max(tolerance, ROUNDINGS * _own_rounding(scores, images, wanted["logits"]))
    # Softmax and sigmoid change by at most half as much as their input.
    allowed = {"logits": tolerance, "probabilities": max(1e-5, tolerance / 2)}
    largest = dict.fromkeys(wanted, 0.0)
    for key, reference in wanted.items():
        for n in BATCH_SIZES:
            output, shape = got[f"{n}/{key}"], (n, *reference.shape[1:])
            if output.dtype != np.float32 or output.shape != shape:
                raise ExportError(
                    f"The {what}'s {key} for {n} images are {output.dtype} of shape "
                    f"{output.shape}; float32 of shape {shape} was expected."
                )
            difference = np.abs(output - reference[:n]).max()
            if not difference <= allowed[key]:  # also true for NaN
                raise ExportError(
                    f"The {what}'s {key} differ from the model's by up to {difference:.2g}; "
                    f"{allowed[key]:.2g} is allowed."
                )
            largest[key] = max(largest[key], float(difference))
    return {
        "samples": kind_of_samples(scores),
        "shape": list(images.shape[1:]),
        "batch_sizes": list(BATCH_SIZES),
        "largest_difference": largest,
        "allowed_difference": {key: float(value) for key, value in allowed.items()},
    }


def replay(
    path: Path, batches: Mapping[str, np.ndarray], folder: Path, runtime: str = "saved_model"
) -> dict[str, np.ndarray]:
    """Run an exported model on batches of images in a process without Keras.

    Args:
        path: The exported model.
        batches: Images by name.
        folder: Folder for temporary files.
        runtime: Key of `_replay.RUNTIMES`.

    Returns:
        The outputs by `NAME/OUTPUT`.
    """
    what, software = RUNTIMES[runtime]
    inputs, outputs = folder / "inputs.npz", folder / "outputs.npz"
    np.savez(inputs, **batches)  # type: ignore[arg-type]
    script = str(Path(__file__).with_name("_replay.py"))
    _children.run(
        ["-P", script, runtime, str(path), str(inputs), str(outputs)],
        f"Running the {what} with {software}",
    )
    with np.load(outputs) as file:
        return dict(file)


def labelled(
    data: tuple | None, precision: str, scores: _scores.Scores
) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels on which the accuracies are compared.

    Raises:
        ValueError: if there are none, they do not fit the model, or their numbers differ.
    """
    if not (isinstance(data, tuple | list) and len(data) == 2):
        received = "None" if data is None else describe(data)
        raise ValueError(
            f"precision={precision!r} needs validation_data=(images, labels), two arrays on which "
            f"its accuracy is compared with the model's. Received: validation_data={received}"
        )
    images, labels = (np.asarray(arrays.as_numpy(part)) for part in data)
    if len(images) != len(labels) or not len(images):
        raise ValueError(
            "`validation_data` must be images and labels for each. Received: shapes "
            f"{images.shape} and {labels.shape}"
        )
    images = as_taken(images, "validation_data[0]", scores)
    return images, scores.outputs.check_labels(labels, "validation_data[1]")


def as_taken(images: Any, argument: str, scores: _scores.Scores) -> np.ndarray:
    """Return images as the classifier takes them. Warn if their range is not the expected
    one.

    Raises:
        ValueError: if they are no such array, or not finite.
    """
    wanted = scores.probe.input_shape
    try:
        images = np.asarray(arrays.as_numpy(images), scores.input_dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`{argument}` must be an array of images of shape {wanted}. Received: "
            f"{describe(images)}"
        ) from error
    if len(images.shape) != len(wanted) or any(
        length not in (None, own) for own, length in zip(images.shape, wanted, strict=True)
    ):
        raise ValueError(
            f"`{argument}` must have the shape {wanted}, as the model takes images. Received: "
            f"{images.shape}"
        )
    if not np.isfinite(images).all():
        raise ValueError(f"`{argument}` must be finite. Received: NaN or infinity")
    if problem := scores.expected.problem(images):
        warnings.warn(f"`{argument}`: {problem}", stacklevel=4)  # where the export is called
    return images


def describe(value: Any) -> str:
    """Return the class of a value in words, and its length if it is a list."""
    name = type(value).__name__
    return f"a {name} of {len(value)}" if isinstance(value, list | tuple) else f"a {name}"


def compare_accuracy(
    scores: _scores.Scores,
    images: np.ndarray,
    labels: np.ndarray,
    path: Path,
    folder: Path,
    precision: str,
    max_loss: float,
) -> dict:
    """Compare the accuracy of the model and of its export in 16 or 8 bits. Of several
    classes at once, it is the share of right answers about one class.

    Args:
        scores: The model.
        images, labels: From `labelled`.
        path: The SavedModel.
        folder: Folder for temporary files.
        precision: Precision of the export, `"bfloat16"` or `"int8"`.
        max_loss: Largest allowed loss of accuracy, as a share of 1.

    Returns:
        An entry for the model card, with both accuracies and the number of images.

    Raises:
        ExportError: if the export's accuracy is too low.
    """
    logits = scores.probe.predict(**tf_data.of_array(images, LABELLED_BATCH), verbose=0)[0]
    if scores.channels_first:
        images = np.moveaxis(images, 1, -1)
    starts = range(0, len(images), LABELLED_BATCH)
    batches = {str(i): images[i : i + LABELLED_BATCH] for i in starts}
    served = (path / INT8, "int8") if precision == "int8" else (path, "saved_model")
    got = replay(served[0], batches, folder, served[1])
    exported = np.concatenate([got[f"{i}/logits"] for i in starts])
    expected_accuracy, accuracy = (
        float((scores.outputs.answers(x) == labels).mean()) for x in (logits, exported)
    )
    if accuracy < expected_accuracy - max_loss:
        raise ExportError(
            f"The accuracy on {len(labels)} images is {100 * accuracy:.2f} % in {precision} and "
            f"{100 * expected_accuracy:.2f} % in the model. It falls by more than "
            f"max_accuracy_loss={max_loss}. Use precision='float32'."
        )
    return {
        "images": len(labels),
        "model": expected_accuracy,
        precision: accuracy,
        "max_loss": max_loss,
    }


def _numpy(tensor) -> np.ndarray:
    return keras.ops.convert_to_numpy(keras.ops.cast(tensor, "float32")).astype("float64")


@contextlib.contextmanager
def _full_precision():
    """Compute in full float32. GPUs round the inputs of products to 10 bits by default
    (TF32).
    """
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        with jax.default_matmul_precision("highest"):
            yield
    elif backend == "torch":
        import torch

        matmul = torch.backends.cuda.matmul
        before = matmul.allow_tf32
        matmul.allow_tf32 = False
        try:
            with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
                yield
        finally:
            matmul.allow_tf32 = before
    else:
        import tensorflow as tf

        before = tf.config.experimental.tensor_float_32_execution_enabled()
        tf.config.experimental.enable_tensor_float_32_execution(False)
        try:
            yield
        finally:
            tf.config.experimental.enable_tensor_float_32_execution(before)
