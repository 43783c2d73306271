"""The prediction for each test image, and a sheet of the most confident mistakes."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ... import disk
from .drawing import draw_mistakes

if TYPE_CHECKING:
    from PIL import Image

    from ...data import Reader

#: Most images on a sheet.
MOST = 100
#: Longest side of an image on a sheet, in pixels.
SIDE = 200


def write(
    images: "Reader",
    logits: np.ndarray,
    labels: np.ndarray,
    classes: Sequence[str],
    count: int,
    folder: Path,
    suffix: str,
) -> list[Path]:
    """Write predictions.csv, a row per image in the order of the data set, and errors.png,
    the wrong images with the highest probabilities. Return the files.

    An image is its path, or its number from 0 on if it is no file.

    Args:
        images: The test images.
        logits: Their logits (images, classes).
        labels: Their classes (images).
        classes: Names of the classes.
        count: Number of images on the sheet.
        folder, suffix: Folder of the files, and end of their names.
    """
    from ...data.readers import Files

    predicted = logits.argmax(axis=1)
    highest = logits.max(axis=1, keepdims=True)
    probabilities = 1 / np.exp(logits - highest).sum(axis=1)
    names = images.paths if isinstance(images, Files) else range(images.size)
    table, sheet = folder / f"predictions{suffix}.csv", folder / f"errors{suffix}.png"
    # names of files may have bytes that are not UTF-8
    with (
        disk.replacing(table) as temporary,
        temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file,
    ):
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["image", "label", "prediction", "probability"])
        for name, label, guess, p in zip(names, labels, predicted, probabilities, strict=True):
            rows.writerow([name, classes[label], classes[guess], f"{p:.6f}"])
    wrong = np.flatnonzero(predicted != labels)
    worst = wrong[np.argsort(-probabilities[wrong], kind="stable")][:count]
    if not len(worst):
        sheet.unlink(missing_ok=True)  # of an earlier network
        return [table]
    pictures = _pictures(images, worst)
    titles = [
        f"{classes[predicted[i]]} {100 * probabilities[i]:.1f} %\nis {classes[labels[i]]}"
        for i in worst
    ]
    with disk.replacing(sheet) as temporary:
        draw_mistakes([pictures[i] for i in worst], titles, temporary)
    return [table, sheet]


def _pictures(images: "Reader", numbers: np.ndarray) -> dict[int, "Image.Image"]:
    """Return some images by their number. The others are not decoded."""
    import tensorflow as tf
    from PIL import Image

    is_chosen = tf.constant(np.isin(np.arange(images.size), numbers))
    rows = images.open(lambda number: is_chosen[number]).as_numpy_iterator()
    pictures = {}
    for number, (pixels, _) in zip(np.sort(numbers).tolist(), rows, strict=True):
        picture = Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)
        picture.thumbnail((SIDE, SIDE))
        pictures[number] = picture
    return pictures
