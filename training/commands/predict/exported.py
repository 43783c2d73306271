"""An exported model that classifies image files."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError, checking, command
from ...imports import networks_left_out
from . import conversions

#: Size of the largest file that is read: an image with the most pixels that are decoded, each of 64
#: bits, and its header.
LARGEST = 450_000_000
#: First bytes of kinds of images that a model refuses, and the place where they are. Models that
#: older versions exported refuse WebP.
OTHER_KINDS = {"WebP": (8, b"WEBP"), "BMP": (0, b"BM"), "GIF": (0, b"GIF8"), "TIFF": (0, b"II*\0")}


class Refused(Exception):
    """A file cannot be classified. The message says why, in words about "it"."""


@dataclasses.dataclass(frozen=True)
class Decoded:
    """An image as the model takes it.

    Args:
        pixels: A batch of one.
        header: What its file says.
    """

    pixels: Any
    header: conversions.Header


@dataclasses.dataclass(frozen=True)
class Exported:
    """A version of an exported model.

    Args:
        path: Its folder.
        classes: Names of the classes.
        crops: Whether it scales and crops images, as in its training.
        is_int8: Whether it has a second network in 8 bits, which is not used here.
        loaded: The SavedModel.
        scores: Function from outputs and a number of classes to a score for each class.
    """

    path: Path
    classes: Sequence[str]
    crops: bool
    is_int8: bool
    loaded: Any
    scores: Callable[[np.ndarray, int], np.ndarray]

    def decode(self, path: str) -> Decoded:
        """Read an image file.

        Raises:
            Refused: if the file cannot be read, is not an image, is too large or is
                damaged.
        """
        import tensorflow as tf

        file = _read(path)
        try:
            pixels = self.loaded.decode(tf.constant([file]))
        except tf.errors.InvalidArgumentError as error:
            sentence = error.message.partition("<<")[2].partition(">>")[0]
            reason = sentence.replace("image 0", "it", 1) or "it is damaged"
            for kind, (place, start) in OTHER_KINDS.items():
                if reason.startswith("it is no ") and file.startswith(start, place):
                    reason = f"it is a {kind} file: save it as PNG or JPEG"
            raise Refused(reason) from error
        return Decoded(pixels, conversions.header(file))

    def classify(self, images: Sequence[Decoded]) -> np.ndarray:
        """Return the probability of each class, `(images, classes)`."""
        import tensorflow as tf

        batch = tf.concat([image.pixels for image in images], axis=0)
        outputs = self.loaded.core(batch)["probabilities"].numpy()
        return self.scores(outputs, len(self.classes))


def _read(path: str) -> bytes:
    try:
        size = os.path.getsize(path)  # 0 for a pipe
        if size > LARGEST:
            raise Refused(f"it has {size / 1e6:,.0f} MB; at most {LARGEST / 1e6:,.0f} MB are read")
        return Path(path).read_bytes()
    except OSError as error:
        raise Refused(error.strerror or str(error)) from error


def open_exported(model: Path, version: int | None) -> Exported:
    """Open a version of a model.

    Args:
        model: Directory of the model, or of a version.
        version: Number of the version. None: the highest.

    Raises:
        UserError: for anything else.
    """
    if (model / "config.json").is_file():
        raise UserError(
            f"{model} is a run. Export it first: {command('export', model, '--name', 'NAME')}"
        )
    with networks_left_out():
        import tensorflow as tf

        from keras_preact.export.version import class_scores, find
    with checking():
        found = find(model, version)
        with found.reading_card() as card:
            classes = found.class_names(card)
            crops = (card.get("preprocessing") or {}).get("crop") is not None
            is_int8 = card.get("precision") == "int8"
    try:
        loaded = tf.saved_model.load(str(found.path))
    except (tf.errors.OpError, KeyError, OSError) as error:
        raise UserError(f"{found.path} is damaged: {error}") from error
    if not (hasattr(loaded, "core") and hasattr(loaded, "decode")):
        raise UserError(
            f"{found.path} does not take image files. It needs images of 1 or 3 channels, and "
            f"the preprocessing of the network in its export: {command('export')}"
        )
    return Exported(found.path, classes, crops, is_int8, loaded, class_scores)
