"""Which measurement a file of metrics holds: metrics.json is about a run's own test
images, each seen once. Every other measurement has a file of its own.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Data
from ..disk import short_hash
from ..errors import UserError, reading

if TYPE_CHECKING:
    from ..data import ImageData


def suffix(checkpoint: str, views: str, other: Data | None) -> str:
    """Return the end of the name of a file of metrics: empty for the final network, one
    view of every image, and the run's own test images.

    Args:
        checkpoint: Network of the run.
        views: Views of every image.
        other: Data set, if it is not the run's own.
    """
    parts = [part for part, usual in ((checkpoint, "final"), (views, "one")) if part != usual]
    if other is not None:
        name = other.name if other.dir is None else other.dir.resolve().stem
        parts.append("on-" + re.sub(r"[^\w.]+", "-", name).strip("-"))
    return "".join(f"-{part}" for part in parts)


def are_of_run(images: "ImageData", source: Data, described: Mapping[str, Any]) -> bool:
    """Return whether a data set has the test images of a run.

    Args:
        images: The data set.
        source: Its options.
        described: Content of the run's config.json. Older ones have no hashes: then the
            options and the number of images decide.
    """
    own, size = described["config"]["data"], described.get("images", {}).get("test")
    if source.name != own["name"]:
        return False
    if "hashes" in described:
        return images.test.hash == described["hashes"]["test"]
    # a model card has no directories
    return own["dir"] in (None, str(source.dir)) and size in (None, images.test.size)


def has_other_held_out(images: "ImageData", described: Mapping[str, Any] | None) -> bool:
    """Return whether a data set holds out other images than a run did, so that the run may
    have been trained on some of them.
    """
    if images.holdout is None or described is None or "hashes" not in described:
        return False
    return images.holdout.hash != described["hashes"]["holdout"]


def fitting_classes(
    subject: object, classes: Sequence[str] | None, outputs: int, images: "ImageData"
) -> list[str]:
    """Return the names of the classes of a network and of a data set that it is measured
    on.

    Args:
        subject: The network, for the error.
        classes: Names of its classes, None if they are unknown.
        outputs: Their number.
        images: The data set.

    Raises:
        UserError: if numbers or names differ. Classes that a data set numbers from 0, as
            one of arrays does, have no names.
    """
    theirs = list(images.classes)
    if len(theirs) != outputs:
        raise UserError(
            f"{subject} has {outputs} classes, the data set {images.name} has {len(theirs)}. "
            "Choose the data set that it was trained for with --data or --data-dir."
        )
    numbers = list(map(str, range(outputs)))
    ours = theirs if classes is None else list(classes)
    if theirs in (ours, numbers):
        return ours
    if ours != numbers:
        first = next(i for i in range(outputs) if ours[i] != theirs[i])
        raise UserError(
            f"{subject} and the data set {images.name} have different classes: class {first} is "
            f"{ours[first]!r} in the network and {theirs[first]!r} in the data set. Choose images "
            "of the same classes, in the same order, with --data or --data-dir."
        )
    return theirs


def hash_of(path: Path) -> str | None:
    """Return a hash of a file with a model; None if it is no file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return short_hash(file)


def of_run(
    run: Path, described: Mapping[str, Any], model: Path, checkpoint: str = "final"
) -> dict[str, Any] | None:
    """Return the metrics that `keras-preact evaluate` measured on a run's own test images.

    Args:
        run: The run directory.
        described: Content of its config.json.
        model: File of the network.
        checkpoint: Which network of the run this is.

    Returns:
        The metrics; None if there are none, or if they are of another network, of other
        images or of several views, as older versions wrote them to the same file.

    Raises:
        UserError: for a damaged file.
    """
    file = run / f"metrics{suffix(checkpoint, 'one', None)}.json"
    if not file.is_file():
        return None
    with reading(f"{file} is damaged"):
        metrics = json.loads(file.read_text())
        hashes = {"model": hash_of(model), "test": described.get("hashes", {}).get("test")}
        classes = described.get("classes")
        found_and_expected = [
            (Path(metrics.get("model", model)).name, model.name),
            (metrics.get("views", "one"), "one"),
            (metrics.get("data"), described["config"]["data"]["name"]),
            (metrics.get("images"), described.get("images", {}).get("test")),
            (metrics.get("per_class") and list(metrics["per_class"]), classes and list(classes)),
            *((metrics.get("hashes", {}).get(name), hashes[name]) for name in hashes),
        ]
    same = all(found == want for found, want in found_and_expected if None not in (found, want))
    return metrics if same else None
