"""Classify image files with an exported model: `keras-preact predict`.

Needs TensorFlow and NumPy, no Keras. The model decodes the files itself, as in a
server.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from .. import cli
from ..errors import UserError, check_positive, checking, command
from ..imports import networks_left_out


def predict(
    model: Annotated[Path, tyro.conf.Positional],
    images: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="IMAGE ...", help_behavior_hint="(one or more)"),
    ],
    /,
    top: int = 3,
    version: int | None = None,
) -> None:
    """Classify image files with an exported model, with TensorFlow alone.

    Images of another size, or with other channels, are converted. A warning says so,
    unless the model was trained on images of any size.

    Args:
        model: Directory of an exported model, saved_models/NAME.
        images: Image files: PNG, JPEG or WebP.
        top: Number of classes to print per image.
        version: Version of the model. If not given: the highest.
    """
    if not images:
        raise UserError(f"Name at least one image file: {command('predict', model, 'IMAGE')}")
    check_positive(top=top)
    if (model / "config.json").is_file():
        raise UserError(
            f"{model} is a run. Export it first: {command('export', model, '--name', 'NAME')}"
        )
    with networks_left_out():
        from keras_preact.export.version import class_scores, find
    with checking():
        exported = find(model, version)
        with exported.reading_card() as card:
            classes = list(card["classes"])
            crops = (card.get("preprocessing") or {}).get("crop") is not None
    path = exported.path
    files = [read_file(image) for image in images]
    loaded = load(path)
    # Decode all images first: a broken one is an error before anything is printed.
    pixels = [decode(loaded, *named) for named in zip(images, files, strict=True)]
    for change in changes(images, files, pixels, crops):
        print(f"warning: {change}", file=sys.stderr)
    width = max(map(len, classes))
    for image, batch in zip(images, pixels, strict=True):
        outputs = loaded.core(batch)["probabilities"].numpy()
        [probabilities] = class_scores(outputs, len(classes))
        if not np.isfinite(probabilities).all():
            raise UserError(
                f"The probabilities for {image} are not finite: the weights in {path} are damaged."
            )
        print(image)
        for i in np.argsort(-probabilities, kind="stable")[:top]:
            print(f"  {classes[i]:<{width}}  {100 * probabilities[i]:6.2f} %")


def read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"Cannot read the image {path}: {error.strerror or error}") from error


def load(path: Path):
    """Return a SavedModel that decodes image files."""
    import tensorflow as tf

    try:
        loaded = tf.saved_model.load(str(path))
    except (tf.errors.OpError, KeyError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not (hasattr(loaded, "core") and hasattr(loaded, "decode")):
        raise UserError(
            f"{path} does not take image files. Export the network again with its preprocessing: "
            f"{command('export')}"
        )
    return loaded


def decode(loaded, path: Path, file: bytes):
    """Return a file's image as an input of the model's core, a batch of one.

    Raises:
        UserError: if the file is not an image, is too large or is damaged.
    """
    import tensorflow as tf

    try:
        return loaded.decode(tf.constant([file]))
    except tf.errors.InvalidArgumentError as error:
        sentence = error.message.partition("<<")[2].partition(">>")[0]
        reason = sentence.replace("image 0", "it", 1) or "it is damaged"
        raise UserError(f"Cannot read the image {path}: {reason}.") from error


def changes(
    images: Sequence[Path], files: Sequence[bytes], inputs: Sequence[Any], crops: bool
) -> list[str]:
    """Return a sentence for each kind of change between images and inputs of the model.

    Args:
        images: Paths of the images.
        files: Their contents, PNG, JPEG or WebP.
        inputs: What `decode` returned for them.
        crops: Whether the model scales and crops images, as in its training.
    """
    import tensorflow as tf

    changed: dict[str, list[str]] = {}
    for image, file, batch in zip(images, files, inputs, strict=True):
        _, height, width, channels = batch.shape
        rows, columns, components = tf.io.decode_image(file, expand_animations=False).shape
        is_gray = components < 3
        kinds = {}
        if (rows, columns) != (height, width) and not crops:
            how = "scaled" if rows * width == columns * height else "stretched"
            kinds[f"{how} to {width} x {height} pixels"] = f"{image} ({columns} x {rows})"
        if is_gray != (channels == 1):
            way = "grayscale to colour" if is_gray else "colour to grayscale"
            kinds[f"converted from {way}"] = f"{image}"
        if components in (2, 4):
            kinds["read without their transparency"] = f"{image}"
        for kind, name in kinds.items():
            changed.setdefault(kind, []).append(name)
    return [
        f"Images were {kind}: {', '.join(names[:3])}"
        + (f" and {len(names) - 3} more." if len(names) > 3 else ".")
        for kind, names in changed.items()
    ]


def main(argv: Sequence[str]) -> None:
    cli.main("predict", predict, argv)
