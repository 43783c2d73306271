"""Errors on corrupted test images, such as CIFAR-10-C."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ...cli.terminal import lines
from ...errors import UserError, reading

#: Number of severities of each corruption. A file holds the test images at the lowest one first.
SEVERITIES = 5


def measure(
    folder: Path,
    classify: Callable[[np.ndarray], np.ndarray],
    shape: Sequence[int | None],
    outputs: int,
    batch_size: int,
) -> dict[str, list[float]]:
    """Return the share of wrong images for each corruption, at each severity.

    Args:
        folder: Folder as for CIFAR-10-C: `labels.npy`, and for each corruption
            `NAME.npy` with the images of the first severity, then of the second, and so
            on, `(5 n, height, width, channels)`, pixels from 0 to 255.
        classify: Function from float32 pixels to logits.
        shape: Height, width and channels of its images, None for any.
        outputs: Number of classes.
        batch_size: Images per call.

    Raises:
        UserError: for a folder without these files, or with other arrays.

    Source: arXiv 1903.12261.
    """
    files = [path for path in sorted(folder.glob("*.npy")) if path.name != "labels.npy"]
    if not files or not (folder / "labels.npy").is_file():
        raise UserError(
            "--corruptions must be a folder with labels.npy and a NAME.npy for each corruption, as "
            f"for CIFAR-10-C (zenodo.org/records/2535967). Received: {folder}"
        )
    labels = _open(folder / "labels.npy")
    are_numbers = labels.dtype.kind in "iu" and labels.size > 0
    if (
        not are_numbers
        or labels.ndim != 1
        or len(labels) % SEVERITIES
        or not 0 <= labels.min() <= labels.max() < outputs
    ):
        received = f"numbers up to {labels.max()}" if are_numbers else labels.dtype
        raise UserError(
            f"labels.npy must hold class numbers below {outputs}, equally many for each of "
            f"{SEVERITIES} severities. Received: shape {labels.shape}, {received}"
        )
    every = {path.stem: _images(path, shape, len(labels)) for path in files}
    errors = {}
    for name, images in every.items():
        wrong = [
            classify(images[start : start + batch_size].astype("float32")).argmax(axis=1)
            != labels[start : start + batch_size]
            for start in range(0, len(labels), batch_size)
        ]
        shares = np.concatenate(wrong).reshape(SEVERITIES, -1).mean(axis=1)
        errors[name] = shares.tolist()
    return errors


def _images(path: Path, shape: Sequence[int | None], count: int) -> np.ndarray:
    """Open a file that must hold so many images of this shape."""
    images = _open(path)
    fits = images.ndim == 4 and all(
        own in (None, one) for own, one in zip(shape, images.shape[1:], strict=True)
    )
    if not fits or len(images) != count or images.dtype.kind not in "iuf":
        raise UserError(
            f"{path} must hold an image of shape {tuple(shape)}, height, width, channels, for each "
            f"of the {count} labels. Received: {images.dtype} {images.shape}"
        )
    return images


def _open(path: Path) -> np.ndarray:
    with reading(f"{path} is damaged"):
        return np.load(path, mmap_mode="r")


def report(errors: Mapping[str, Sequence[float]]) -> str:
    """Return a table of the errors in percent: a line for each corruption and one for
    their mean.
    """
    mean = np.mean(list(errors.values()), axis=0)
    heading = ["corruption", "mean", *(f"severity {i + 1}" for i in range(SEVERITIES))]
    rows = [
        [name, *(f"{100 * share:.2f}" for share in (np.mean(shares), *shares))]
        for name, shares in [*errors.items(), ("mean", mean)]
    ]
    return "Error in percent:\n" + lines([heading, *rows], numbers=range(1, len(heading)))
